"""Offsets of the documents of a data file and sums of its blocks, found once and kept in a file.

An index file has a header, `count + 1` offsets (uint64, little endian; document i lies in bytes
`offsets[i]` to `offsets[i + 1]`), the sums of the blocks (uint32), and a checksum of all that.
Readers fetch two offsets at a time, so that memory does not grow with the number of documents.
A sum is the lower half of the block's XXH3, 0 for a block that was not read: what is read later is
what was there when the file was indexed.

It lies in `.paddle_vl/` beside the data, or in a cache folder if that cannot be written, and is
built again when it is damaged, and when size, modification time or a sampled block of its data file
change. Several processes may ask for the same index; one builds it.
"""

import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from paddle_vl.data.corpus.cache import (
    CacheFolders,
    descriptor,
    file_state,
    open_files,
    pread,
)
from paddle_vl.files.text_file import locked, replacing

logger = logging.getLogger(__name__)
BLOCK = 1 << 14
MAGIC = b"PVLIDX02"
# Magic; size, time and sample of the data file; documents, hash of the content, whether row numbers
# are lines; bytes that the offsets and sums describe, hash of the sums.
_HEADER = struct.Struct("<8sQQQQQQQQ")
_WORD = 8
_PIECE = 1 << 22


class NoIndexError(RuntimeError):
    """There is no valid index, and none may be built."""


class ChangedError(RuntimeError):
    """A file has other bytes than when it was indexed. No fault of a document."""


def sums_of(raw: bytes) -> np.ndarray:
    """`[K]` uint32: the sum of each block of some bytes, the last of which may be short."""
    view = memoryview(raw)
    starts = range(0, len(raw), BLOCK)
    found = [xxh3_64_intdigest(view[at : at + BLOCK]) & 0xFFFFFFFF or 1 for at in starts]
    return np.array(found, dtype="<u4")


class SummedReader:
    """A file opened for reading from which every block that is touched gets its sum.

    Attributes:
        size: bytes of the file.
        sums: `[ceil(size / BLOCK)]` uint32.
    """

    def __init__(self, path: Path):
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size
        self.sums = np.zeros(-(-self.size // BLOCK), dtype="<u4")
        self._at = 0

    def read(self, length: int) -> bytes:
        """The next bytes; fewer at the end of the file."""
        first, end = self._at // BLOCK, min(self._at + max(length, 0), self.size)
        if end <= self._at:
            return b""
        last = -(-end // BLOCK)
        raw = pread(self._file.fileno(), first * BLOCK, min(last * BLOCK, self.size))
        if len(raw) == min(last * BLOCK, self.size) - first * BLOCK:
            self.sums[first:last] = sums_of(raw)
        piece = raw[self._at - first * BLOCK : end - first * BLOCK]
        self._at += len(piece)
        return piece

    def seek(self, position: int) -> int:
        """Go on reading at a byte."""
        self._at = position
        return position

    def tell(self) -> int:
        return self._at

    def touch(self, begin: int, end: int) -> None:
        """Sum the blocks of a range, without keeping them."""
        self.seek(begin)
        while self._at < end and self.read(min(_PIECE, end - self._at)):
            pass

    def __enter__(self) -> "SummedReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


class Offsets(NamedTuple):
    """What reading a data file finds.

    Attributes:
        num_bytes: size of what was read: the data file, or its uncompressed copy.
        sums: of the blocks of these bytes.
        offsets: `[count + 1]` uint64; by default there are no documents.
        content: 64-bit hash that changes with the documents.
        rows_are_lines: whether document i is line i + 1 of its file.
    """

    num_bytes: int
    sums: np.ndarray
    offsets: np.ndarray = np.zeros(1, dtype=np.uint64)
    content: int = 0
    rows_are_lines: bool = False


@dataclass(frozen=True)
class IndexFile:
    """An index that exists.

    Attributes:
        path: its file.
        file: the data file.
        count: documents.
        content, rows_are_lines, num_bytes: see `Offsets`.
        sums: hash of the sums of all blocks.
    """

    path: str
    file: str
    count: int
    content: int
    rows_are_lines: int
    num_bytes: int
    sums: int

    def span(self, row: int) -> tuple[int, int]:
        """First and last byte of a document.

        Raises:
            RuntimeError: the index was damaged after it was opened.
        """
        begin, end = struct.unpack("<QQ", self._read(row * _WORD, 2 * _WORD))
        if not begin <= end <= self.num_bytes:
            raise self._damaged()
        return begin, end

    def read(self, begin: int, end: int, opened: int | None = None) -> bytes:
        """Bytes of a document.

        Args:
            opened: descriptor of a copy of the data file; None for the file itself.

        Raises:
            ChangedError: they are other bytes than when the file was indexed.
            RuntimeError: the file cannot be read, or the index was damaged after it was opened.
        """
        first, last = begin // BLOCK, -(-end // BLOCK)
        opened = descriptor(self.file) if opened is None else opened
        try:
            raw = pread(opened, first * BLOCK, min(last * BLOCK, self.num_bytes))
        except OSError as error:
            raise RuntimeError(f"{self.file} cannot be read: {error.strerror}") from error
        wanted = self._read((self.count + 1) * _WORD + 4 * first, 4 * (last - first))
        wanted_K, found_K = np.frombuffer(wanted, dtype="<u4"), sums_of(raw)
        if len(found_K) != len(wanted_K) or ((found_K != wanted_K) & (wanted_K != 0)).any():
            raise ChangedError(
                f"data file {self.file} was changed after it was indexed, near bytes {begin} to "
                f"{end}: put the data back as it was. If the change is meant, touch the file, so "
                "that it is indexed again, and start a new run"
            )
        return raw[begin - first * BLOCK : end - first * BLOCK]

    def _read(self, at: int, length: int) -> bytes:
        raw = b""
        with suppress(OSError):
            raw = os.pread(descriptor(self.path), length, _HEADER.size + at)
        if len(raw) != length:
            raise self._damaged()
        return raw

    def _damaged(self) -> RuntimeError:
        return RuntimeError(
            f"index {self.path} was damaged while in use: start again, which makes it anew"
        )


def index_of(file: Path, folders: CacheFolders, build: Callable[[], Offsets]) -> IndexFile:
    """The index of a data file, built and written if there is no valid one.

    Raises:
        NoIndexError: there is none, and the folders say that none is built.
        RuntimeError: no folder can be written, or the data file cannot be read.
    """
    # The file may be another one than this process has open from before.
    open_files.drop(str(file))
    state = file_state(file)
    for path in folders.existing(file, ".index"):
        if (found := _opened(path, file, state)) is not None:
            return found
    if not folders.builds:
        raise NoIndexError(f"{file} has no index")
    path = folders.writable(file, ".index")
    with locked(path):
        # Another process may have built it meanwhile.
        if (found := _opened(path, file, state)) is not None:
            return found
        if path.is_file() and _header(path) is None:
            logger.warning("index %s is damaged or of an older version: it is made again", path)
        built = build()
        if file_state(file) != state:
            raise RuntimeError(f"data file {file} changed while it was read: start again")
        sums = built.sums.astype("<u4").tobytes()
        fields = (len(built.offsets) - 1, built.content, int(built.rows_are_lines), built.num_bytes)
        header = _HEADER.pack(MAGIC, *state, *fields, xxh3_64_intdigest(sums))
        hashed = xxh3_64()
        with replacing(path) as partial, partial.open("wb") as written:
            for piece in (header, built.offsets.astype("<u8").tobytes(), sums):
                hashed.update(piece)
                written.write(piece)
            written.write(hashed.intdigest().to_bytes(_WORD, "little"))
        open_files.drop(str(path))
    return IndexFile(str(path), str(file), *fields, xxh3_64_intdigest(sums))


def whole_file(path: Path) -> Offsets:
    """The sums of all blocks of a file without documents of its own."""
    with SummedReader(path) as reader:
        reader.touch(0, reader.size)
        return Offsets(reader.size, reader.sums)


def _opened(path: Path, file: Path, state: tuple[int, int, int]) -> IndexFile | None:
    """The index, None if there is none, it is damaged or belongs to another state of its file."""
    header = _header(path)
    if header is None or header[:3] != state:
        return None
    open_files.drop(str(path))
    return IndexFile(str(path), str(file), *header[3:])


def _header(path: Path) -> tuple[int, ...] | None:
    """Numbers of the header; None if the file's checksum is wrong, or it cannot be read."""
    with suppress(OSError), path.open("rb", buffering=0) as file:
        raw = file.read(_HEADER.size)
        if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
            return None
        _, *numbers = _HEADER.unpack(raw)
        count, num_bytes = numbers[3], numbers[6]
        rest = (count + 1) * _WORD + 4 * -(-num_bytes // BLOCK)
        if os.fstat(file.fileno()).st_size != _HEADER.size + rest + _WORD:
            return None
        hashed = xxh3_64(raw)
        while rest and (piece := file.read(min(_PIECE, rest))):
            hashed.update(piece)
            rest -= len(piece)
        if file.read(_WORD) == hashed.intdigest().to_bytes(_WORD, "little"):
            return tuple(numbers)
    return None
