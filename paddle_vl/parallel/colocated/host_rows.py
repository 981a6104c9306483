"""Rows that wait in host memory between the phases of a colocated step."""

from collections.abc import Callable, Hashable
from typing import Any

import paddle
from paddle import Tensor


class HostRows:
    """Host memory for rows that leave the device, kept from step to step. That of a GPU is pinned:
    the host waits for no copy, and copies follow each other on the compute stream."""

    def __init__(self):
        self._buffers: dict[Hashable, Tensor] = {}

    @paddle.no_grad()
    def put(self, key: Hashable, rows: Tensor) -> Callable[[], Tensor]:
        """Copy rows into the memory of this key; returns what brings them back."""
        is_on_gpu, buffer = rows.place.is_gpu_place(), self._buffers.get(key)
        if buffer is None or buffer.size < rows.size:
            if is_on_gpu and buffer is not None:
                # A copy may still use the smaller one.
                paddle.device.synchronize()
            buffer = paddle.empty([rows.size], rows.dtype, pin_memory=is_on_gpu)
            self._buffers[key] = buffer
        # Any: Paddle's stub gives `copy_` no arguments.
        own: Any = buffer._slice(0, rows.size)
        own.copy_(rows.reshape([-1]), False)
        shape, dtype = rows.shape, rows.dtype

        def back() -> Tensor:
            found: Any = paddle.empty([own.size], dtype)
            found.copy_(own, False)
            return found.reshape(shape)

        return back
