"""Memory-mapped token files of Megatron, `.bin` and `.idx`, which PaddleNLP and PaddleFormers use.

The `.idx`, little endian: `MMIDIDX\\0\\0`, version 1 (u64), code of the dtype (u8), number of
sequences N (u64), number of document boundaries M + 1 (u64); lengths of the sequences (i32 `[N]`),
their offsets in bytes (i64 `[N]`), and the first sequence of each document, with N at the end
(i64 `[M + 1]`). The `.bin` has the ids. PaddleNLP may have a `.lsm` beside it: a loss mask with one
byte per token.

Source: `indexed_dataset.py` of Megatron-LM and of PaddleNLP.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.shard import Row, descriptor
from paddle_vl.data.jsonl import BadSampleError

MAGIC = b"MMIDIDX\x00\x00"
# Only types that hold ids.
DTYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64,
    8: np.uint16, 9: np.uint32, 10: np.uint64,
}  # fmt: skip
_REST = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + _REST.size
_BLOCK = 1 << 24


@dataclass(frozen=True)
class TokenShard:
    """See `paddle_vl.data.corpus.shard.Shard`. Rows have `tokens` and, with a `.lsm`, `mask`.

    Attributes:
        path: the `.idx`.
        dtype: of the ids.
        num_sequences: of all documents.
        num_bytes: size of the `.bin`.
        has_mask: whether there is a `.lsm`.
    """

    path: str
    count: int
    content: int
    dtype: str
    num_sequences: int
    num_bytes: int
    has_mask: bool

    @classmethod
    def opened(cls, path: Path) -> "TokenShard":
        """Open a pair of files; their index is read once, to hash it.

        Raises:
            RuntimeError: a file is missing or damaged.
        """
        binary = path.with_suffix(".bin")
        if not binary.is_file():
            raise RuntimeError(f"{path} has no {binary.name} beside it, which has the tokens")
        with path.open("rb") as file:
            magic, rest = file.read(len(MAGIC)), file.read(_REST.size)
            if magic != MAGIC or len(rest) < _REST.size:
                raise RuntimeError(f"{path} is no index of token files (it begins {magic!r})")
            version, code, num_sequences, num_boundaries = _REST.unpack(rest)
            if version != 1 or code not in DTYPES:
                raise RuntimeError(
                    f"{path} has version {version} and dtype code {code}; version 1 and the codes "
                    f"{sorted(DTYPES)} are read"
                )
            size = path.stat().st_size
            wanted = _HEADER_BYTES + 12 * num_sequences + 8 * num_boundaries
            if size != wanted or num_boundaries < 1:
                raise RuntimeError(
                    f"{path} has {size} bytes and its header describes {wanted}: it is cut off or "
                    "damaged; write it again"
                )
            hashed = xxh3_64(rest)
            while block := file.read(_BLOCK):
                hashed.update(block)
        hashed.update(str(binary.stat().st_size).encode())
        dtype = np.dtype(DTYPES[code])
        shard = cls(
            str(path),
            num_boundaries - 1,
            hashed.intdigest(),
            dtype.str,
            num_sequences,
            binary.stat().st_size,
            path.with_suffix(".lsm").is_file(),
        )
        if num_sequences:
            (last,), (length,) = (
                shard._offsets(num_sequences - 1, 1),
                shard._sizes(num_sequences - 1, 1),
            )
            needed = int(last) + int(length) * dtype.itemsize
            if binary.stat().st_size < needed:
                raise RuntimeError(
                    f"{binary} has {binary.stat().st_size} bytes and its index describes {needed}: "
                    "it is cut off; write it again"
                )
        return shard

    @property
    def groups(self) -> list[int]:
        return [self.count]

    def read(self, row: int) -> Row:
        first, end = self._read("<i8", 12 * self.num_sequences + 8 * row, 2).tolist()
        if end == first:
            return {"tokens": np.zeros(0, dtype=np.int64)}
        if not 0 <= first < end <= self.num_sequences:
            raise self._damaged()
        offset, sizes = int(self._offsets(first, 1)[0]), self._sizes(first, end - first)
        length, item = int(sizes.sum()), np.dtype(self.dtype).itemsize
        if min(offset, int(sizes.min())) < 0 or offset + length * item > self.num_bytes:
            raise self._damaged()
        raw = os.pread(descriptor(Path(self.path).with_suffix(".bin")), length * item, offset)
        tokens = np.frombuffer(raw, dtype=self.dtype).astype(np.int64)
        if not self.has_mask:
            return {"tokens": tokens}
        raw = os.pread(descriptor(Path(self.path).with_suffix(".lsm")), length, offset // item)
        return {"tokens": tokens, "mask": np.frombuffer(raw, dtype=np.uint8)}

    def _damaged(self) -> BadSampleError:
        return BadSampleError(
            "unreadable_sample",
            f"the index describes a document outside of its {self.num_bytes} bytes of tokens: it "
            "is damaged, or belongs to another .bin",
        )

    def place(self, row: int) -> str:
        return f"{self.path}:document {row + 1}"

    def _sizes(self, first: int, count: int) -> np.ndarray:
        return self._read("<i4", 4 * first, count)

    def _offsets(self, first: int, count: int) -> np.ndarray:
        return self._read("<i8", 4 * self.num_sequences + 8 * first, count)

    def _read(self, dtype: str, offset: int, count: int) -> np.ndarray:
        length = np.dtype(dtype).itemsize * count
        raw = os.pread(descriptor(self.path), length, _HEADER_BYTES + offset)
        return np.frombuffer(raw, dtype=dtype)


class TokenFileWriter:
    """Writes a pair of token files, a document per sequence.

        with TokenFileWriter(prefix, highest_id) as writer:
            writer.add(ids)

    Both files appear when the block ends without an error.
    """

    def __init__(self, prefix: Path, highest_id: int):
        """
        Args:
            prefix: path of the files without suffix.
            highest_id: largest id of the tokenizer; chooses uint16 or int32.
        """
        self._code = 8 if highest_id < 65500 else 4
        self.dtype = np.dtype(DTYPES[self._code])
        self.paths = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
        self._partial = [
            path.with_name(f"{path.name}.{os.getpid()}.partial") for path in self.paths
        ]
        # Four bytes per document until the end.
        self._sizes: list[np.ndarray] = []
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return sum(map(len, self._sizes))

    def __enter__(self) -> "TokenFileWriter":
        self._binary = self._partial[0].open("wb")
        return self

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        """Add documents: their ids one after the other, and the number of each."""
        self._binary.write(ids.astype(self.dtype).tobytes())
        self._sizes.append(sizes.astype("<i4"))
        self.num_tokens += len(ids)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._binary.close()
        if kind is None:
            self._write_index()
            for partial, path in zip(self._partial, self.paths, strict=True):
                partial.replace(path)
        for partial in self._partial:
            partial.unlink(missing_ok=True)

    def _write_index(self) -> None:
        sizes = np.concatenate([*self._sizes, np.zeros(0, dtype="<i4")])
        ends = np.cumsum(sizes.astype("<i8")) * self.dtype.itemsize
        offsets = ends - sizes * self.dtype.itemsize
        count = len(sizes)
        pieces: Iterable[bytes] = (
            MAGIC,
            _REST.pack(1, self._code, count, count + 1),
            sizes.tobytes(),
            offsets.astype("<i8").tobytes(),
            np.arange(count + 1, dtype="<i8").tobytes(),
        )
        with self._partial[1].open("wb") as file:
            for piece in pieces:
                file.write(piece)
