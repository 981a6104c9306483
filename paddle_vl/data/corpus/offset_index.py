"""Offsets of the documents of a shard, found once and kept in a file.

An index file has a header of 64 bytes and `count + 1` offsets (uint64, little endian): document i
lies in bytes `offsets[i]` to `offsets[i + 1]`. Readers fetch two offsets at a time, so that memory
does not grow with the number of documents.

It lies in `.paddle_vl/` beside the data, or in a cache folder if that cannot be written, and is
built again when size or modification time of its shard change. Several processes may ask for the
same index; one builds it.
"""

import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"PVLIDX01"
# Magic, size and time of the shard, documents, hash of the content, whether row numbers are lines.
_HEADER = struct.Struct("<8sQQQQQ16x")
FOLDER = ".paddle_vl"
_WORD = 8


@dataclass(frozen=True)
class Offsets:
    """What reading a shard finds.

    Attributes:
        offsets: `[count + 1]` uint64.
        content: 64-bit hash that changes with the documents.
        rows_are_lines: whether document i is line i + 1 of its file.
    """

    offsets: np.ndarray
    content: int
    rows_are_lines: bool = True


@dataclass(frozen=True)
class IndexFile:
    """An index that exists.

    Attributes:
        path: its file.
        count: documents.
        content, rows_are_lines: see `Offsets`.
    """

    path: str
    count: int
    content: int
    rows_are_lines: bool

    def span(self, descriptor: int, row: int) -> tuple[int, int]:
        """First and last byte of a document.

        Args:
            descriptor: the opened index file.
        """
        raw = os.pread(descriptor, 2 * _WORD, _HEADER.size + row * _WORD)
        begin, end = struct.unpack("<QQ", raw)
        return begin, end


class CacheFolders:
    """Where indexes and local copies of data files lie.

    Args:
        chosen: folder for all of them (data.cache); None for one beside each file, or the user's
            cache folder where that cannot be written.
    """

    def __init__(self, chosen: str | None = None):
        self.chosen = chosen

    def candidates(self, file: Path) -> list[Path]:
        """Paths for what belongs to a file, without suffix, in the order of preference."""
        resolved = file.resolve()
        digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:16]
        elsewhere = f"{digest}-{file.name}"
        if self.chosen is not None:
            return [Path(self.chosen) / elsewhere]
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return [resolved.parent / FOLDER / file.name, Path(base) / "paddle_vl" / elsewhere]

    def existing(self, file: Path, suffix: str) -> Iterator[Path]:
        """Existing files that belong to a file."""
        for stem in self.candidates(file):
            if (found := stem.with_name(stem.name + suffix)).is_file():
                yield found

    def writable(self, file: Path, suffix: str) -> Path:
        """The first candidate whose folder can be written.

        Raises:
            RuntimeError: there is none.
        """
        problems = []
        for stem in self.candidates(file):
            try:
                stem.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problems.append(str(error))
                continue
            if os.access(stem.parent, os.W_OK | os.X_OK):
                return stem.with_name(stem.name + suffix)
            problems.append(f"{stem.parent} cannot be written")
        raise RuntimeError(
            f"there is no folder for the index of {file} ({'; '.join(problems)}): set data.cache "
            "to a folder that can be written"
        )


def index_of(file: Path, folders: CacheFolders, build: Callable[[], Offsets]) -> IndexFile:
    """The index of a shard, built and written if there is no valid one.

    Raises:
        RuntimeError: no folder can be written, or the shard cannot be read.
    """
    state = file_state(file)
    for path in folders.existing(file, ".index"):
        if (found := _read_header(path, state)) is not None:
            return found
    path = folders.writable(file, ".index")
    with locked(path):
        # Another process may have built it meanwhile.
        if path.is_file() and (found := _read_header(path, state)) is not None:
            return found
        built = build()
        if file_state(file) != state:
            raise RuntimeError(f"data file {file} changed while it was read: start again")
        count = len(built.offsets) - 1
        header = _HEADER.pack(MAGIC, *state, count, built.content, int(built.rows_are_lines))
        write_atomically(path, [header, built.offsets.astype("<u8").tobytes()])
    return IndexFile(str(path), count, built.content, built.rows_are_lines)


def file_state(file: Path) -> tuple[int, int]:
    """Size in bytes and modification time in nanoseconds.

    Raises:
        RuntimeError: the file does not exist.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise RuntimeError(f"data file {file} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _read_header(path: Path, state: tuple[int, int]) -> IndexFile | None:
    """The index, None if it belongs to another state of its shard or was cut off."""
    with path.open("rb") as file:
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        return None
    magic, size, time_ns, count, content, rows_are_lines = _HEADER.unpack(raw)
    is_whole = path.stat().st_size == _HEADER.size + (count + 1) * _WORD
    if magic != MAGIC or (size, time_ns) != state or not is_whole:
        return None
    return IndexFile(str(path), count, content, bool(rows_are_lines))


def write_atomically(path: Path, pieces: list[bytes]) -> None:
    """Write a file that appears complete or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path` that other processes wait for; it ends with its process.

    Some network file systems have no locks. Then several processes may do the same work; files
    appear at once all the same.
    """
    with path.with_name(path.name + ".lock").open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
