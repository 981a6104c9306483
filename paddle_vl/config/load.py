"""Reading a run's YAML file with `key=value` overrides, and writing it back.

Every problem found is reported, each with the key, where it was set (file and line, or the command
line) and what would be right. Relative paths in a configuration are relative to the current
directory, as in HF's trainers.
"""

import json
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paddle_vl.config.bounded_yaml import read_document
from paddle_vl.config.data_sources import PATH, ROWS, SOURCE, SourceConfig
from paddle_vl.config.family_settings import Descriptions, Key, own_settings, settings_class_of
from paddle_vl.config.peer_names import not_needed, setting_for
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.config.schema import RunConfig
from paddle_vl.config.section import Section, flatten, setting_descriptions
from paddle_vl.config.validate import rule_problems
from paddle_vl.files.stored_settings import needed
from paddle_vl.files.text_file import write_text

AnySection = TypeVar("AnySection", bound=Section)
COMMAND_LINE = "command line"
# Settings that name a model: a folder, or a name on a hub.
MODEL_SETTINGS = ("model.pretrained", "data.processor", "preference.ref_model", "grpo.ref_model")
_MAX_NAMES = 64
# A file that is not a configuration may have thousands of keys, each compared with all names.
_MAX_REPORTED = 100
_LONGEST_NAME = 200
_MAX_HINTS = 5
_SOURCES = ((ROWS, "a source of rows", RowSourceConfig), (SOURCE, "a source", SourceConfig))


def load_run_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    find: Callable[[str, str], str] = lambda setting, value: value,
) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: a YAML file with the sections model, data, parallel, train, logging.
        overrides: `section.name=value` with the value in YAML; the last one of a name wins.
        find: takes the name and value of each of `MODEL_SETTINGS` and returns its folder.

    Returns:
        The settings of the family that the model belongs to: a subclass of `RunConfig`.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: the file is not YAML, or settings are unknown, belong to another family, have a
            wrong type or contradict each other; all of them are in the message.
    """
    values, places, problems = read_yaml(path)
    for override in overrides:
        problems += _apply_override(values, places, override)
    for setting in MODEL_SETTINGS:
        section, name = setting.split(".")
        inside = values.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), str):
            inside[name] = find(setting, inside[name])
    run = settings_class_of(values)
    model = values.get("model")
    if isinstance(model, dict) and model.get("pretrained") is None:
        name = run.backbone_name(model.get("config"))
        model |= {} if name is None else {"pretrained": find("model.pretrained", name)}
    values, foreign = own_settings(values, run)
    problems += [
        f"{_place(key, places, str(path))}: {_dotted(key)} applies only to {families}, and the "
        f"model is a {run.family}: remove it"
        for key, families in foreign.items()
    ]
    try:
        config = run.model_validate(values)
    except ValidationError as error:
        raise_problems([*problems, *_schema_problems(error, run, places, str(path))])
        raise
    raise_problems([*problems, *rule_problems(config)])
    return config


def load_section(path: str | Path, section: type[AnySection]) -> AnySection:
    """Read a YAML file with the settings of one section.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: as of `load_run_config`.
    """
    values, places, problems = read_yaml(path)
    try:
        found = section.model_validate(values)
    except ValidationError as error:
        raise_problems([*problems, *_schema_problems(error, section, places, str(path))])
        raise
    raise_problems(problems)
    return found


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ValueError that lists all problems, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f"{len(problems)} problems in the configuration:{lines}")


def save_run_config(config: RunConfig, path: str | Path) -> None:
    """Write all settings, defaults included, to a file that `load_run_config` reads back equal."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[Key, str], list[str]]:
    """Read a YAML file.

    Returns:
        The values, the place (file:line) of every key, and a message for every duplicate key.

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
    for depth, section in enumerate(names[:-1], start=1):
        if target.get(section) is None:
            target[section] = {}
        if not isinstance(target[section], dict):
            return [
                f"{COMMAND_LINE}: {name} lies inside {'.'.join(names[:depth])}, which is "
                f"{_shown(target[section])}, not a mapping"
            ]
        target = target[section]
    target[names[-1]] = value
    for key in [key for key in places if key[: len(names)] == tuple(names)]:
        del places[key]
    places[tuple(names)] = COMMAND_LINE
    return []


def _schema_problems(
    error: ValidationError, run: type[Section], places: dict[Key, str], path: str
) -> list[str]:
    """One message per wrong setting; a setting of several allowed types has several errors."""
    described = setting_descriptions(run)
    settings = {tuple(name.split(".")) for name in described}
    sections = {setting[:-1] for setting in settings}
    by_key: dict[Key, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        key, is_entry = item["loc"], SOURCE in item["loc"]
        if is_entry:
            # In an entry of a source only up to pydantic's name of a type.
            first = key.index(SOURCE)
            inside = takewhile(lambda each: str(each).isidentifier(), key[first + 1 :])
            key = (*key[:first], *inside)
        key = tuple(name for name in key if name != PATH)
        known = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in settings), None)
        # After the setting's key the location has list items or alternatives of a union.
        inside = () if known is None or known in sections else key[len(known) :]
        if known is not None and not is_entry and not all(isinstance(i, int) for i in inside):
            key = known
        by_key.setdefault(key, []).append(item)
    reported = list(by_key.items())[:_MAX_REPORTED]
    messages = [
        f"{_place(key, places, path)}: {_message(key, items, run, described)}"
        for key, items in reported
    ]
    if len(by_key) > len(reported):
        messages.append(f"{path}: {len(by_key) - len(reported)} more settings are wrong")
    return messages


def _place(key: Key, places: dict[Key, str], path: str) -> str:
    """Where a key was set; for a missing key, where its section was set."""
    if key in places:
        return places[key]
    # An override creates the sections around it, which have no place of their own.
    inner = {place for other, place in places.items() if other[: len(key)] == key}
    outer = (places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places)
    return COMMAND_LINE if inner == {COMMAND_LINE} else next(outer, path)


def _message(
    key: Key, items: list[ErrorDetails], run: type[Section], described: Descriptions
) -> str:
    name, first = _dotted(key), items[0]
    if first["type"] in ("extra_forbidden", "missing"):
        what = "is missing" if first["type"] == "missing" else "is not an entry of a source"
        for tag, whose, kind in _SOURCES:
            if tag in first["loc"]:
                return f"{name} {what}; {whose} has {', '.join(kind.model_fields)}"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting; {_nearest(key, first['input'], run, described)}"
    if first["type"] == "missing":
        meaning = described.get(name, ("", "a section of the configuration"))[1]
        return f"{name} is missing ({meaning})"
    wanted = " or ".join(dict.fromkeys(map(needed, items)))
    return f"{name} is {_shown(first['input'])}; {wanted}"


def _nearest(key: Key, value: Any, run: type[Section], described: Descriptions) -> str:
    name = ".".join(str(part)[:_LONGEST_NAME] for part in key)
    if (reason := not_needed(name)) is not None:
        return f"{reason}: leave it out"
    if (setting := setting_for(name, described)) is not None:
        return f"did you mean {setting}?"
    # A section of another trainer.
    inside = islice(flatten(value if isinstance(value, dict) else {}, f"{name}."), _MAX_HINTS)
    hints = [(each, setting_for(each[:_LONGEST_NAME], described)) for each in inside]
    if hints := [f"{setting} for {each}" for each, setting in hints if setting is not None]:
        return f"did you mean {', '.join(hints)}?"
    section = ".".join(map(str, key[:-1]))
    own = [leaf for outer, _, leaf in (n.rpartition(".") for n in described) if outer == section]
    if own:
        return f"{section} has {', '.join(own)}"
    return f"the sections are {', '.join(run.model_fields)}"


def _dotted(key: Key) -> str:
    name = "".join(f"[{item}]" if isinstance(item, int) else f".{item}" for item in key).lstrip(".")
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, TypeError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
