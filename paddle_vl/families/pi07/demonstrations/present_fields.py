"""Which optional fields files of demonstrations have."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    bounded_lines,
    check_length,
    parse_object,
)
from paddle_vl.families.pi07.demonstrations.sample import OPTIONAL_FIELDS, DemonstrationShapes

Files = Sequence[str | os.PathLike]


def present_fields(
    files: Files | Mapping[str, Files],
    shapes: DemonstrationShapes,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[str]:
    """The optional fields that any line of any file has; the same on every process that reads them.

    Lines that are no JSON objects, or too long, say nothing here: whoever opens the files names
    them.

    Raises:
        RuntimeError: a file does not exist.
    """
    groups = files.values() if isinstance(files, Mapping) else [files]
    names: set[str] = set()
    for file in (file for group in groups for file in group):
        if not Path(file).is_file():
            raise RuntimeError(f"there is no data file {file}")
        for _, _, line in bounded_lines(Path(file), max_line_bytes):
            names |= _named(line, max_line_bytes)
    if names & set(shapes.goals.values()):
        names.add("subgoal")
    return [name for name in OPTIONAL_FIELDS if name in names]


def _named(line: bytes, max_line_bytes: int) -> set[str]:
    try:
        check_length(line, max_line_bytes)
        record = parse_object(line, "a demonstration", finite=False)
    except BadSampleError:
        return set()
    return {name for name, value in record.items() if value is not None}
