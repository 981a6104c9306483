"""The progress of a run: step, time left, losses, learning rate and speed."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

# Between two lines where there is no terminal.
_LINE_SECONDS = 30.0
_DRAW_SECONDS = 0.2
# What is shown: its label, its key in a metrics line, and how.
_SHOWN = (
    ("loss", "loss", ".4f"),
    ("eval", "eval_loss", ".4f"),
    ("lr", "learning_rate", ".2e"),
)


class ProgressBar:
    """A bar at the foot of a terminal; in a file or pipe a line every half minute.

    Args:
        first_step: steps that the run has behind it.
        is_shown: False shows nothing.
        clock: tells seconds.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        is_shown: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps, self._first_step, self._step = num_steps, first_step, first_step
        self._clock, self._begin = clock, clock()
        self._told = self._begin
        self._text, self._line = "", {}
        # A bar draws over itself, which a file keeps all of.
        is_terminal = sys.stderr.isatty()
        self._writes_lines = is_shown and not is_terminal
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc="train",
            unit=" steps",
            disable=not (is_shown and is_terminal),
            dynamic_ncols=True,
            mininterval=_DRAW_SECONDS,
        )

    def advance(self) -> None:
        """One step further."""
        self._step += 1
        self._bar.update()
        now = self._clock()
        if self._writes_lines and now - self._told >= _LINE_SECONDS:
            self._told = now
            print(self._as_line(now), file=sys.stderr, flush=True)

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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Say that the run evaluates meanwhile."""
        self._bar.set_description_str("evaluate")
        yield
        self._bar.set_description_str("train")

    def close(self) -> None:
        self._bar.close()

    def _as_line(self, now: float) -> str:
        num_done = self._step - self._first_step
        left = (now - self._begin) / num_done * (self._num_steps - self._step)
        text = f"step {self._step} of {self._num_steps}"
        return ", ".join(filter(None, [text, self._text, f"{tqdm.format_interval(left)} left"]))
