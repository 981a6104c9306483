"""Batches on their way to a GPU while a step runs there.

An array is put into pinned memory and copied from there by a stream of its own into a buffer on the
device. Buffers have two turns: while the model computes with one, the next step's batches fill the
other. The host waits for nothing; the streams wait for each other's events.

No byte is touched too early or too late:
- A buffer is filled behind the last computation with what it held before. `launched` records an
  event behind a step on the computing stream, and the copies of the next turn but one wait for it.
- A buffer is read behind its copy: the computing stream waits for the event behind the copies.
- Pinned memory is held until that event has happened.
- Buffers stay, so nothing is handed back to the allocator between two streams. Memory of a new or
  larger one comes from there, where the computing stream may still have work that uses it: the
  copies then wait for all that has been launched so far. A smaller one that it replaces has been
  filled and read already, as far as the computing stream has come.
Not run on a GPU so far: tested against a device that writes down what it is asked for.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor

Batch = dict[str, Any]
# A buffer is made larger than it has to be by this part, as batches differ in length.
_SPARE = 1 / 8

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream has got there."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""


class Stream(Protocol):
    """Work of the device in its order; see `paddle.device.Stream`."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None: ...


class Device(Protocol):
    """What is asked of a device.

    Attributes:
        compute: the stream that models run on.
        copies: another one.
    """

    compute: Stream
    copies: Stream

    def pinned(self, array: np.ndarray) -> Any:
        """A tensor of the same values in pinned memory of the host."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor on the device."""

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Have the stream of copies fill each second tensor with the first, whose shape it takes
        on in the memory that it has."""


class GpuDevice:
    """The current GPU.

    Raises:
        RuntimeError, MemoryError, OSError: it has no streams, or there is no pinned memory.
    """

    def __init__(self):
        self.compute = paddle.device.current_stream()
        self.copies = paddle.device.Stream()
        self.pinned(np.zeros(1, dtype=np.float32))

    def pinned(self, array: np.ndarray) -> Tensor:
        # Without a dtype: with one, Paddle 3.3 ignores the place.
        tensor = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        if not tensor.place.is_cuda_pinned_place():
            raise RuntimeError(f"a tensor asked for in pinned memory lies in {tensor.place}")
        return tensor

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        return paddle.empty(shape, dtype)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with paddle.device.stream_guard(self.copies):
            for source, target in pairs:
                target.copy_(source, blocking=False)


class _Turn:
    """Buffers of a step, and the event behind which they may be filled anew."""

    def __init__(self):
        self.buffers: dict[tuple, tuple[Any, int]] = {}
        self.is_read: Event | None = None


class DeviceCopies:
    """Copies steps' batches to a device ahead of their use, as the module says."""

    def __init__(self, device: Device):
        self._device = device
        self._turns = [_Turn(), _Turn()]
        self._copied: Event | None = None
        self._pinned: list[tuple[Event, list[Any]]] = []

    def start(self, batches: Sequence[Batch], is_for_device: Callable[[str], bool]) -> list[Batch]:
        """Start to copy the batches of a step, the last of which has been launched.

        Args:
            is_for_device: which entries leave the host: arrays, or lists of them.

        Returns:
            The batches with tensors in place of these; nothing is to be launched with them before
            `wait`, and they are valid until the next step but one starts to be copied.
        """
        device = self._device
        self._pinned = [(event, held) for event, held in self._pinned if not event.query()]
        turn = self._turns[0]
        pairs, is_new = [], False

        def placed(key: tuple, value: Any) -> Any:
            nonlocal is_new
            if isinstance(value, list):
                return [placed((*key, i), entry) for i, entry in enumerate(value)]
            if not isinstance(value, np.ndarray):
                return value
            dtype = str(value.dtype)
            if value.size == 0:
                return device.empty(value.shape, dtype)
            buffer, capacity = turn.buffers.get((*key, dtype), (None, 0))
            if value.size > capacity:
                is_new, capacity = True, value.size + int(value.size * _SPARE)
                buffer = device.empty([capacity], dtype)
                turn.buffers[(*key, dtype)] = buffer, capacity
            pairs.append((device.pinned(value), buffer))
            return buffer

        tensors = [
            {
                name: placed((number, name), value) if is_for_device(name) else value
                for name, value in batch.items()
            }
            for number, batch in enumerate(batches)
        ]
        if is_new:
            device.copies.wait_event(device.compute.record_event())
        elif turn.is_read is not None:
            device.copies.wait_event(turn.is_read)
        device.copy(pairs)
        self._copied = device.copies.record_event()
        self._pinned.append((self._copied, [source for source, _ in pairs]))
        self._turns.reverse()
        return tensors

    def wait(self) -> None:
        """Have what is launched from here on wait for the copies that were started last."""
        self._device.compute.wait_event(self._copied)

    def launched(self) -> None:
        """The step that these copies were for has been launched."""
        # The turn that was filled last is behind the one to be filled next.
        self._turns[1].is_read = self._device.compute.record_event()

    def has_run_dry(self) -> bool:
        """Whether the device has done all of the last step that was launched."""
        event = self._turns[1].is_read
        return event is None or event.query()

    def close(self) -> None:
        """Wait until all copies are done, and let go of all memory."""
        for event, _ in self._pinned:
            event.synchronize()
        self._pinned = []
        self._turns = [_Turn(), _Turn()]


def device_copies(
    pin_memory: bool, is_main: bool = True, make: Callable[[], Device] = GpuDevice
) -> DeviceCopies | None:
    """Copies for the device that Paddle runs on; None where batches go on as they are.

    That is a CPU, which needs none and of which nothing is said. Of another device that goes
    without there is one warning, by the main process alone where all go without.
    """
    name = paddle.get_device()
    if name.startswith("cpu"):
        return None
    is_here_only = False
    if not pin_memory:
        reason = "data.pin_memory is off"
    elif not name.startswith("gpu"):
        reason = f"copies beside a running step are made on GPUs only, and this is {name}"
    else:
        try:
            return DeviceCopies(make())
        # As Paddle tells of a missing feature, of memory and of CUDA.
        except (RuntimeError, MemoryError, OSError) as error:
            reason = f"{name} cannot copy from pinned memory ({str(error).strip()})"
            is_here_only = True
    if is_main or is_here_only:
        logger.warning("%s: each step waits for its batches to be copied to the device", reason)
    return None
