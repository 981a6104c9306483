"""Samples in JSONL files: where their lines stand, and which of them cannot be used."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.bad_sample import BadSampleError, sample_at

OnBadSample = Literal["fail", "skip"]

# Tokenising takes some 400 bytes of memory per byte of text.
MAX_LINE_BYTES = 1 << 20


class FileContent(NamedTuple):
    """Hashes of what a run takes from one data file; JSON values.

    Attributes:
        file: its path.
        lines: of the bytes of its usable lines.
        media: of the sizes of the images and videos that they name. Their times do not count: a
            copy of the data on another disk has other ones.
    """

    file: str
    lines: str
    media: str


class LineIndex:
    """The usable lines of one or several files, numbered in file order.

    Cheap to pickle: it holds positions of lines, not lines.

    Attributes:
        skipped: kind of fault to the number of lines left out when opening.
        positions_N3: file number, byte offset and line number of every usable line, int64.
        contents: of every file. The hash is made of lines that are read anyway to check them, at
            more than 5 GB/s, so nothing is kept from one opening to the next.
    """

    def __init__(
        self,
        files: Sequence[Path],
        check: Callable[[bytes, int], Iterable[int]],
        on_bad_sample: OnBadSample,
        max_line_bytes: int = MAX_LINE_BYTES,
    ):
        """Open the files and check every line that is not empty.

        Args:
            check: takes a line and the number of its file, raises `BadSampleError`, and returns
                the sizes of the files that the line names.
            on_bad_sample: "fail" raises at the first bad line; "skip" leaves bad lines out.
            max_line_bytes: a longer line is bad, and is not read into memory.

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
        self._max_line_bytes = max_line_bytes
        index: list[tuple[int, int, int]] = []
        bad: list[BadSampleError] = []
        self.contents: list[FileContent] = []
        for file_number, path in enumerate(self._files):
            lines = 0
            line_hash, media_hash = xxh3_64(), xxh3_64()
            for line_number, offset, line in bounded_lines(path, max_line_bytes):
                lines += 1
                try:
                    with sample_at(f"{path}:{line_number}"):
                        check_length(line, max_line_bytes)
                        sizes = np.array([*check(line, file_number)], dtype="<i8")
                except BadSampleError as error:
                    # Without its traceback, which would keep every bad line in memory.
                    bad.append(BadSampleError(error.kind, error.reason, error.place))
                    continue
                index.append((file_number, offset, line_number))
                line_hash.update(line)
                media_hash.update(sizes.tobytes())
            if not lines:
                raise ValueError(f"data file {path} is empty: one JSON object per line is needed")
            hashes = line_hash.hexdigest(), media_hash.hexdigest()
            self.contents.append(FileContent(str(path), *hashes))
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
            return file.readline(self._max_line_bytes + 1), int(file_number)

    def place(self, number: int) -> str:
        """Where a line stands: `file:line`."""
        file_number, _, line_number = self.positions_N3[number]
        return f"{self._files[file_number]}:{line_number}"

    @property
    def fingerprint(self) -> int:
        """Changes when lines are added, removed or edited, or a file that they name changes its
        size."""
        hashes = "".join(content.lines + content.media for content in self.contents)
        return xxh3_64(self.positions_N3.tobytes() + hashes.encode()).intdigest()

    @property
    def positions_fingerprint(self) -> int:
        """Changes when lines are added, removed, or change their length; what checkpoints held
        before they held hashes of the contents."""
        return zlib.crc32(self.positions_N3.tobytes())


class SamplesOfLines:
    """What a dataset says of the lines that its samples stand in.

    Subclasses set `_lines`.
    """

    _lines: LineIndex

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, number: int) -> str:
        """Where a sample stands: `file:line`."""
        return self._lines.place(number)

    @property
    def skipped(self) -> Counter[str]:
        """Kind of fault to the number of samples left out when opening."""
        return self._lines.skipped

    @property
    def fingerprint(self) -> int:
        """Changes when samples are added, removed or edited; see `LineIndex`."""
        return self._lines.fingerprint

    @property
    def positions_fingerprint(self) -> int:
        """See `LineIndex`."""
        return self._lines.positions_fingerprint

    @property
    def contents(self) -> list[FileContent]:
        """Hashes of what is taken from every file."""
        return self._lines.contents


def bounded_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of the lines of a file that are not empty.

    Of a line longer than `max_line_bytes` come the first bytes, one more than that.

    Raises:
        RuntimeError: the file does not exist.
    """
    if not path.is_file():
        raise RuntimeError(f"data file {path} does not exist")
    with path.open("rb") as file:
        offset = number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            length = len(line)
            if length > max_line_bytes and not line.endswith(b"\n"):
                length += _rest_of_line(file, max_line_bytes)
            if line.strip():
                yield number, offset, line
            offset += length


def _rest_of_line(file: BinaryIO, at_once: int) -> int:
    """Bytes to the end of the line, read away."""
    length = 0
    while part := file.readline(at_once):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def check_length(line: bytes, max_line_bytes: int) -> None:
    """Refuse a line before anything is made of it.

    Raises:
        BadSampleError: it has more bytes than that.
    """
    if len(line) > max_line_bytes:
        raise BadSampleError(
            "line_too_long",
            f"the line has more than {max_line_bytes} bytes, data.max_line_bytes: shorten the "
            "sample, or raise the setting (tokenising takes some 400 times a line's bytes of "
            "memory)",
        )


def parse_object(line: bytes, needed: str, *, finite: bool = True) -> dict[str, Any]:
    """The JSON object that a line holds. A byte order mark in front of it is passed over.

    Args:
        needed: what is to be in it, for the message.
        finite: refuse NaN, Infinity and numbers beyond a float's range, wherever they stand.

    Raises:
        BadSampleError: broken JSON, text that is no Unicode, or something else than an object.
    """
    try:
        text = line.decode("utf-8-sig")
        record = (_FINITE if finite else _ANY).decode(text)
    except UnicodeDecodeError as error:
        reason = f"the line is not UTF-8 ({error.reason} at byte {error.start}); convert the file"
        raise BadSampleError("broken_json", reason) from error
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deep" if isinstance(error, RecursionError) else error
        reason = f"broken JSON: {why}; each line must be one whole JSON object"
        raise BadSampleError("broken_json", reason) from error
    if not isinstance(record, dict):
        raise BadSampleError(
            "broken_json",
            f"the line holds a JSON {type(record).__name__}; an object with {needed} is needed",
        )
    # Nothing else than an escape can bring in half of a pair.
    if "\\ud" in text or "\\uD" in text:
        check_unicode(json.dumps(record, ensure_ascii=False))
    return record


def check_unicode(text: str) -> None:
    """Refuse what JSON's escapes can spell and UTF-8 cannot.

    Raises:
        BadSampleError: half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSampleError(
            "bad_text",
            f"the text contains half of a surrogate pair ({text[error.start]!a}), which is no "
            "character: write the character itself, or remove the half",
        ) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"it contains {name}, which is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ValueError(f"the number {digits[:40]} is beyond the range of a float")
    return value


# Made once: json.loads with hooks makes a decoder for every line.
_FINITE = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite_float)
_ANY = json.JSONDecoder()


def _first_of(bad: Sequence[BadSampleError]) -> BadSampleError:
    """The first fault, which also tells how many there are."""
    if len(bad) == 1:
        return bad[0]
    first = bad[0]
    more = f" ({len(bad) - 1} more bad samples follow, the next at {bad[1].place}"
    more += "; data.on_bad_sample: skip leaves them out)"
    return BadSampleError(first.kind, first.reason + more, first.place)
