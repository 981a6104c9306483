"""JSONL files, plain or compressed (.gz, .zst), as shards."""

from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.local_copies import LocalCopies
from paddle_vl.data.corpus.offset_index import Offsets, SummedReader
from paddle_vl.data.corpus.shard import Row, Shard
from paddle_vl.data.jsonl import check_length, parse_object

_BLOCK = 1 << 22
_BREAK, _SPACE = 10, 32
# Of every byte, whether it is no white space.
_IS_TEXT = np.array([bool(bytes([byte]).strip()) for byte in range(256)])


class JsonlShard(Shard):
    """Lines of a file."""

    @classmethod
    def offsets(cls, path: Path, copies: LocalCopies | None) -> Offsets:
        if copies is None:
            return line_offsets(path)
        # A copy from before may be damaged, and there are no sums to compare it with.
        copies.forget(path)
        return line_offsets(Path(copies.file(path)))

    def read(self, row: int) -> Row:
        begin, end = self.index.span(row)
        line = self.bytes_of(begin, min(end, begin + self.max_line_bytes + 2)).strip()
        check_length(line, self.max_line_bytes)
        return parse_object(line, "a document's entries")

    def place(self, row: int) -> str:
        if self.index.rows_are_lines:
            return f"{self.path}:{row + 1}"
        begin, _ = self.index.span(row)
        starts = range(0, begin, _BLOCK)
        breaks = sum(self.bytes_of(at, min(at + _BLOCK, begin)).count(b"\n") for at in starts)
        return f"{self.path}:{breaks + 1}"


def line_offsets(path: Path) -> Offsets:
    """Offsets of all lines that are not blank; the file is read once, in blocks.

    Raises:
        RuntimeError: the file cannot be read.
    """
    found: list[np.ndarray] = []
    hashed, at, num_breaks = xxh3_64(), 0, 0
    # Begin of the line that the last block ended in, and whether it has been blank so far.
    begin, is_blank = 0, True
    with SummedReader(path) as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            bytes_N = np.frombuffer(block, dtype=np.uint8)
            breaks_K = np.flatnonzero(bytes_N == _BREAK)
            num_breaks += breaks_K.size
            if not breaks_K.size:
                is_blank = is_blank and not block.strip()
            else:
                begins_K = np.concatenate([[0], breaks_K[:-1] + 1])
                # Most lines begin with a bracket; only others are looked at.
                has_text_K = bytes_N[begins_K] > _SPACE
                if (odd := np.flatnonzero(~has_text_K)).size:
                    text_at = np.flatnonzero(_IS_TEXT[bytes_N])
                    first = np.searchsorted(text_at, begins_K[odd])
                    has_text_K[odd] = first < np.searchsorted(text_at, breaks_K[odd])
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
    return Offsets(at, file.sums, offsets, hashed.intdigest(), len(starts) == num_lines)
