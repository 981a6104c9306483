"""A row of any format to its canonical form."""

from collections.abc import Callable, Mapping
from typing import Any

from paddle_vl.data.formats.canonical import CanonicalRow
from paddle_vl.data.formats.erniekit import read_erniekit
from paddle_vl.data.formats.instruction import read_alpaca, read_query_response
from paddle_vl.data.formats.messages import canonical_row
from paddle_vl.data.formats.prompt_completion import read_prompt_completion
from paddle_vl.data.formats.recognise import fitting_format
from paddle_vl.data.formats.row_settings import RowSettings, renamed
from paddle_vl.data.formats.sharegpt import read_llava, read_messages, read_sharegpt
from paddle_vl.data.jsonl import BadSampleError

# Each gives the row in the form of `messages`.
_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "llava": read_llava,
    "erniekit": read_erniekit,
    "prompt_completion": read_prompt_completion,
    "alpaca": read_alpaca,
    "query_response": read_query_response,
}
# Formats whose tools refuse media without a tag.
_NEEDS_TAGS = ("sharegpt", "llava")
_DEFAULT = RowSettings()


def to_canonical(
    row: Mapping[str, Any], settings: RowSettings = _DEFAULT, *, format: str | None = None
) -> CanonicalRow:
    """The canonical form of a row; whether it has a target is for `check_targets`.

    Args:
        row: JSON types, and for media also bytes and objects in memory.
        format: name from `FORMATS`, which every row of a source has; None recognises the row's own.

    Raises:
        BadSampleError: the row has another format, or a value that is unusable or means something
            that is not supported; says the format, what is wrong and what to do.
        ValueError: there is no such format.
    """
    name = format
    try:
        row = renamed(row, settings) if isinstance(row, Mapping) else row
        name = fitting_format(row, format)
        return canonical_row(_READERS[name](row), settings, name, name in _NEEDS_TAGS)
    except BadSampleError as error:
        read_as = f"a row of format {name}: " if name else ""
        raise BadSampleError(error.kind, read_as + error.reason) from error
