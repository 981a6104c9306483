"""Transfers between host and device, and what a step does in place of them.

An array goes to a GPU through pinned memory, so that the host does not wait. A table that follows
from sizes alone is copied once. Rows and positions that the host knows are taken without an index
array, or without a search that the host would wait for.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import Own


class PinnedCopies:
    """Copies arrays to a GPU through pinned memory, on the compute stream: the host does not wait.
    The pinned memory is kept until its copy is over."""

    def __init__(self):
        self._in_flight: list[tuple[Any, Tensor]] = []

    def __call__(self, array: np.ndarray) -> Tensor:
        self._in_flight = [entry for entry in self._in_flight if not entry[0].query()]
        dtype: Any = str(array.dtype)
        tensor: Any = paddle.empty(array.shape, dtype)
        if not array.size:
            return tensor
        # Without a dtype: with one, Paddle 3.3 ignores the place.
        pinned = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        tensor.copy_(pinned, False)
        self._in_flight.append((paddle.device.current_stream().record_event(), pinned))
        return tensor


_pinned_copy = PinnedCopies()


def device_tensor(array: Any) -> Any:
    """An array as a tensor on the device; tensors and None are returned unchanged."""
    if not isinstance(array, np.ndarray):
        return array
    return _pinned_copy(array) if _copies_to_gpu() else paddle.to_tensor(array)


def on_device(batch: Own) -> Own:
    """A batch with its arrays as tensors on the device; what are tensors there stays."""
    return batch.placed(lambda _, array: device_tensor(array))


def _copies_to_gpu() -> bool:
    return paddle.get_device().startswith("gpu")


def host_array(array: Any, copy: bool = True) -> Any:
    """A tensor as a NumPy array, which waits for the device; arrays and None stay. Values of
    bfloat16 are their bits (uint16).

    Args:
        copy: False returns the memory of a host tensor unless it is bfloat16, since allocating new
            memory costs more than the copy itself.
    """
    if not isinstance(array, Tensor):
        return array
    # A view of bfloat16 as int16 needs stride kernels.
    is_on_host = array.place.is_cpu_place() and array.dtype != paddle.bfloat16
    if copy or not is_on_host or not array.size:
        return array.numpy()
    return np.from_dlpack(array.detach())


class HostTable:
    """A table made of its arguments alone, as a tensor on the current device.

    It is copied there at the first call for these arguments; a later step copies nothing from the
    host.

    Args:
        make: the table from hashable arguments, as a NumPy array.

    Attributes:
        is_kept: False makes a new tensor at every call of any table.
    """

    is_kept = True
    _MOST = 256

    def __init__(self, make: Callable[..., np.ndarray]):
        functools.update_wrapper(self, make)
        self.make = make
        self._tensors: dict[tuple, Tensor] = {}

    def __call__(self, *args: Any) -> Tensor:
        key = (paddle.get_device(), *args)
        kept = self._tensors.get(key) if HostTable.is_kept else None
        if kept is not None:
            return kept
        table = device_tensor(self.make(*args))
        if HostTable.is_kept and isinstance(table, Tensor):
            while len(self._tensors) >= self._MOST:
                self._tensors.pop(next(iter(self._tensors)))
            self._tensors[key] = table
        return table


host_table = HostTable


def rows_in_order(x: Tensor, rows: np.ndarray) -> Tensor:
    """`x[rows]` for rows that come in few runs of consecutive ones, without a gradient.

    Slices in place of an index array, which would be copied to the device.
    """
    if not rows.size:
        return x[:0]
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return paddle.concat([x[int(run[0]) : int(run[-1]) + 1] for run in runs])


def true_positions(mask_N: Tensor, count: int | None = None) -> Tensor:
    """Ascending positions of the True entries: int64 `[count]`.

    Args:
        count: their number, if known: nothing is searched then, which would make the host wait.
            With another one positions are missing, or 0 for those that are not there.
    """
    if count is None:
        return paddle.nonzero(mask_N).reshape([-1])
    # Other entries go to one place more, which is cut off.
    places_N = paddle.where(mask_N, mask_N.astype("int64").cumsum(0) - 1, count).clip(max=count)
    positions = paddle.zeros([count + 1], dtype="int64")
    return paddle.scatter(positions, places_N, paddle.arange(mask_N.shape[0]))[:count]
