"""Phases of a training step, marked in the training code, and traces of steps by Paddle's profiler.

    with phase(Phase.FORWARD):
        output = model(**batch)

A mark does nothing unless a `PhaseClock` runs. The clock synchronizes the device at every mark, so
that a phase includes the work that it launched.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path

import paddle
from paddle import profiler

from paddle_vl.config.schema import ProfileConfig

logger = logging.getLogger(__name__)
TRACE_FOLDER = "profile"


class Phase(Enum):
    """Phases of a step. Values are keys of a profile's JSON, with OpenTau's names where it has the
    phase."""

    # Wait for the next batch.
    DATA_WAIT = "dataload_wait"
    # Answers of the model to prompts, and the exchange of their rewards.
    SAMPLING = "sampling"
    # Exchange of counts between hosts before the step, including the wait for the slowest rank.
    AGREEMENT = "agreement"
    # NumPy arrays of a batch to tensors.
    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    # Includes recomputed forwards, and gradient reductions and gathers of sharding during backward.
    BACKWARD = "bwd"
    # Forward and backward of a pipeline, which interleaves them.
    FORWARD_BACKWARD = "forward_bwd"
    # Gradient reductions after the last backward.
    GRADIENT_SUM = "gradient_sum"
    # Gradient norm and clipping.
    CLIP = "unscale_clip"
    # Update, all-gather of updated parameters.
    OPTIMIZER = "optim_step"
    # Clearing of gradients; the schedule, which OpenTau has here, is a number passed to the update.
    CLEARING = "zero_grad_sched"
    # Accumulation of metrics.
    METRICS = "sync_gather"
    # Time outside all marks.
    BETWEEN = "between_phases"


_NOTHING: AbstractContextManager[None] = nullcontext()
_running: "PhaseClock | None" = None


def phase(name: Phase) -> AbstractContextManager[None]:
    """Mark a block as part of a phase; nested phases are not counted twice."""
    return _NOTHING if _running is None else _running.inside(name)


class PhaseClock:
    """Divides the time of steps into phases, without gaps or overlaps.

    Repeated phases of a step, such as the forwards of micro-batches, add up.

    Attributes:
        steps: per finished step its seconds by phase; they sum to the step's duration.
    """

    def __init__(self):
        self.steps: list[dict[Phase, float]] = []
        self._is_cpu = paddle.get_device().startswith("cpu")
        self._stack: list[Phase] = []
        self._seconds: dict[Phase, float] = {}
        self._last = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step; a step that raises is not kept.

        Raises:
            RuntimeError: a clock runs already.
        """
        global _running
        if _running is not None:
            raise RuntimeError("a phase clock runs already: steps do not contain each other")
        self._seconds, self._stack = {}, [Phase.BETWEEN]
        self._last = self._now()
        _running = self
        try:
            yield
            self._switch()
        finally:
            _running = None
        self.steps.append(self._seconds)

    @contextmanager
    def inside(self, name: Phase) -> Iterator[None]:
        """See `phase`."""
        self._switch()
        self._stack.append(name)
        try:
            yield
            self._switch()
        finally:
            self._stack.pop()

    def _switch(self) -> None:
        """Add the time since the last switch to the current phase."""
        now = self._now()
        name = self._stack[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        """The time when the device is done."""
        if not self._is_cpu:
            paddle.device.synchronize()
        return time.perf_counter()


class StepTrace:
    """Records the steps of train.profile on every rank, in Chrome's trace format.

    Args:
        config: steps to record; None for none.
        output_dir: of the run; traces go into `profile/`, one file per rank.
    """

    def __init__(self, config: ProfileConfig | None, output_dir: Path, rank: int):
        self._config, self._folder, self._rank = config, output_dir / TRACE_FOLDER, rank
        self._profiler: profiler.Profiler | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step; the first step of a run is number 1."""
        if self._config is None:
            yield
            return
        first, last = self._config.start, self._config.start + self._config.steps - 1
        if number == first:
            targets = [profiler.ProfilerTarget.CPU]
            if not paddle.get_device().startswith("cpu"):
                targets.append(profiler.ProfilerTarget.GPU)
            export = profiler.export_chrome_tracing(str(self._folder), f"rank{self._rank}")
            self._profiler = profiler.Profiler(targets=targets, on_trace_ready=export)
            self._profiler.start()
        try:
            yield
        finally:
            if self._profiler is not None and number < last:
                self._profiler.step()
        if number == last:
            self.close()

    def close(self) -> None:
        """Write the trace, also if the run ends before all steps are recorded."""
        if self._profiler is None:
            return
        ended, self._profiler = self._profiler, None
        ended.stop()
        logger.info("the trace of the profiled steps is in %s", self._folder)
