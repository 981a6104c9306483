"""A Paddle profiler trace of some steps of a run, for whoever asks for it in train.profile."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paddle
from paddle import profiler

from paddle_vl.config.schema import ProfileConfig

logger = logging.getLogger(__name__)
FOLDER = "profile"


class StepTrace:
    """Records the steps that were asked for, on every process.

    The trace is Chrome's format: chrome://tracing and Perfetto show it.

    Args:
        config: which steps; None for none.
        output_dir: the run's; traces go into `profile/`, a file for each process.
        rank: this process among all.
    """

    def __init__(self, config: ProfileConfig | None, output_dir: Path, rank: int):
        self._config, self._folder, self._rank = config, output_dir / FOLDER, rank
        self._profiler: profiler.Profiler | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step; the first of a run is number 1."""
        if self._config is None:
            yield
            return
        first, last = self._config.start, self._config.start + self._config.steps - 1
        if number == first:
            self._start()
        try:
            yield
        finally:
            if self._profiler is not None and number < last:
                self._profiler.step()
        if number == last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, of a run that ends before all is, too."""
        if self._profiler is None:
            return
        ended, self._profiler = self._profiler, None
        ended.stop()
        logger.info("the trace of the profiled steps is in %s", self._folder)

    def _start(self) -> None:
        targets = [profiler.ProfilerTarget.CPU]
        if not paddle.get_device().startswith("cpu"):
            targets.append(profiler.ProfilerTarget.GPU)
        export = profiler.export_chrome_tracing(str(self._folder), f"rank{self._rank}")
        self._profiler = profiler.Profiler(targets=targets, on_trace_ready=export)
        self._profiler.start()
