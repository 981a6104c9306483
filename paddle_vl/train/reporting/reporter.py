"""Writes the metrics of a run: metrics.jsonl, the writers of report_to, progress bar, loss curve.

A report is gathered over all ranks after its step, in one collective, and read while the next step
runs, so that the host does not wait for the device in between. The values of a rank form one small
tensor; the tensors of all ranks are gathered and copied to the host. Shapes: P ranks, K values.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from tqdm import tqdm

from paddle_vl.config.schema import LoggingConfig
from paddle_vl.files.text_file import write_text
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.processes import resident_bytes
from paddle_vl.train.reporting.answer_pictures import evenly
from paddle_vl.train.reporting.plots import draw_loss_curve
from paddle_vl.train.reporting.run_files import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    Line,
    MetricsFile,
    read_starts,
)
from paddle_vl.train.reporting.writers.base import Start, Writer, open_writers

logger = logging.getLogger(__name__)
CURVE_FILE = "loss.png"
# Answers of an evaluation that other programs get.
_NUM_SENT = 8
# Values of all ranks by name.
Values = dict[str, Any]
# Values of this rank by name: numbers, and tensors `[n]` of equally many entries on all ranks.
OwnValues = Mapping[str, float | Tensor]
OnWritten = Callable[[Values, Line], None]


def packed(values: OwnValues) -> Tensor:
    """The values of this rank, `[K]` float64 on the device.

    Nothing waits for the device: `paddle.full` writes a number there, while copying it from the
    host would synchronize.
    """
    return paddle.concat(
        [
            value.astype("float64").reshape([-1])
            if isinstance(value, Tensor)
            else paddle.full([1], float(value), dtype="float64")
            for value in values.values()
        ]
    )


def by_rank(values_PK: np.ndarray, own: OwnValues) -> dict[str, np.ndarray]:
    """The values of all ranks by name: `[P]`, or `[P, n]` for a tensor.

    Args:
        own: the packed values of one rank, for names and sizes.
    """
    sizes = {name: v.size if isinstance(v, Tensor) else None for name, v in own.items()}
    ends = np.cumsum([1 if size is None else size for size in sizes.values()])
    columns = np.split(values_PK, ends[:-1], axis=1)
    return {
        name: values[:, 0] if size is None else values
        for (name, size), values in zip(sizes.items(), columns, strict=True)
    }


class HostCopy:
    """An asynchronous copy of a tensor to the host; only `read` waits for it.

    On a GPU the copy is queued on the current stream, behind the kernels that compute the tensor;
    kernels that are launched later do not wait for it. On a CPU nothing is copied.
    """

    def __init__(self, tensor: Tensor):
        self._event: Any = None
        if tensor.place.is_gpu_place():
            self._tensor = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
            self._event = paddle.device.cuda.Event()
            self._event.record()
            # Keeps the memory from being reused before it is copied.
            self._source = tensor
        else:
            self._tensor = tensor

    def read(self) -> np.ndarray:
        """The values; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.numpy()


def memory_in_use() -> int:
    """Bytes of memory of this process: on a GPU the peak of allocated tensors so far, on a CPU the
    resident set now. Does not wait for the device."""
    if not paddle.get_device().startswith("cpu"):
        return int(paddle.device.cuda.max_memory_allocated())
    return resident_bytes()


class Reporter:
    """Gathers and writes the metrics of a run.

    Args:
        ranks: ranks of the run; all of them collect, the first one writes.

    Attributes:
        bar: progress bar, which shows the last line; set by `open`.
    """

    bar: "ProgressBar"
    _writers: list[Writer]

    def __init__(self, config: LoggingConfig, output_dir: Path, ranks: SingleRank):
        self._config, self._output_dir, self._ranks = config, output_dir, ranks
        self._file = MetricsFile(output_dir / METRICS_FILE)
        # Reads the values of all ranks and makes their line; and what to call after it is written.
        self._pending: tuple[Callable[[], tuple[Values, Line]], OnWritten] | None = None
        self._is_open = False

    def open(self, step: int, num_steps: int | None, tokens: tuple[int, int] | None = None) -> None:
        """Start after `step` completed steps; lines of later steps are removed.

        Args:
            num_steps: of the whole run; None if its length is in tokens.
            tokens: done, and of the whole run.
        """
        if self._ranks.is_main:
            written = [line["step"] for line in self._file.read()]
            self._file.drop_after(step)
            start = Start(
                self._output_dir,
                (read_starts(self._output_dir) or [{}])[-1],
                self._file.read(),
                max(written, default=0) if step else 0,
            )
            self._writers = open_writers(self._config.report_to, start)
        shown = (self._ranks.is_main, self._config.progress_bar)
        self.bar = ProgressBar(num_steps, step, *shown, tokens=tokens)
        self._is_open = True

    def collect(
        self,
        step: int,
        values: OwnValues,
        make_line: Callable[[Values], Line],
        on_written: OnWritten,
    ) -> None:
        """Gather a report over all ranks; `write` reads and writes it. Called by all ranks.

        Args:
            values: of this rank.
            make_line: makes the metrics line of all ranks' values, see `by_rank`.
            on_written: called on every rank after the line is written; may raise.
        """
        copy = HostCopy(self._ranks.gathered_values(packed(values)))

        def read() -> tuple[Values, Line]:
            of_all = by_rank(copy.read(), values)
            return of_all, {"step": step, **make_line(of_all)}

        self._pending = read, on_written

    def write(self, step: int | None = None, entries: Line | None = None) -> None:
        """Write the collected report, if there is one, and further entries.

        Args:
            step: step of the entries; they share the report's line if its step is the same.
        """
        pending, self._pending, line, values = self._pending, None, {}, {}
        if pending is not None:
            values, line = pending[0]()
        if line and entries and line["step"] != step:
            self._write_line(line)
            self._write_line({"step": step, **entries})
        elif line or entries:
            self._write_line({"step": step, **line, **(entries or {})})
        if pending is not None:
            pending[1](values, line)

    def show(
        self, step: int, answers: Sequence[Mapping[str, Any]], file: str = PREDICTIONS_FILE
    ) -> None:
        """Write answers to a file of the run, and send some with pictures."""
        if not (self._ranks.is_main and answers):
            return
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers)
        write_text(self._output_dir / file, lines)
        some = evenly(answers, _NUM_SENT)
        for writer in self._writers:
            writer.show(step, some)

    def _write_line(self, line: Line) -> None:
        if not self._ranks.is_main:
            return
        self._file.append(line)
        for writer in self._writers:
            writer.write(line)
        self.bar.show(line)

    def close(self) -> None:
        """Write what is pending, and draw the loss curve; nothing unless opened."""
        if not self._is_open:
            return
        with ExitStack() as stack:
            if self._ranks.is_main:
                stack.callback(self._draw_curve)
                for writer in self._writers:
                    stack.callback(writer.close)
            stack.callback(self.bar.close)
            self.write()

    def _draw_curve(self) -> None:
        draw_loss_curve(self._file.read(), self._output_dir / CURVE_FILE)


_DRAW_SECONDS = 0.2
# Label, key in a metrics line, format.
_SHOWN = (
    ("loss", "loss", ".4f"),
    ("eval", "eval_loss", ".4f"),
    ("lr", "learning_rate", ".2e"),
)


class ProgressBar:
    """A progress bar on a terminal; elsewhere one log line per report.

    Args:
        first_step: steps that the run has completed before.
        is_shown: False shows nothing.
        has_bar: False writes log lines on a terminal too.
        clock: seconds, monotonic.
        tokens: those done before and those of the whole run, if its length is in tokens.
    """

    def __init__(
        self,
        num_steps: int | None,
        first_step: int,
        is_shown: bool,
        has_bar: bool = True,
        clock: Callable[[], float] = time.monotonic,
        tokens: tuple[int, int] | None = None,
    ):
        self._num_steps, self._first_step, self._tokens = num_steps, first_step, tokens
        self._clock, self._begin = clock, clock()
        self._line: dict[str, Any] = {}
        # A bar redraws its line, which would fill a log file.
        has_bar = has_bar and sys.stderr.isatty()
        self._tells_lines = is_shown and not has_bar
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc="train",
            unit=" steps",
            disable=not (is_shown and has_bar),
            dynamic_ncols=True,
            mininterval=_DRAW_SECONDS,
        )

    def advance(self) -> None:
        self._bar.update()

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the last known losses, learning rate and speed.

        Args:
            line: metrics line, see `paddle_vl.train.reporting.metrics`.
        """
        self._line |= line
        parts = [
            f"{label} {self._line[key]:{form}}"
            for label, key, form in _SHOWN
            if self._line.get(key) is not None
        ]
        for unit in ("tokens", "samples"):
            if (amount := self._line.get(f"{unit}_per_second")) is not None:
                parts.append(f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}")
                parts[-1] += f" {unit}/s"
                break
        text = ", ".join(parts)
        self._bar.set_postfix_str(text, refresh=False)
        # An evaluation has a log message of its own.
        if not self._tells_lines or "loss" not in line:
            return
        place = f"step {line['step']}"
        begin, done, total = self._first_step, line["step"], self._num_steps
        if self._tokens is not None:
            done, (begin, total) = self._line["tokens"], self._tokens
            place += f", {done / total:.2%} of the tokens"
        else:
            place += f" of {total}"
        told = [place, text] if text else [place]
        if done > begin and total is not None:
            left_s = (self._clock() - self._begin) / (done - begin) * max(0, total - done)
            told.append(f"{tqdm.format_interval(left_s)} left")
        logger.info("%s", ", ".join(told))

    def close(self) -> None:
        self._bar.close()
