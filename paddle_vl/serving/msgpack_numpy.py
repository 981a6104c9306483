"""NumPy arrays in msgpack, in the dialects of openpi's and vla-eval's clients.

Both write an array as a map of `__ndarray__`, `data`, `dtype` and `shape`. openpi's keys are byte
strings, and NumPy scalars keep their type. vla-eval's keys are text, scalars become plain numbers,
and a picture may be a PNG or JPEG. Everything that a sender claims is checked before memory is
taken for it.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import image_size, load_rgb

# Of a message. A picture's file may be much smaller than its pixels.
_MOST = {"maps and lists": 1024, "pixels in pictures": 1 << 24}
# Entries of a list, bytes of a text.
_MOST_ENTRIES, MOST_TEXT = 4096, 1 << 16
_MOST_DIMS = 8
_DTYPES = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[US][1-9]\d{0,3})")


class Dialect:
    """Writes and reads messages.

    Args:
        keys: `bytes` or `str`, of the maps that stand for arrays.
    """

    def __init__(self, keys: type[bytes] | type[str]):
        self._array, self._scalar, self._data, self._dtype, self._shape = (
            name.encode() if keys is bytes else name
            for name in ("__ndarray__", "__npgeneric__", "data", "dtype", "shape")
        )
        self._keeps_scalars = keys is bytes

    def pack(self, value: Any) -> bytes:
        return msgpack.Packer(default=self._plain).pack(value)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        dtype = {self._dtype: value.dtype.str}
        if isinstance(value, np.ndarray):
            entries = {self._array: True, self._data: value.tobytes()}
            return entries | dtype | {self._shape: list(value.shape)}
        if self._keeps_scalars:
            return {self._scalar: True, self._data: value.item()} | dtype
        return value.item()

    def unpack(self, message: bytes | str) -> Any:
        """The value of a message; arrays are read-only.

        Raises:
            ValueError: no msgpack, too many parts, or an array that is not what it claims to be.
        """
        if isinstance(message, str):
            raise ValueError("the message is text; a binary message in msgpack is needed")
        left = dict(_MOST)

        def take(kind: str, count: int = 1) -> None:
            left[kind] -= count
            if left[kind] < 0:
                raise ValueError(f"more than {_MOST[kind]} {kind}")

        def read_map(found: dict[Any, Any]) -> Any:
            take("maps and lists")
            return self._value(found, take)

        def read_list(found: list[Any]) -> list[Any]:
            take("maps and lists")
            return found

        try:
            return msgpack.unpackb(
                message,
                object_hook=read_map,
                list_hook=read_list,
                max_str_len=MOST_TEXT,
                max_array_len=_MOST_ENTRIES,
                max_map_len=_MOST_ENTRIES,
                max_ext_len=0,
            )
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"the message of {len(message)} bytes is refused: {reason}") from error

    def _value(self, found: dict[Any, Any], take: Callable[[str, int], None]) -> Any:
        if self._array in found:
            return self._read_array(found)
        if self._keeps_scalars and self._scalar in found:
            dtype, value = self._known_dtype(found), found.get(self._data)
            if not isinstance(value, bool | int | float | str | bytes):
                raise ValueError(f"a scalar of {dtype} has {type(value).__name__} as its data")
            return dtype.type(value)
        if not self._keeps_scalars and "__image__" in found:
            return self._read_image(found, take)
        return found

    def _read_array(self, found: dict[Any, Any]) -> np.ndarray:
        dtype, data, shape = self._known_dtype(found), found.get(self._data), self._sizes(found)
        size = math.prod(shape) * dtype.itemsize
        if not isinstance(data, bytes) or len(data) != size:
            held = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ValueError(f"an array of {dtype} {shape} has {size} bytes, its data {held}")
        return np.frombuffer(data, dtype=dtype).reshape(shape)

    def _known_dtype(self, found: dict[Any, Any]) -> np.dtype:
        name = found.get(self._dtype)
        if not isinstance(name, str) or not _DTYPES.fullmatch(name):
            raise ValueError(f"the dtype {str(name)[:40]!r} is none of {_DTYPES.pattern}")
        return np.dtype(name)

    def _sizes(self, found: dict[Any, Any]) -> list[int]:
        shape = found.get(self._shape)
        if (
            not isinstance(shape, list)
            or len(shape) > _MOST_DIMS
            or not all(type(size) is int and size >= 0 for size in shape)
        ):
            raise ValueError(f"the shape {str(shape)[:80]} is no list of up to {_MOST_DIMS} sizes")
        return shape

    def _read_image(self, found: dict[Any, Any], take: Callable[[str, int], None]) -> np.ndarray:
        """A picture, `[H, W, 3]` uint8."""
        form, shape, data = found.get("format"), self._sizes(found), found.get("data")
        if form == "raw":
            return self._read_array(found)
        if form not in ("png", "jpeg") or not isinstance(data, bytes) or len(shape) != 3:
            raise ValueError(f"a picture of format {str(form)[:40]!r} and shape {shape}")
        try:
            width, height = image_size(data)
            if [height, width] != shape[:2]:
                raise ValueError(f"a picture of {height} x {width} pixels claims the shape {shape}")
            take("pixels in pictures", width * height)
            return np.asarray(load_rgb(data))
        except BadSampleError as error:
            raise ValueError(f"a picture: {error.reason}") from error


OPENPI = Dialect(bytes)
VLA_EVAL = Dialect(str)
