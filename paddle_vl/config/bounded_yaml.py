"""Reading YAML with limits on depth and size, which are checked before values are constructed.

A few hundred bytes of YAML can expand to gigabytes through aliases of lists of aliases.
"""

import re
from typing import Any

import yaml

MAX_CHARACTERS = 1 << 20
_MAX_DEPTH = 64
_MAX_VALUES = 50_000
_MAX_INTEGER = 1 << 63
_INTEGER = "tag:yaml.org,2002:int"
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
# Raised by YAML's constructors for values that do not fit their tag or syntax.
_CONSTRUCTION_ERRORS = (
    ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError,
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, which reads 1e-4 as a number like YAML 1.2."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        # Values of each finished node, with aliases expanded, by id().
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == _MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(
                f"line {mark.line + 1}: lists and mappings are nested more than {_MAX_DEPTH} deep"
            )
        if len(self._sizes) > _MAX_VALUES:
            raise yaml.YAMLError(
                f"it has more than {_MAX_VALUES:,} values; settings never need so many"
            )
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        line = node.start_mark.line + 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.YAMLError(f"line {line}: an alias is inside its own anchor: write it out")
        if not is_alias:
            inner = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                inner = [item for pair in node.value for item in pair]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(item)] for item in inner)
        if self._sizes[id(node)] > _MAX_VALUES:
            raise yaml.YAMLError(
                f"line {line}: with its aliases expanded this has more than {_MAX_VALUES:,} "
                "values, which settings never need: write it out without aliases"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
            node.value = [(self._as_text(key), value) for key, value in node.value]
        return super().construct_mapping(node, deep)

    def _as_text(self, key: yaml.Node) -> yaml.Node:
        """A key that is a whole number as its text, which says the same."""
        if key.tag == _INTEGER and _PLAIN_INTEGER.fullmatch(key.value):
            return yaml.ScalarNode(self.DEFAULT_SCALAR_TAG, key.value, key.start_mark, key.end_mark)
        return key


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:float"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)


def read_document(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text and its root node; None and None for an empty text.

    Args:
        name: the text's name in error positions.

    All keys are texts: `{0: 1}` is `{"0": 1}`.

    Raises:
        ValueError: it is not YAML, too large, too deep, expands to too many values, or has another
            key, an integer beyond 64 bits, or a string that no path may contain.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"it has {len(text):,} characters; settings have at most {MAX_CHARACTERS:,}"
        )
    loader = None
    try:
        # Raises for characters that YAML does not allow.
        loader = _Loader(text)
        loader.name = name
        node = loader.get_single_node()
        if node is None:
            return None, None
        value = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("<unicode string>", name)) from error
    except _CONSTRUCTION_ERRORS as error:
        raise ValueError(f"a value is not what it looks like: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    _check_values(value, "")
    return value, node


def _check_values(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"{place or 'the top'} has the key {key!r}, which YAML does not read as text: "
                    "put it in quotes"
                )
            _check_values(key, place)
            _check_values(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple | set):
        for number, inner in enumerate(value):
            _check_values(inner, f"{place}[{number}]")
    elif isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(
                f"{place or 'the value'} is {value[:60]!r}: it has a character that no text or "
                "path may have"
            )
    elif isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError(
            f"{place or 'the value'} is a number of {value.bit_length()} bits; at most 63 are read"
        )
