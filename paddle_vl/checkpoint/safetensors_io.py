"""Safetensors files, read and written one tensor at a time.

The `safetensors` library maps a whole file for reading, which then adds to the model in resident
memory, and takes all tensors at once for writing. Here a tensor is read into its own array and
written from it. Format: 8 bytes of header length (little endian), a JSON header
{name: {dtype, shape, data_offsets}}, the raw tensors.
"""

import json
import struct
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from paddle_vl.checkpoint.manifest import FileSum, write_bytes
from paddle_vl.files.inner_path import is_inner
from paddle_vl.files.stored_settings import UNQUANTIZED
from paddle_vl.files.text_file import read_json_object, shown

NUMPY_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    # NumPy has no bfloat16: its bits, as Paddle keeps them on the host.
    "BF16": np.uint16,
}
FLOATING = ("F64", "F32", "F16", "BF16")
# Values per check: a slice that fits a processor's cache.
_CHECKED_AT_ONCE = 1 << 16
_COMPARED_AT_ONCE = 1 << 22
_REMEDY = "fetch or save it again"


class StoredTensor(NamedTuple):
    """The place of a tensor on disk.

    Attributes:
        shape: of the tensor as it is read.
        is_swapped: its last two dims are exchanged on disk.
        name: in the file, for messages.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    is_swapped: bool = False
    name: str = "a tensor"

    def swapped(self) -> "StoredTensor":
        """The same tensor, read with its last two dims exchanged."""
        *leading, rows, columns = self.shape
        return self._replace(shape=(*leading, columns, rows), is_swapped=not self.is_swapped)

    def narrowed(self, first: int, last: int) -> "StoredTensor":
        """Rows `first` to `last` of the tensor, along the first dim, which lie together."""
        assert not self.is_swapped or len(self.shape) > 2, f"rows of {self.name} lie apart"
        width = self.num_bytes // self.shape[0]
        shape, num_bytes = (last - first, *self.shape[1:]), (last - first) * width
        return self._replace(shape=shape, offset=self.offset + first * width, num_bytes=num_bytes)

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        """The tensor as a new array; bfloat16 widened to float32.

        Raises:
            RuntimeError: the file ends before the tensor does, or the tensor holds NaN or infinite
                values.
        """
        dtype = np.dtype(NUMPY_DTYPES[self.dtype])
        count = self.num_bytes // dtype.itemsize
        array = np.fromfile(self.file, dtype=dtype, count=count, offset=self.offset)
        if array.size != count:
            raise RuntimeError(
                f"{self.file} ends inside {self.name}: {array.size} of {count} values could be "
                f"read; the file is incomplete, {_REMEDY}"
            )
        array = widened(array, self.dtype)
        if must_be_finite and self.dtype in FLOATING:
            check_finite(array, f"{self.file}: {self.name}")
        if self.is_swapped:
            return np.ascontiguousarray(array.reshape(self.swapped().shape).swapaxes(-1, -2))
        return array.reshape(self.shape)

    def mapped(self) -> np.ndarray:
        """The tensor, of which only the parts that are used are read; bfloat16 as its bits. It
        stays readable when the file is deleted."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not self.num_bytes:
            return np.empty(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.offset, self.shape)

    def copied(self, name: str) -> "TensorToWrite":
        """The tensor for another file, unread; it stays readable when this file is deleted."""
        dtype, held = NUMPY_DTYPES[self.dtype], self.mapped()
        # Read where it is written: a save in the background needs no copy of it.
        return TensorToWrite(
            name, self.shape, self.dtype, lambda: np.empty(0, dtype), lambda empty: held
        )

    def has_values_of(self, other: "StoredTensor") -> bool:
        """Whether both tensors hold the same numbers, compared chunk by chunk."""
        if self.shape != other.shape:
            return False
        if self.dtype != other.dtype or self.is_swapped != other.is_swapped:
            return bool(np.array_equal(self.read(), other.read()))

        def chunk(tensor: StoredTensor, begin: int) -> np.ndarray:
            count = min(_COMPARED_AT_ONCE, tensor.num_bytes - begin)
            return np.fromfile(tensor.file, np.uint8, count, offset=tensor.offset + begin)

        begins = range(0, self.num_bytes, _COMPARED_AT_ONCE)
        return all(np.array_equal(chunk(self, begin), chunk(other, begin)) for begin in begins)


class JoinedRows(NamedTuple):
    """Tensors of one dtype above each other."""

    parts: tuple[StoredTensor, ...]

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def narrowed(self, first: int, last: int) -> "JoinedRows":
        """Rows `first` to `last`."""
        begins = list(accumulate((part.shape[0] for part in self.parts), initial=0))
        # At least one part, for dtype and shape.
        spans = [
            (part, max(first - begin, 0), min(last - begin, part.shape[0]))
            for part, begin in zip(self.parts, begins, strict=False)
        ]
        held = [part.narrowed(low, high) for part, low, high in spans if low < high]
        return JoinedRows(tuple(held) or (self.parts[0].narrowed(0, 0),))

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        return np.concatenate([part.read(must_be_finite=must_be_finite) for part in self.parts])


def check_finite(array: np.ndarray, what: str) -> None:
    """
    Raises:
        RuntimeError: some of the flat array's values are not finite.
    """
    if not is_finite(array):
        bad = int(array.size - np.isfinite(array).sum())
        raise RuntimeError(
            f"{what} holds {bad} values that are NaN or infinite, of {array.size}: its weights are "
            f"lost; take an earlier checkpoint, or {_REMEDY}"
        )


def is_finite(array: np.ndarray) -> bool:
    """Whether all values of a flat array are finite."""
    # In one pass, in less than half of the time of reading.
    starts = range(0, array.size, _CHECKED_AT_ONCE)
    return all(np.isfinite(array[i : i + _CHECKED_AT_ONCE]).all() for i in starts)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, unread.

    Raises:
        RuntimeError: the file is missing, truncated, or not in the format: its tensors must be
            contiguous from the header to the end of the file.
        ValueError: a tensor has a dtype that is not supported, as quantized ones have.
    """
    try:
        # Checks the header, and that its tensors fill the file; reads none.
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"{file} is not a complete safetensors file ({error}); {_REMEDY}"
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in NUMPY_DTYPES:
            raise ValueError(
                f"{file}: {name} has dtype {entry['dtype']}, not one of {sorted(NUMPY_DTYPES)}; "
                f"{UNQUANTIZED}"
            )
        first, last = entry["data_offsets"]
        tensors[name] = StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first, name=name
        )
    return tensors


def read_checkpoint_headers(folder: Path, stem: str = "model") -> dict[str, StoredTensor]:
    """All tensors of `STEM.safetensors`, as in transformers also beside an index, or of the files
    that `STEM.safetensors.index.json` names.

    Raises:
        RuntimeError: neither is there, or a shard is missing or does not match the index.
    """
    single = folder / f"{stem}.safetensors"
    index_file = folder / f"{single.name}.index.json"
    if single.exists():
        return read_header(single)
    if not index_file.exists():
        raise RuntimeError(
            f"{folder} has neither {single.name} nor {index_file.name}: it is not a model "
            "folder or checkpoint"
        )
    weight_map = read_json_object(index_file, "a shard index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RuntimeError(
            f"{index_file} is not a shard index: weight_map is {shown(weight_map)}, not the file "
            f"of each tensor; {_REMEDY}"
        )
    for key, shard in weight_map.items():
        if not is_inner(shard):
            raise RuntimeError(
                f"{index_file}: weight_map has {shown(shard)} for {key}, which is no file of this "
                f"folder; {_REMEDY}"
            )
    shards = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    lost = sorted(key for key, shard in weight_map.items() if key not in shards[shard])
    if lost:
        raise RuntimeError(f"{index_file} names tensors that their shards do not hold: {lost}")
    unnamed = sorted(
        key for shard, held in shards.items() for key in held if weight_map.get(key) != shard
    )
    if unnamed:
        raise RuntimeError(
            f"{index_file} does not name tensors that its shards hold: {unnamed}; index and shards "
            f"are of two models, {_REMEDY}"
        )
    return {key: shards[shard][key] for key, shard in weight_map.items()}


class TensorToWrite(NamedTuple):
    """A tensor whose array is made when it is written.

    Attributes:
        shape, dtype: in the file.
        produce: makes the array, which may be memory that changes later, such as a parameter's.
            Nothing with a source.
        arrange: converts it to the layout of the file, without collectives or the device, so it may
            run later in another thread.
        is_joined: another pipeline stage writes it; this rank only sends it values.
        source: a `paddle_vl.checkpoint.ranges.ShardedValue` of the value, in place of `produce`.
        block: number of the linear in a fused parameter; None for a parameter that is not fused.
        keeps_rows: `arrange` changes each row by itself, along the first dim.
        offset: its place in a file that several ranks write.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    produce: Callable[[], np.ndarray] = partial(np.empty, 0)
    arrange: Callable[[np.ndarray], np.ndarray] = np.asarray
    is_joined: bool = False
    source: Any = None
    block: int | None = None
    keeps_rows: bool = False
    offset: int | None = None

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize


def widened(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The values of a file's array: the bits of bfloat16 as float32."""
    if dtype != "BF16":
        return stored
    bits = stored.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def encoded(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array in a file's dtype; bfloat16 as its bits, rounded to even."""
    if dtype != "BF16":
        return array.astype(NUMPY_DTYPES[dtype], copy=False)
    bits = np.asarray(array, dtype=np.float32, order="C").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


# Writes tensors into a file, at once or later; it calls every `produce` before it returns.
FileWriter = Callable[[Path, Iterable[TensorToWrite]], object]


def bytes_of(tensor: TensorToWrite, produced: np.ndarray) -> np.ndarray:
    """A tensor's bytes in a file, `[n]` uint8; they may share the memory of `produced`."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    # Not ascontiguousarray, which adds a dim to a 0-d tensor.
    array = np.asarray(tensor.arrange(produced), dtype=dtype, order="C")
    if array.shape != tuple(tensor.shape):
        raise AssertionError(f"{tensor.name}: {array.shape} announced as {tensor.shape}")
    return array.reshape(-1).view(np.uint8)


def header_of(tensors: Iterable[TensorToWrite]) -> bytes:
    """The bytes of a file before those of its tensors, which follow in this order."""
    offset, header = 0, dict[str, Any]({"__metadata__": {"format": "pt"}})
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded to a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(
    file: Path,
    tensors: Iterable[TensorToWrite],
    go_on: Callable[[], None] | None = None,
    in_place: bool = True,
) -> FileSum:
    """Write tensors as `write_bytes` does, one in memory at a time: a file of these, or those with
    an `offset` into a file that other ranks write too, one behind the other."""
    tensors = list(tensors)
    begin = tensors[0].offset if tensors else None
    head = [header_of(tensors)] if begin is None else []
    parts = (bytes_of(tensor, tensor.produce()) for tensor in tensors)
    return write_bytes(file, chain(head, parts), go_on, begin, in_place)
