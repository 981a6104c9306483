"""JSONL files, plain or compressed (.gz, .zst), as shards."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.local_copies import LocalCopies
from paddle_vl.data.corpus.offset_index import CacheFolders, IndexFile, Offsets, index_of
from paddle_vl.data.corpus.shard import Row, descriptor
from paddle_vl.data.jsonl import check_length, parse_object

_BLOCK = 1 << 22
_BREAK, _SPACE = 10, 32


@dataclass(frozen=True)
class JsonlShard:
    """See `paddle_vl.data.corpus.shard.Shard`.

    Attributes:
        copies: gives the local, uncompressed file; None to read `path` itself.
        max_line_bytes: a longer line is a bad sample and is not read.
    """

    path: str
    index: IndexFile
    copies: LocalCopies | None
    max_line_bytes: int

    @classmethod
    def opened(
        cls, path: Path, folders: CacheFolders, copies: LocalCopies | None, max_line_bytes: int
    ) -> "JsonlShard":
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read.
        """

        def build() -> Offsets:
            return line_offsets(Path(copies.file(path)) if copies is not None else path)

        return cls(str(path), index_of(path, folders, build), copies, max_line_bytes)

    @property
    def count(self) -> int:
        return self.index.count

    @property
    def content(self) -> int:
        return self.index.content

    @property
    def groups(self) -> list[int]:
        return [self.count]

    def read(self, row: int) -> Row:
        begin, end = self.index.span(descriptor(self.index.path), row)
        length = min(end - begin, self.max_line_bytes + 2)
        line = os.pread(self._descriptor(), length, begin).strip()
        check_length(line, self.max_line_bytes)
        return parse_object(line, "a document's entries")

    def place(self, row: int) -> str:
        if self.index.rows_are_lines:
            return f"{self.path}:{row + 1}"
        begin, _ = self.index.span(descriptor(self.index.path), row)
        opened, breaks, at = self._descriptor(), 0, 0
        while at < begin and (block := os.pread(opened, min(_BLOCK, begin - at), at)):
            breaks, at = breaks + block.count(b"\n"), at + len(block)
        return f"{self.path}:{breaks + 1}"

    def _descriptor(self) -> int:
        return descriptor(self.path) if self.copies is None else self.copies.descriptor(self.path)


def line_offsets(path: Path) -> Offsets:
    """Offsets of all lines that are not blank; the file is read once, in blocks.

    Raises:
        RuntimeError: the file cannot be read.
    """
    found: list[np.ndarray] = []
    hashed, at, num_breaks = xxh3_64(), 0, 0
    # Begin of the line that the last block ended in, and whether it has been blank so far.
    begin, is_blank = 0, True
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            bytes_N = np.frombuffer(block, dtype=np.uint8)
            breaks_K = np.flatnonzero(bytes_N == _BREAK)
            num_breaks += breaks_K.size
            if not breaks_K.size:
                is_blank = is_blank and not block.strip()
            else:
                begins_K = np.concatenate([[0], breaks_K[:-1] + 1])
                # Most lines begin with a bracket; only others are looked at one by one.
                has_text_K = bytes_N[begins_K] > _SPACE
                for line in np.flatnonzero(~has_text_K):
                    has_text_K[line] = bool(block[begins_K[line] : breaks_K[line]].strip())
                has_text_K[0] |= not is_blank
                begins_K += at
                begins_K[0] = begin
                found.append(begins_K[has_text_K])
                rest = int(breaks_K[-1]) + 1
                begin, is_blank = at + rest, not block[rest:].strip()
            at += len(block)
    if not is_blank:
        found.append(np.array([begin]))
    starts = np.concatenate([*found, np.zeros(0, dtype=np.int64)])
    num_lines = num_breaks + (begin < at)
    offsets = np.append(starts, at).astype(np.uint64)
    return Offsets(offsets, hashed.intdigest(), len(starts) == num_lines)
