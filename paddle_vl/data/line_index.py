"""Samples in JSONL files: where their lines stand, and which of them cannot be used."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError

OnBadSample = Literal["fail", "skip"]


class LineIndex:
    """The usable lines of one or several files, numbered in file order.

    Cheap to pickle: it holds positions of lines, not lines.

    Attributes:
        skipped: kind of fault to the number of lines left out when opening.
        positions_N3: file number, byte offset and line number of every usable line, int64.
    """

    def __init__(
        self,
        files: Sequence[Path],
        check: Callable[[bytes, int], None],
        on_bad_sample: OnBadSample,
    ):
        """Open the files and check every line that is not empty.

        Args:
            check: takes a line and the number of its file, and raises `BadSampleError`.
            on_bad_sample: "fail" raises at the first bad line; "skip" leaves bad lines out.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file, or with "skip" the whole data, has no usable line.
        """
        if on_bad_sample not in get_args(OnBadSample):
            raise ValueError(f"on_bad_sample is {on_bad_sample!r}; use 'fail' or 'skip'")
        if not files:
            raise ValueError("no data file given: name at least one JSONL file")
        self._files = list(files)
        index: list[tuple[int, int, int]] = []
        bad: list[BadSampleError] = []
        for file_number, path in enumerate(self._files):
            if not path.is_file():
                raise RuntimeError(f"data file {path} does not exist")
            lines = 0
            offset = 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, start=1):
                    if line.strip():
                        lines += 1
                        try:
                            check(line, file_number)
                            index.append((file_number, offset, line_number))
                        except BadSampleError as error:
                            bad.append(error.at(f"{path}:{line_number}"))
                    offset += len(line)
            if not lines:
                raise ValueError(f"data file {path} is empty: one JSON object per line is needed")
        if bad and on_bad_sample == "fail":
            raise _first_of(bad)
        self.skipped = Counter(error.kind for error in bad)
        if not index:
            raise ValueError(
                f"all {len(bad)} samples are bad: {dict(self.skipped)}; the first is {bad[0]}"
            )
        self.positions_N3 = np.array(index, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions_N3)

    def line(self, number: int) -> tuple[bytes, int]:
        """A line, and the number of its file."""
        file_number, offset, _ = self.positions_N3[number]
        with self._files[file_number].open("rb") as file:
            file.seek(offset)
            return file.readline(), int(file_number)

    def place(self, number: int) -> str:
        """Where a line stands: `file:line`."""
        file_number, _, line_number = self.positions_N3[number]
        return f"{self._files[file_number]}:{line_number}"

    @property
    def fingerprint(self) -> int:
        """Changes when lines are added, removed, or change their length."""
        return zlib.crc32(self.positions_N3.tobytes())


def parse_object(line: bytes, needed: str) -> dict[str, Any]:
    """The JSON object that a line holds.

    Args:
        needed: what is to be in it, for the message.

    Raises:
        BadSampleError: broken JSON, or something else than an object.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        reason = f"broken JSON: {error}; each line must be one whole JSON object"
        raise BadSampleError("broken_json", reason) from error
    if not isinstance(record, dict):
        raise BadSampleError(
            "broken_json",
            f"the line holds a JSON {type(record).__name__}; an object with {needed} is needed",
        )
    return record


def _first_of(bad: Sequence[BadSampleError]) -> BadSampleError:
    """The first fault, which also tells how many there are."""
    if len(bad) == 1:
        return bad[0]
    first = bad[0]
    more = f" ({len(bad) - 1} more bad samples follow, the next at {bad[1].place}"
    more += "; data.on_bad_sample: skip leaves them out)"
    return BadSampleError(first.kind, first.reason + more, first.place)
