"""Copies batches to a GPU on a stream of their own while a step runs there.

Each array goes through pinned host memory into a buffer on the device. There are two sets of
buffers: the model computes with one while the next step's batches fill the other. The host waits
for nothing; the streams wait for each other's events:

- The copy stream waits for the last step that used a set of buffers before it fills them again
  (`launched` records that event on the compute stream).
- The compute stream waits for the event after the copies before it reads the buffers.
- Pinned memory is kept until that event has happened.
- A new or larger buffer comes from the allocator, whose memory the compute stream may still use;
  the copies then wait for everything launched so far. Buffers are never freed between two streams.

Not run on a GPU so far: tested with a device object that records the calls.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from paddle_vl.batch.schema import HostBatch

# Spare capacity of a buffer, as batches differ in length.
_SPARE = 1 / 8


class GpuDevice:
    """The current GPU.

    Attributes:
        compute: stream that the model runs on.
        copies: stream for the copies.

    Raises:
        RuntimeError, MemoryError, OSError: no streams or no pinned memory.
    """

    def __init__(self):
        self.compute: Any = paddle.device.current_stream()
        self.copies: Any = paddle.device.Stream()
        self.pinned(np.zeros(1, dtype=np.float32))

    def pinned(self, array: np.ndarray) -> Any:
        """A copy of the array in pinned host memory."""
        # Without a dtype: with one, Paddle 3.3 ignores the place.
        tensor = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        if not tensor.place.is_cuda_pinned_place():
            raise RuntimeError(f"a tensor asked for in pinned memory lies in {tensor.place}")
        return tensor

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An uninitialized tensor on the device."""
        return paddle.empty(shape, dtype)

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Copy each (source, target) pair on the copy stream. The target takes the source's shape
        within its own memory."""
        with paddle.device.stream_guard(self.copies):
            for source, target in pairs:
                target.copy_(source, blocking=False)


class _BufferSet:
    """Device buffers of one step, and the event after which they may be overwritten."""

    def __init__(self):
        self.by_key: dict[tuple, tuple[Any, int]] = {}
        self.is_read: Any = None


class DeviceCopies:
    """Double-buffered copies of batches to a device; see the module docstring."""

    def __init__(self, device: GpuDevice):
        self._device = device
        self._sets = [_BufferSet(), _BufferSet()]
        self._copied: Any = None
        self._pinned: list[tuple[Any, list[Any]]] = []

    def start(self, batches: Sequence[HostBatch]) -> list[HostBatch]:
        """Start to copy the batches of the next step; the previous step has been launched.

        Returns:
            The batches with tensors in place of arrays. Call `wait` before a kernel uses
            them; they are valid until the batches of the next step but one are copied.
        """
        device = self._device
        self._pinned = [(event, kept) for event, kept in self._pinned if not event.query()]
        buffers = self._sets[0]
        pairs, new_buffers = [], []

        def place(key: tuple, value: np.ndarray) -> Any:
            dtype = str(value.dtype)
            if value.size == 0:
                return device.empty(value.shape, dtype)
            buffer, capacity = buffers.by_key.get((*key, dtype), (None, 0))
            if value.size > capacity:
                capacity = value.size + int(value.size * _SPARE)
                buffer = device.empty([capacity], dtype)
                buffers.by_key[(*key, dtype)] = buffer, capacity
                new_buffers.append(buffer)
            pairs.append((device.pinned(value), buffer))
            return buffer

        tensors = [batch.placed(place, number) for number, batch in enumerate(batches)]
        if new_buffers:
            device.copies.wait_event(device.compute.record_event())
        elif buffers.is_read is not None:
            device.copies.wait_event(buffers.is_read)
        device.copy(pairs)
        self._copied = device.copies.record_event()
        self._pinned.append((self._copied, [source for source, _ in pairs]))
        self._sets.reverse()
        return tensors

    def wait(self) -> None:
        """Make the compute stream wait for the copies started last."""
        assert self._copied is not None, "no copies were started"
        self._device.compute.wait_event(self._copied)

    def launched(self) -> None:
        """Record that the step of the last copies has been launched."""
        # The set that was filled last; `start` has swapped the two.
        self._sets[1].is_read = self._device.compute.record_event()

    def is_idle(self) -> bool:
        """Whether the device has finished the last launched step."""
        event = self._sets[1].is_read
        return event is None or event.query()

    def close(self) -> None:
        """Wait for all copies and free their memory."""
        for event, _ in self._pinned:
            event.synchronize()
        self._pinned = []
        self._sets = [_BufferSet(), _BufferSet()]


def device_copies(
    pin_memory: bool, make: Callable[[], GpuDevice] = GpuDevice
) -> DeviceCopies | None:
    """Copies for Paddle's current device; None on a CPU, or without `pin_memory`.

    Raises:
        RuntimeError: the device cannot do them.
    """
    name = paddle.get_device()
    if name.startswith("cpu") or not pin_memory:
        return None
    try:
        return DeviceCopies(make())
    # What Paddle raises for a missing feature, for memory and for CUDA errors.
    except (RuntimeError, MemoryError, OSError) as error:
        raise RuntimeError(
            f"{name} cannot copy from pinned memory ({str(error).strip()}): set "
            "data.pin_memory=false, with which a step waits for its batches to be copied"
        ) from error
