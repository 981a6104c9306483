"""Metrics on their way from the processes to the file, the writers and the bar.

A report is collected behind its step, in one collective, and read while the next step runs, so that
nobody waits for the device in between.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.config.schema import LoggingConfig
from paddle_vl.train.processes import SingleProcess
from paddle_vl.train.reporting.gauges import Gauge, GaugeLayout, local_values
from paddle_vl.train.reporting.host_copy import HostCopy
from paddle_vl.train.reporting.loss_curve import CURVE_FILE, draw_loss_curve
from paddle_vl.train.reporting.metrics_file import METRICS_FILE, MetricsFile
from paddle_vl.train.reporting.progress import ProgressBar
from paddle_vl.train.reporting.scalar_writers import ScalarWriters

logger = logging.getLogger(__name__)
# The values of all processes by gauge, to a metrics line.
MakeLine = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class _Pending:
    step: int
    copy: HostCopy
    layout: GaugeLayout
    make_line: MakeLine
    look_at: Callable[[dict[str, Any]], None]


class Reporter:
    """Writes a run's metrics.

    Attributes:
        bar: the progress bar, which shows the last line.

    Args:
        output_dir: the run's.
        processes: those of the run; collecting is done by all of them together, the writing by the
            first.
    """

    def __init__(self, config: LoggingConfig, output_dir: Path, processes: SingleProcess):
        self._config, self._output_dir, self._processes = config, output_dir, processes
        self._file = MetricsFile(output_dir / METRICS_FILE)
        self._writers: ScalarWriters | None = None
        self._pending: _Pending | None = None
        self.bar: ProgressBar | None = None

    def open(self, step: int, num_steps: int) -> None:
        """Begin, or go on behind a step, forgetting lines of later ones."""
        if self._processes.is_main:
            self._file.drop_after(step)
            report_to, lines = self._config.report_to, self._file.read()
            self._writers = ScalarWriters(report_to, self._output_dir, lines)
        self.bar = ProgressBar(num_steps, step, self._processes.is_main, self._config.progress_bar)

    def collect(
        self,
        step: int,
        gauges: list[Gauge],
        make_line: MakeLine,
        look_at: Callable[[dict[str, Any]], None],
    ) -> None:
        """Bring all processes' values of a step together; `write` tells them.

        Args:
            make_line: makes a line of them when they are there.
            look_at: gets the line when it is written, on every process; it may raise.
        """
        copy = HostCopy(self._processes.gathered_values(local_values(gauges)))
        self._pending = _Pending(step, copy, GaugeLayout.of(gauges), make_line, look_at)

    def write(self, step: int | None = None, entries: dict[str, Any] | None = None) -> None:
        """Write what was collected, if anything was, with other entries of the same step.

        Args:
            step: of these entries; what was collected of an earlier one has a line of its own.
        """
        pending, self._pending, line = self._pending, None, {}
        if pending is not None:
            values = pending.layout.reduced(pending.copy.read())
            line = {"step": pending.step, **pending.make_line(values)}
        if line and entries and pending.step != step:
            self._write_line(line)
            self._write_line({"step": step, **entries})
        elif line or entries:
            self._write_line({"step": step, **line, **(entries or {})})
        if pending is not None:
            pending.look_at(line)

    def _write_line(self, line: dict[str, Any]) -> None:
        if not self._processes.is_main:
            return
        self._file.append(line)
        self._writers.write(line)
        self.bar.show(line)

    def close(self) -> None:
        """Tell what is left, and draw the curve."""
        try:
            self.write()
        finally:
            self.bar.close()
            if self._processes.is_main:
                self._writers.close()
                draw_loss_curve(self._file.read(), self._output_dir / CURVE_FILE)
