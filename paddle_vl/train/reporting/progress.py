"""The progress of a run: step, time left, losses, learning rate and speed."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

_DRAW_SECONDS = 0.2
# What is shown: its label, its key in a metrics line, and how.
_SHOWN = (
    ("loss", "loss", ".4f"),
    ("eval", "eval_loss", ".4f"),
    ("lr", "learning_rate", ".2e"),
)


class ProgressBar:
    """A bar at the foot of a terminal; without one, a line for every report.

    Args:
        first_step: steps that the run has behind it.
        is_shown: False shows nothing.
        has_bar: False tells lines on a terminal too.
        clock: tells seconds.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        is_shown: bool,
        has_bar: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps, self._first_step = num_steps, first_step
        self._clock, self._begin = clock, clock()
        self._text, self._line = "", {}
        # A bar draws over itself, which a file keeps all of.
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
        """One step further."""
        self._bar.update()

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the last known losses, rate and speed.

        Args:
            line: of the metrics, see `paddle_vl.train.reporting.metrics`.
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
        self._text = ", ".join(parts)
        self._bar.set_postfix_str(self._text, refresh=False)
        # What else is told of a step, such as an evaluation, has a message of its own.
        if self._tells_lines and "loss" in line:
            logger.info("%s", self._as_line(line["step"]))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Say that the run evaluates meanwhile."""
        self._bar.set_description_str("evaluate")
        yield
        self._bar.set_description_str("train")

    def close(self) -> None:
        self._bar.close()

    def _as_line(self, step: int) -> str:
        parts = [f"step {step} of {self._num_steps}", self._text]
        if step > self._first_step:
            pace = (self._clock() - self._begin) / (step - self._first_step)
            parts.append(f"{tqdm.format_interval(pace * (self._num_steps - step))} left")
        return ", ".join(filter(None, parts))
