"""Safetensors files, one tensor in memory at a time.

The `safetensors` library maps a whole file when reading, so that the file ends up beside the model
in resident memory, and wants every tensor at once when writing. Here a tensor is read straight into
its own array and written straight from it. Format: 8 bytes of header length (little endian), a JSON
header {name: {dtype, shape, data_offsets}}, the raw tensors.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paddle_vl.models.checkpoint.manifest import FileSum, SummedStream, naming

_NUMPY_DTYPES = {
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
_MAX_HEADER_BYTES = 100_000_000


class StoredTensor(NamedTuple):
    """Where a tensor lies on disk.

    Attributes:
        shape: of the tensor as it is read.
        is_swapped: its last two dims are the other way round on disk.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    is_swapped: bool = False

    def swapped(self) -> "StoredTensor":
        """The same tensor, read with its last two dims exchanged."""
        *leading, rows, columns = self.shape
        return self._replace(shape=(*leading, columns, rows), is_swapped=not self.is_swapped)

    def read(self) -> np.ndarray:
        """The tensor as a new array; bfloat16 widened to float32.

        Raises:
            RuntimeError: the file ends before the tensor does.
        """
        dtype = np.dtype(_NUMPY_DTYPES[self.dtype])
        count = self.num_bytes // dtype.itemsize
        array = np.fromfile(self.file, dtype=dtype, count=count, offset=self.offset)
        if array.size != count:
            raise RuntimeError(
                f"{self.file} ends inside a tensor: {array.size} of {count} values could be read; "
                "the file is incomplete, fetch or save it again"
            )
        if self.dtype == "BF16":
            array = array.astype(np.uint32)
            array <<= 16
            array = array.view(np.float32)
        if self.is_swapped:
            return np.ascontiguousarray(array.reshape(self.swapped().shape).swapaxes(-1, -2))
        return array.reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Names and places of a file's tensors.

    Raises:
        RuntimeError: the file is missing, truncated, or not in the format.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"header length {length}")
            header = json.loads(stream.read(length))
        begin, size = 8 + length, file.stat().st_size
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if dtype not in _NUMPY_DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, not one of {sorted(_NUMPY_DTYPES)}")
            num_bytes = int(np.prod(shape)) * np.dtype(_NUMPY_DTYPES[dtype]).itemsize
            if last - first != num_bytes:
                raise ValueError(f"{name} spans {last - first} bytes, its shape needs {num_bytes}")
            if begin + last > size:
                raise ValueError(f"{name} ends at byte {begin + last} of a file of {size}")
            tensors[name] = StoredTensor(file, dtype, shape, begin + first, num_bytes)
        return tensors
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{file} is not a complete safetensors file ({error}); fetch or save it again"
        ) from error


def read_checkpoint_headers(folder: Path, stem: str = "model") -> dict[str, StoredTensor]:
    """All tensors of `STEM.safetensors`, or of the files that `STEM.safetensors.index.json` names.

    Raises:
        RuntimeError: neither is there, or a shard is missing or does not hold what the index says.
    """
    single = folder / f"{stem}.safetensors"
    index_file = folder / f"{single.name}.index.json"
    if not index_file.exists():
        if not single.exists():
            raise RuntimeError(
                f"{folder} has neither {single.name} nor {index_file.name}: it is not a model "
                "folder or checkpoint"
            )
        return read_header(single)
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise RuntimeError(f"{index_file} is not a shard index ({error!r})") from error
    shards = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    lost = sorted(key for key, shard in weight_map.items() if key not in shards[shard])
    if lost:
        raise RuntimeError(f"{index_file} names tensors that their shards do not hold: {lost}")
    return {key: shards[shard][key] for key, shard in weight_map.items()}


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


class TensorToWrite(NamedTuple):
    """A tensor whose array is made only when its turn to be written comes.

    Attributes:
        shape, dtype: as in the file.
        produce: makes the array. It may be memory that changes later, such as a parameter's own.
        arrange: brings it into the layout of the file. That needs no other rank and no device, so
            it may run later and in another thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    produce: Callable[[], np.ndarray]
    arrange: Callable[[np.ndarray], np.ndarray] = _as_it_is

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(_NUMPY_DTYPES[self.dtype]).itemsize


def encoded(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array of numbers as a file holds them; bfloat16 as its bits, rounded to even."""
    if dtype != "BF16":
        return array.astype(_NUMPY_DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


# Writes tensors into a file, at once or later. The arrays are to be produced within the call.
FileWriter = Callable[[Path, Iterable[TensorToWrite]], object]


def file_header(tensors: Iterable[TensorToWrite]) -> bytes:
    """What a file of these tensors begins with, of a multiple of 8 bytes."""
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: TensorToWrite, produced: np.ndarray) -> np.ndarray:
    """A tensor's bytes in a file, `[n]` uint8, from what it produced; maybe the same memory."""
    dtype = _NUMPY_DTYPES[tensor.dtype]
    array = np.ascontiguousarray(tensor.arrange(produced), dtype=dtype)
    if array.shape != tuple(tensor.shape):
        raise AssertionError(f"{tensor.name}: {array.shape} announced as {tensor.shape}")
    return array.reshape(-1).view(np.uint8)


def write_file(file: Path, tensors: Iterable[TensorToWrite]) -> FileSum:
    """Write one file; it appears under its name only when it is complete on disk.

    Returns:
        Its size and checksum.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    tensors = list(tensors)
    partial = file.with_name(file.name + ".partial")
    with naming(file), partial.open("wb") as stream:
        summed = SummedStream(stream)
        summed.write(file_header(tensors))
        for tensor in tensors:
            summed.write(bytes_of(tensor, tensor.produce()))
        written = summed.to_disk()
    os.replace(partial, file)
    return written
