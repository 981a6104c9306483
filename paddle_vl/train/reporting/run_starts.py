"""Reading run.json, which `paddle_vl.train.reporting.run_record` writes."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from paddle_vl.files.json_file import read_json_object, shown

RUN_FILE = "run.json"
_REMEDY = "mend it, or move it away"


def read_starts(output_dir: Path) -> list[dict[str, Any]]:
    """The entries of a run's run.json, oldest first; none without the file.

    Raises:
        RuntimeError: the file is damaged, or an entry holds something else than a run writes; file,
            entry, key and value are named.
    """
    path = output_dir / RUN_FILE
    if not path.exists():
        return []
    starts = read_json_object(path, "what a run writes", _REMEDY).get("starts")
    if not isinstance(starts, list):
        raise RuntimeError(
            f"{path} is not what a run writes: 'starts' is {shown(starts)}, not a list; {_REMEDY}"
        )
    for number, start in enumerate(starts, start=1):
        if (problem := _problem(start)) is not None:
            raise RuntimeError(f"{path}: start {number} {problem}; {_REMEDY}")
    return starts


def _problem(start: Any) -> str | None:
    if not isinstance(start, dict):
        return f"is {shown(start)}, not an object"
    for name, (is_right, needed) in _KINDS.items():
        value = start.get(name)
        if value is not None and not is_right(value):
            return f"has {name} {shown(value)}; {needed} is needed"
    begin, end = start.get("started"), start.get("ended")
    if end is not None and begin is None:
        return "has ended, but no 'started'"
    if end is not None and _has_zone(begin) != _has_zone(end):
        return f"has started {begin!r} and ended {end!r}, of which one has no time zone"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_time(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (ValueError, TypeError):
        return False
    return True


def _has_zone(text: str) -> bool:
    return datetime.fromisoformat(text).tzinfo is not None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_revision(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("revision"))


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _are_settings(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_count(degree) for name, degree in value.items() if name.endswith("_degree")
    )


def _are_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())


# Of each key that an entry may have, what it holds where it is not null.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("started", "ended"), (_is_time, "a time, as 2026-11-21T10:00:00+00:00,")),
    **dict.fromkeys(("first_step", "last_step", "num_processes"), (_is_count, "a number from 0")),
    **dict.fromkeys(("command", "overrides"), (_are_texts, "a list of texts")),
    **dict.fromkeys(("folder", "host", "platform", "device", "device_name"), (_is_text, "a text")),
    **dict.fromkeys(("git", "paddle_vl_git"), (_is_revision, "an object with a revision")),
    "versions": (_are_versions, "an object of texts"),
    "parallel": (_are_settings, "an object with degrees"),
    "settings": (_are_sections, "an object with sections"),
}
