"""Offsets of the documents of a data file, found once and kept in a file.

An index file has a header, `count + 1` offsets (uint64, little endian; document i lies in bytes
`offsets[i]` to `offsets[i + 1]`), and a checksum of both. Readers fetch two offsets at a time, so
that memory does not grow with the number of documents.

It lies in `.paddle_vl/` beside the data, or in a cache folder if that cannot be written, and is
built again when it is damaged, and when size, modification time or a sampled block of its data file
change. Several processes may ask for the same index; one builds it.
"""

import logging
import mmap
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from paddle_vl.data.corpus.cache import Cache, FileState, file_state, opened_file, read_bytes
from paddle_vl.files.text_file import locked, replacing

logger = logging.getLogger(__name__)
MAGIC = b"PVLIDX04"
# Magic; state of the data file; documents, hash of the content, whether row numbers are lines.
_HEADER = struct.Struct("<8sQQQQQQ")
_WORD = 8


class Offsets(NamedTuple):
    """What reading a data file finds.

    Attributes:
        offsets: `[count + 1]`, ascending.
        content: 64-bit hash that changes with the documents.
        rows_are_lines: whether document i is line i + 1 of its file.
    """

    offsets: np.ndarray
    content: int
    rows_are_lines: bool = False


@dataclass(frozen=True)
class Index:
    """An index that exists.

    Attributes:
        path: its file.
        state: of the data file.
        count: documents.
        content, rows_are_lines: see `Offsets`.
    """

    path: str
    state: FileState
    count: int
    content: int
    rows_are_lines: int

    def span(self, row: int) -> tuple[int, int]:
        """First and last byte of a document.

        Raises:
            RuntimeError: the index was damaged after it was opened.
        """
        begin = _HEADER.size + row * _WORD
        raw = read_bytes(self.path, self.state, begin, begin + 2 * _WORD)
        if len(raw) < 2 * _WORD:
            raise RuntimeError(
                f"index {self.path} was damaged while in use: start again, which makes it anew"
            )
        return struct.unpack("<QQ", raw)


def index_of(file: Path, cache: Cache, build: Callable[[FileState], Offsets]) -> Index:
    """The index of a data file, built and written if there is no valid one.

    Raises:
        RuntimeError: no folder can be written, or the data file cannot be read.
    """
    if (found := existing_index(file, cache)) is not None:
        return found
    path = cache.writable(file, ".index")
    with locked(path):
        # Another process may have built it meanwhile.
        if (found := existing_index(file, cache)) is not None:
            return found
        if path.is_file() and _header(path) is None:
            logger.warning("index %s is damaged or of an older version: it is made again", path)
        state = file_state(file)
        offsets, *others = build(state)
        if file_state(file) != state:
            raise RuntimeError(f"data file {file} changed while it was read: start again")
        fields = len(offsets) - 1, *map(int, others)
        content = _HEADER.pack(MAGIC, *state, *fields) + offsets.astype("<u8").tobytes()
        with replacing(path) as partial:
            partial.write_bytes(content + xxh3_64_intdigest(content).to_bytes(_WORD, "little"))
        # This process may have the one from before open.
        opened_file.cache_clear()
    return Index(str(path), state, *fields)


def existing_index(file: Path, cache: Cache) -> Index | None:
    """The index of a data file, None if there is none, or all are damaged or of other states."""
    state = file_state(file)
    for path in cache.existing(file, ".index"):
        if (header := _header(path)) is not None and header[:3] == state:
            return Index(str(path), state, *header[3:])
    return None


def _header(path: Path) -> tuple[int, ...] | None:
    """Numbers of the header; None if the file's checksum is wrong, or it cannot be read."""
    with (
        suppress(OSError, ValueError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as raw,
        raw[:-_WORD] as content,
    ):
        stored = int.from_bytes(raw[-_WORD:], "little")
        if raw[: len(MAGIC)] == MAGIC and xxh3_64_intdigest(content) == stored:
            return _HEADER.unpack_from(content)[1:]
    return None
