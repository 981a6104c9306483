"""Memory-mapped token files of Megatron, `.bin` and `.idx`, which PaddleNLP and PaddleFormers use.

The `.idx`, little endian: `MMIDIDX\\0\\0`, version 1 (u64), code of the dtype (u8), number of
sequences N (u64), number of document boundaries M + 1 (u64); lengths of the sequences (i32 `[N]`),
their offsets in bytes (i64 `[N]`), and the first sequence of each document, with N at the end
(i64 `[M + 1]`). The `.bin` has the ids. PaddleNLP may have a `.lsm` beside it: a loss mask with one
byte per token.

Source: `indexed_dataset.py` of Megatron-LM and of PaddleNLP.
"""

import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.cache import Cache, FileState, file_state, read_bytes
from paddle_vl.data.corpus.shard import Row, Shard
from paddle_vl.files.text_file import replacing

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
class TokenShard(Shard):
    """A pair of files; `path` is the `.idx`, and `state` that of the `.bin`.

    Rows have `tokens`, and with a `.lsm` also a `mask`.

    Attributes:
        dtype: of the ids.
        num_sequences: of all documents.
        index_state: state of the `.idx`.
        mask_state: state of the `.lsm`, if there is one.
    """

    dtype: str
    num_sequences: int
    index_state: FileState
    mask_state: FileState | None

    @classmethod
    def opened(
        cls, path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> "TokenShard":
        """See `Shard.opened`; the `.idx` is read and checked, and the files are never copied."""
        binary, mask = path.with_suffix(".bin"), path.with_suffix(".lsm")
        if not binary.is_file():
            raise RuntimeError(f"{path} has no {binary.name} beside it, which has the tokens")
        index_state, state = file_state(path), file_state(binary)
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
            wanted = _HEADER_BYTES + 12 * num_sequences + 8 * num_boundaries
            if index_state.size != wanted or num_boundaries < 1:
                raise RuntimeError(
                    f"{path} has {index_state.size} bytes and its header describes {wanted}: it is "
                    "cut off or damaged; write it again"
                )
            hashed = xxh3_64(rest)
            while block := file.read(_BLOCK):
                hashed.update(block)
        hashed.update(str(state.size).encode())
        shard = cls(
            str(path),
            state,
            (num_boundaries - 1,),
            hashed.intdigest(),
            None,
            max_line_bytes,
            np.dtype(DTYPES[code]).str,
            num_sequences,
            index_state,
            file_state(mask) if mask.is_file() else None,
        )
        shard._check_index()
        return shard

    def _check_index(self) -> None:
        """Check that the documents are the whole `.bin`, one after the other."""
        item = np.dtype(self.dtype).itemsize
        bytes_N = self._sizes(0, self.num_sequences).astype(np.int64) * item
        ends_N = np.cumsum(bytes_N)
        offsets_N = self._offsets(0, self.num_sequences)
        if (wrong_N := (bytes_N < 0) | (offsets_N != ends_N - bytes_N)).any():
            number = int(wrong_N.argmax())
            raise self._damaged(f"sequence {number} does not begin where the one before ends")
        bounds = self._bounds(0, self.count + 1)
        falls = np.diff(bounds, prepend=0) < 0
        falls[0] = bounds[0] != 0
        if falls.any():
            number = int(falls.argmax())
            raise self._damaged(f"document {number} does not begin where the one before ends")
        if bounds[-1] != self.num_sequences:
            raise self._damaged(
                f"its documents have {bounds[-1]} of {self.num_sequences} sequences"
            )
        end = int(ends_N[-1]) if self.num_sequences else 0
        for suffix, state, needed in (
            (".bin", self.state, end),
            (".lsm", self.mask_state, end // item),
        ):
            if state is not None and state.size != needed:
                raise RuntimeError(
                    f"{Path(self.path).with_suffix(suffix)} has {state.size} bytes and {self.path} "
                    f"describes {needed}: one of them is cut off or belongs to another file; write "
                    "them again"
                )

    @property
    def samples(self) -> str:
        mask = "" if self.mask_state is None else f":{self.mask_state.blocks}"
        return super().samples + mask

    def read(self, row: int) -> Row:
        first, end = self._bounds(row, 2).tolist()
        if end == first:
            return {"tokens": np.zeros(0, dtype=np.int64)}
        begin, length = int(self._offsets(first, 1)[0]), int(self._sizes(first, end - first).sum())
        at = begin // np.dtype(self.dtype).itemsize
        tokens = self._values(".bin", self.state, self.dtype, begin, length).astype(np.int64)
        if self.mask_state is None:
            return {"tokens": tokens}
        return {"tokens": tokens, "mask": self._values(".lsm", self.mask_state, "u1", at, length)}

    def place(self, row: int) -> str:
        return f"{self.path}:document {row + 1}"

    def _sizes(self, first: int, count: int) -> np.ndarray:
        return self._entries("<i4", 4 * first, count)

    def _offsets(self, first: int, count: int) -> np.ndarray:
        return self._entries("<i8", 4 * self.num_sequences + 8 * first, count)

    def _bounds(self, first: int, count: int) -> np.ndarray:
        return self._entries("<i8", 12 * self.num_sequences + 8 * first, count)

    def _entries(self, dtype: str, offset: int, count: int) -> np.ndarray:
        return self._values(".idx", self.index_state, dtype, _HEADER_BYTES + offset, count)

    def _values(
        self, suffix: str, state: FileState, dtype: str, begin: int, count: int
    ) -> np.ndarray:
        length = np.dtype(dtype).itemsize * count
        raw = read_bytes(self.path[: -len(suffix)] + suffix, state, begin, begin + length)
        if len(raw) != length:
            raise self._damaged("a file was cut off while in use")
        return np.frombuffer(raw, dtype=dtype)

    def _damaged(self, problem: str) -> RuntimeError:
        return RuntimeError(
            f"{self.path} is damaged or belongs to another .bin ({problem}): write it again"
        )


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
        self._prefix, self._files = prefix, ExitStack()
        # Four bytes per document until the end.
        self._sizes: list[np.ndarray] = []
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return sum(map(len, self._sizes))

    def __enter__(self) -> "TokenFileWriter":
        # The `.idx`, which names the pair, appears last.
        index, binary = (
            self._files.enter_context(replacing(self._prefix.with_name(self._prefix.name + suffix)))
            for suffix in (".idx", ".bin")
        )
        self._binary = self._files.enter_context(binary.open("wb"))
        self._files.push(lambda kind, *exception: None if kind else self._write_index(index))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def add(self, ids: np.ndarray, sizes: np.ndarray) -> None:
        """Add documents: their ids one after the other, and the number of each."""
        self._binary.write(ids.astype(self.dtype).tobytes())
        self._sizes.append(sizes.astype("<i4"))
        self.num_tokens += len(ids)

    def _write_index(self, path: Path) -> None:
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
        with path.open("wb") as file:
            file.writelines(pieces)
