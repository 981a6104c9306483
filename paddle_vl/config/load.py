"""Reading a run's YAML file with `key=value` overrides, and writing it back.

Every problem found is reported, each with the key, where it was set (file and line, or the command
line) and what would be right. Relative paths in a configuration are relative to the current
directory, as in HF's trainers.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paddle_vl.config.bounded_yaml import read_document
from paddle_vl.config.schema import RunConfig, setting_descriptions
from paddle_vl.config.validate import rule_problems
from paddle_vl.files.named_errors import write_text

COMMAND_LINE = "command line"
_MAX_NAMES = 64
# Of a file that is no configuration, thousands of keys would be told, each compared with all names.
_MOST_TOLD = 100
_LONGEST_NAME = 200
Key = tuple[str | int, ...]


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: a YAML file with the sections model, data, parallel, train, logging.
        overrides: `section.name=value` with the value in YAML; the last one of a name holds.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: the file is not YAML, or settings are unknown, of a wrong type or at odds with
            each other; all of them are in the message.
    """
    values, places, problems = read_yaml(path)
    for override in overrides:
        problems += _apply_override(values, places, override)
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += _schema_problems(error, places, str(path))
    if config is not None:
        problems += rule_problems(config)
    raise_problems(problems)
    return config


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ValueError for all problems, if there is one."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f"{len(problems)} problems in the configuration:{lines}")


def save_run_config(config: RunConfig, path: str | Path) -> None:
    """Write all settings, defaults too, as a file that `load_run_config` reads back equal."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[Key, str], list[str]]:
    """The values of a YAML file, the place (file:line) of every key, and its duplicate keys.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: it is not UTF-8 or not YAML, not a mapping, or far larger than settings are, see
            `paddle_vl.config.bounded_yaml`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    try:
        values, node = read_document(text, str(path))
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    places: dict[Key, str] = {}
    problems: list[str] = []
    if node is not None:
        _note_places(node, (), str(path), places, problems)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} holds {_shown(values)}; a configuration has the sections "
            f"{', '.join(RunConfig.model_fields)}"
        )
    return values, places, problems


def _note_places(node: yaml.Node, key: Key, path: str, places: dict, problems: list[str]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            places[(*key, i)] = f"{path}:{item.start_mark.line + 1}"
            _note_places(item, (*key, i), path, places, problems)
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        inner = (*key, str(name.value))
        place = f"{path}:{name.start_mark.line + 1}"
        if inner in places:
            first = places[inner].rpartition(":")[2]
            problems.append(
                f"{place}: {_dotted(inner)} is set a second time (first in line {first}); "
                "remove one of them"
            )
        places[inner] = place
        _note_places(value, inner, path, places, problems)


def _apply_override(values: dict, places: dict[Key, str], override: str) -> list[str]:
    name, equals, text = override.partition("=")
    names = name.split(".")
    if not equals or not all(names):
        return [f"{COMMAND_LINE}: {override[:80]!r} is not an override; write section.name=value"]
    if any("\ud800" <= character <= "\udfff" for character in name):
        return [f"{COMMAND_LINE}: the name in {override[:80]!r} is not UTF-8 text; write it anew"]
    if len(names) > _MAX_NAMES:
        return [f"{COMMAND_LINE}: {override[:80]!r} has {len(names)} names; no setting is so deep"]
    try:
        value, _ = read_document(text, COMMAND_LINE)
    except ValueError as error:
        return [f"{COMMAND_LINE}: the value of {_shown(override)} is not valid YAML: {error}"]
    target = values
    for depth, part in enumerate(names[:-1], start=1):
        if target.get(part) is None:
            target[part] = {}
        if not isinstance(target[part], dict):
            return [
                f"{COMMAND_LINE}: {name} lies inside {'.'.join(names[:depth])}, which is "
                f"{_shown(target[part])}, not a mapping"
            ]
        target = target[part]
    target[names[-1]] = value
    for key in [key for key in places if key[: len(names)] == tuple(names)]:
        del places[key]
    places[tuple(names)] = COMMAND_LINE
    return []


def _schema_problems(error: ValidationError, places: dict[Key, str], path: str) -> list[str]:
    """One message per wrong setting; a setting of several allowed types has several errors."""
    settings = {tuple(name.split(".")) for name in setting_descriptions()}
    sections = {setting[:-1] for setting in settings}
    by_key: dict[Key, list[dict]] = {}
    for item in error.errors(include_url=False):
        key = item["loc"]
        known = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in settings), None)
        # Beyond a setting the location names a list item or the alternative of a union.
        is_inner = known is not None and known not in sections
        if is_inner and not all(isinstance(part, int) for part in key[len(known) :]):
            key = known
        by_key.setdefault(key, []).append(item)
    told = list(by_key.items())[:_MOST_TOLD]
    messages = [_message(key, items, places, path) for key, items in told]
    if len(by_key) > len(told):
        messages.append(f"{path}: {len(by_key) - len(told)} more settings are wrong")
    return messages


def _message(key: Key, items: list[dict], places: dict[Key, str], path: str) -> str:
    place = places.get(key)
    if place is None:
        # An override makes the sections that it lies in.
        inner = {place for own, place in places.items() if own[: len(key)] == key}
        outer = (places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places)
        place = COMMAND_LINE if inner == {COMMAND_LINE} else next(outer, path)
    name, first = _dotted(key), items[0]
    if first["type"] == "extra_forbidden":
        return f"{place}: {name} is not a setting; {_nearest(key)}"
    if first["type"] == "missing":
        meaning = setting_descriptions().get(name, ("", "a section of the configuration"))[1]
        return f"{place}: {name} is missing ({meaning})"
    wanted = " or ".join(dict.fromkeys(item["msg"].replace("Input", "it", 1) for item in items))
    return f"{place}: {name} is {_shown(first['input'])}; {wanted}"


def _nearest(key: Key) -> str:
    if len(key) == 1:
        return f"the sections are {', '.join(RunConfig.model_fields)}"
    section, leaf = ".".join(map(str, key[:-1])), str(key[-1])[:_LONGEST_NAME]

    def closeness(name: str) -> tuple[float, bool]:
        other_section, _, other = name.rpartition(".")
        return difflib.SequenceMatcher(None, leaf, other).ratio(), section == other_section

    best = max(setting_descriptions(), key=closeness)
    if closeness(best)[0] >= 0.6:
        return f"did you mean {best}?"
    names = [name.rpartition(".") for name in setting_descriptions()]
    return f"{section} has {', '.join(name for own, _, name in names if own == section)}"


def _dotted(key: Key) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, TypeError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
