"""Which optional fields files of demonstrations have."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddle_vl.data.policy.sample import OPTIONAL_FIELDS, DemonstrationShapes

Files = Sequence[str | os.PathLike]


def present_fields(files: Files | Mapping[str, Files], shapes: DemonstrationShapes) -> list[str]:
    """The optional fields that any line of any file has; the same on every process that reads them.

    Lines that are no JSON objects say nothing here: whoever opens the files names them.

    Raises:
        RuntimeError: a file does not exist.
    """
    groups = files.values() if isinstance(files, Mapping) else [files]
    names: set[str] = set()
    for file in (file for group in groups for file in group):
        if not Path(file).is_file():
            raise RuntimeError(f"there is no data file {file}")
        with Path(file).open("rb") as lines:
            for line in lines:
                names |= _named(line)
    if names & set(shapes.goals.values()):
        names.add("subgoal")
    return [name for name in OPTIONAL_FIELDS if name in names]


def _named(line: bytes) -> set[str]:
    try:
        record = json.loads(line)
    except ValueError:
        return set()
    if not isinstance(record, dict):
        return set()
    return {name for name, value in record.items() if value is not None}
