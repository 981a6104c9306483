"""Phases of a training step: marks in the training code that do nothing unless a clock runs.

    with phase(Phase.FORWARD):
        output = model(**batch)

Without a clock a mark is the same empty context every time, and the device is left alone. A running
`PhaseClock` waits for the device at every mark, so that a phase owns what it has started.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import paddle


class Phase(Enum):
    """What a step spends its time on. Values are the keys in a profile's JSON, OpenTau's names
    where its profiler has the phase."""

    # Until the next batch is there.
    DATA_WAIT = "dataload_wait"
    # Numbers that all processes must know before they begin: they wait for the slowest here.
    AGREEMENT = "agreement"
    # NumPy arrays of a batch to tensors.
    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    # With recomputation the second forward, and what sharding reduces or gathers meanwhile.
    BACKWARD = "bwd"
    # Both of a pipeline, which does them in turn.
    FORWARD_BACKWARD = "forward_bwd"
    # Adding up gradients over processes behind the last backward.
    GRADIENT_SUM = "gradient_sum"
    # Gradient norm and clipping.
    CLIP = "unscale_clip"
    # The update, handing out new parameters, and dropping gradients.
    OPTIMIZER = "optim_step"
    # What is reported of the step: reading the loss, meters, progress.
    METRICS = "sync_gather"
    # Time in a step that no mark claims.
    BETWEEN = "between_phases"


_NOTHING: AbstractContextManager[None] = nullcontext()
_running: "PhaseClock | None" = None


def phase(name: Phase) -> AbstractContextManager[None]:
    """Time until the block's end belongs to a phase, less that of phases inside of it."""
    return _NOTHING if _running is None else _running.inside(name)


class PhaseClock:
    """Divides steps into phases without a rest: every moment of a step is in one of them.

    A phase that a step has several times, such as the forwards of its micro-batches, adds up.

    Attributes:
        steps: of each finished step the seconds by phase; their sum is the step's time.

    Args:
        wait: blocks until the device has done all its work; default that of Paddle's device, which
            on a CPU is nothing.
    """

    def __init__(self, wait: Callable[[], None] | None = None):
        self.steps: list[dict[Phase, float]] = []
        self._wait = wait or _device_wait()
        self._stack: list[Phase] = []
        self._seconds: dict[Phase, float] = {}
        self._last = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; marks count inside of it. One that raises is not kept.

        Raises:
            RuntimeError: a clock runs already.
        """
        global _running
        if _running is not None:
            raise RuntimeError("a phase clock runs already: steps do not contain each other")
        self._seconds, self._stack = {}, [Phase.BETWEEN]
        self._wait()
        self._last = time.perf_counter()
        _running = self
        try:
            yield
            self._turn()
        finally:
            _running = None
        self.steps.append(self._seconds)

    @contextmanager
    def inside(self, name: Phase) -> Iterator[None]:
        """See `phase`."""
        self._turn()
        self._stack.append(name)
        try:
            yield
            self._turn()
        finally:
            self._stack.pop()

    def _turn(self) -> None:
        """Give the time since the last turn to the phase that has had it."""
        self._wait()
        now = time.perf_counter()
        name = self._stack[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now


def _device_wait() -> Callable[[], None]:
    if paddle.get_device().startswith("cpu"):
        return lambda: None
    return paddle.device.synchronize
