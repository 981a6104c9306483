"""Samples in JSONL files: an index of usable lines, and the error for an unusable sample."""

import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from xxhash import xxh3_64

from paddle_vl.config.data_sources import is_container

OnBadSample = Literal["fail", "skip"]

# Tokenizing takes about 400 bytes of memory per byte of text.
MAX_LINE_BYTES = 1 << 20
# Errors of malformed samples besides BadSampleError: numbers out of range, deep nesting, invalid
# Unicode, impossible paths. Not MemoryError, which is the machine's limit.
HOSTILE = (ValueError, ArithmeticError, RecursionError, OSError)
# Reasons quote names from the line, which may be very long.
_LONGEST_REASON = 2000


class BadSampleError(ValueError):
    """A sample that cannot be used.

    Raised without a place, which `sample_at` adds. It can be pickled, so that a worker's error
    reaches the main process unchanged.

    Attributes:
        kind: short name of the fault (`broken_json`, `missing_image`, ...), for counting.
        reason: message.
        place: `file:line`, None until it is known.
    """

    def __init__(self, kind: str, reason: str, place: str | None = None):
        super().__init__(kind, reason, place)
        self.kind = kind
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason


@contextmanager
def sample_at(place: str | Callable[[], str]) -> Iterator[None]:
    """Turn errors of reading a sample into a `BadSampleError` with its place (`file:line`).

    A place that takes a search through its file is a function, called after an error alone.

    Unforeseen errors become bad samples too, so that a run that skips those goes on. A
    `RuntimeError`, which is a fault of the machine, passes unchanged.
    """
    try:
        yield
    except BadSampleError as error:
        reason = error.reason
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}... ({len(reason)} characters)"
        raise BadSampleError(error.kind, reason, _text_of(place)) from error
    except HOSTILE as error:
        reason = f"the sample cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise BadSampleError("unreadable_sample", reason, _text_of(place)) from error


def _text_of(place: str | Callable[[], str]) -> str:
    return place if isinstance(place, str) else place()


class FileContent(NamedTuple):
    """Hashes of the content of one data file; JSON values.

    Attributes:
        file: path of the file.
        lines: hash of the bytes of its usable lines.
        media: hash of the sizes of their images and videos, without modification times, which
            differ in a copy of the data; empty if not all of them were looked at.
    """

    file: str
    lines: str
    media: str


class FileLines(NamedTuple):
    """What reading a data file found.

    Attributes:
        places: byte offset and line number of each usable line; `[N, 2]` int64.
        bad: errors of the others.
    """

    places: np.ndarray
    content: FileContent
    bad: Sequence[BadSampleError] = ()


class LineIndex:
    """Base of datasets whose samples are the usable lines of files, numbered in file order.

    It has positions of lines, not the lines, so that it is cheap to pickle.

    Attributes:
        files: the files.
        on_bad_sample: "fail" or "skip".
        skipped: number of lines left out when opening, by kind of fault.
        positions_N3: file number, byte offset and line number of each usable line; `[N, 3]` int64.
        contents: hashes of every file.
    """

    def __init__(
        self,
        files: Sequence[Path],
        check: Callable[[bytes, int], Iterable[int]],
        on_bad_sample: OnBadSample,
        max_line_bytes: int = MAX_LINE_BYTES,
        most_checked: int | None = None,
    ):
        """Read the files and check the lines that are not empty.

        Args:
            check: takes a line and its file number, returns the sizes in bytes of the files that
                the line names, and raises `BadSampleError`.
            on_bad_sample: "fail" raises at the first bad line; "skip" leaves bad lines out.
            max_line_bytes: a longer line is bad, and is not read into memory.
            most_checked: lines of each file that are checked, the first ones; None for all.

        Raises:
            RuntimeError: a file does not exist.
            BadSampleError: with "fail", the first bad line, as `file:line: reason`.
            ValueError: a file is empty or of another kind, or no line of all files is usable.
        """
        if on_bad_sample not in get_args(OnBadSample):
            raise ValueError(f"on_bad_sample is {on_bad_sample!r}; use 'fail' or 'skip'")
        self.on_bad_sample: OnBadSample = on_bad_sample
        if not files:
            raise ValueError("no data file given: name at least one JSONL file")
        self.files = list(files)
        self._max_line_bytes = max_line_bytes
        found = [self._read_file(number, check, most_checked) for number in range(len(files))]
        self.contents: list[FileContent] = [one.content for one in found]
        bad = [error for one in found for error in one.bad]
        if bad and on_bad_sample == "fail":
            first, more = bad[0], ""
            if len(bad) > 1:
                more = (
                    f" ({len(bad) - 1} more bad samples follow, the next at {bad[1].place}; "
                    "data.on_bad_sample: skip leaves them out)"
                )
            raise BadSampleError(first.kind, first.reason + more, first.place)
        self.skipped = Counter(error.kind for error in bad)
        numbered = [np.insert(each.places, 0, n, axis=1) for n, each in enumerate(found)]
        self.positions_N3 = np.concatenate(numbered)
        if not len(self.positions_N3):
            raise ValueError(
                f"all {len(bad)} samples are bad: {dict(self.skipped)}; the first is {bad[0]}"
            )

    def _read_file(
        self, number: int, check: Callable[[bytes, int], Iterable[int]], most_checked: int | None
    ) -> FileLines:
        """Read a file and check its lines; arguments and errors as those of opening."""
        path, places, bad, lines = self.files[number], array("q"), [], 0
        if is_container(path):
            raise ValueError(
                f"data file {path} is no JSONL file, which is needed here: write one JSON "
                "object per line (only data.train and data.eval of Qwen3-VL read other files)"
            )
        line_hash, media_hash = xxh3_64(), xxh3_64()
        for line_number, offset, line in bounded_lines(path, self._max_line_bytes):
            lines += 1
            is_checked = most_checked is None or lines <= most_checked
            try:
                with sample_at(f"{path}:{line_number}"):
                    check_length(line, self._max_line_bytes)
                    sizes = [*check(line, number)] if is_checked else ()
            except BadSampleError as error:
                # A copy without traceback, which would keep the line in memory.
                bad.append(BadSampleError(error.kind, error.reason, error.place))
                continue
            places.extend((offset, line_number))
            line_hash.update(line)
            if is_checked:
                media_hash.update(np.array(sizes, dtype="<i8").tobytes())
        if not lines:
            raise ValueError(f"data file {path} is empty: one JSON object per line is needed")
        is_whole = most_checked is None or lines <= most_checked
        media = media_hash.hexdigest() if is_whole else ""
        content = FileContent(str(path), line_hash.hexdigest(), media)
        return FileLines(np.array(places, dtype=np.int64).reshape([-1, 2]), content, bad)

    def __len__(self) -> int:
        return len(self.positions_N3)

    def line(self, number: int) -> tuple[bytes, int]:
        """The bytes of a line, and the number of its file."""
        file_number, offset, _ = self.positions_N3[number]
        with self.files[file_number].open("rb") as file:
            file.seek(offset)
            return file.readline(self._max_line_bytes + 1), int(file_number)

    def place(self, number: int) -> str:
        """Location of a line: `file:line`."""
        file_number, _, line_number = self.positions_N3[number]
        return f"{self.files[file_number]}:{line_number}"

    @property
    def fingerprint(self) -> int:
        """Hash that changes when lines are added, removed or edited, or media change their size."""
        hashes = "".join(content.lines + content.media for content in self.contents)
        return xxh3_64(self.positions_N3.tobytes() + hashes.encode()).intdigest()

    @property
    def positions_fingerprint(self) -> int:
        """Hash of positions alone, as older checkpoints store it; blind to some edits."""
        return zlib.crc32(self.positions_N3.tobytes())


def bounded_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and bytes of every line of a file that is not empty.

    A line longer than `max_line_bytes` is cut to `max_line_bytes + 1` bytes.

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
            rest = line
            while length > max_line_bytes and rest and not rest.endswith(b"\n"):
                rest = file.readline(max_line_bytes)
                length += len(rest)
            if line.strip():
                yield number, offset, line
            offset += length


def check_length(line: bytes, max_line_bytes: int) -> None:
    """Raise a BadSampleError for a line of more bytes."""
    if len(line) > max_line_bytes:
        raise BadSampleError(
            "line_too_long",
            f"the line has more than {max_line_bytes} bytes (data.max_line_bytes): shorten the "
            "sample, or raise the setting (tokenizing takes about 400 bytes of memory per byte)",
        )


def parse_object(line: bytes, needed: str, *, finite: bool = True) -> dict[str, Any]:
    """The JSON object of a line; a byte order mark in front is ignored.

    Args:
        needed: keys that the object needs, for the message.
        finite: refuse NaN, Infinity and numbers out of a float's range.

    Raises:
        BadSampleError: broken JSON, a key that occurs twice, invalid Unicode, or no JSON object.
    """
    try:
        text = line.decode("utf-8-sig")
        record = (_FINITE if finite else _ANY).decode(text)
    except UnicodeDecodeError as error:
        reason = f"the line is not UTF-8 ({error.reason} at byte {error.start}); convert the file"
        raise BadSampleError("broken_json", reason) from error
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deep" if isinstance(error, RecursionError) else error
        reason = f"broken JSON: {why}; each line must be one complete JSON object"
        raise BadSampleError("broken_json", reason) from error
    if not isinstance(record, dict):
        raise BadSampleError(
            "broken_json",
            f"the line holds a JSON {type(record).__name__}; an object with {needed} is needed",
        )
    # Only a JSON escape can contain half of a surrogate pair.
    if "\\ud" in text or "\\uD" in text:
        check_unicode(json.dumps(record, ensure_ascii=False))
    return record


def parse_value(text: str) -> Any:
    """The value of a JSON text within a row, held to the same rules as a line.

    Raises:
        ValueError: broken JSON, NaN or a number out of range, or a key that occurs twice.
    """
    try:
        return _FINITE.decode(text)
    except RecursionError as error:
        raise ValueError("brackets are nested too deep") from error


def check_unicode(text: str) -> None:
    """Raise a BadSampleError for half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSampleError(
            "bad_text",
            f"the text contains half of a surrogate pair ({text[error.start]!a}), which is no "
            "character: write the character itself, or remove it",
        ) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"it contains {name}, which is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ValueError(f"the number {digits[:40]} is beyond the range of a float")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of equal keys Python would keep the last without a word."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return values


# Built once: json.loads with hooks builds a decoder per call.
_FINITE = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite_float, object_pairs_hook=_without_duplicates
)
_ANY = json.JSONDecoder(object_pairs_hook=_without_duplicates)
