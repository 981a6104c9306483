"""Moments of a fault, drawn from a seed and found in a run by the files that it writes."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from faults.runs import SignalledRun
from faults.tiny_run import NUM_STEPS

# Places of a run and their weights: during startup, after a step (in the next step, an evaluation
# or a save, depending on the delay), while a checkpoint is written, at the end.
PLACES = {"start": 2, "step": 5, "write": 2, "end": 1}
_START_S = 8.0
_STEP_S = 0.5
_WRITE_S = 0.05
_WAIT_S = 120.0
_POLL_S = 0.003


class TooLateError(Exception):
    """The run ended before its moment came."""


@dataclass(frozen=True)
class Moment:
    """A place in a run and a delay in seconds."""

    place: str
    step: int
    delay_s: float

    def __str__(self) -> str:
        names = {
            "start": "from the start",
            "step": f"behind step {self.step}",
            "write": f"in a checkpoint behind step {self.step}",
            "end": "behind the last step",
        }
        return f"{self.delay_s:.2f} s {names[self.place]}"

    def wait(self, run: SignalledRun) -> None:
        """Return at this moment.

        Raises:
            TooLateError: the run ended before.
            RuntimeError: the moment was not reached in time.
        """
        deadline = time.monotonic() + _WAIT_S
        while not self._has_come(run):
            _check_runs(run)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self} does not come within {_WAIT_S:g} s:\n{run.said()}")
            time.sleep(_POLL_S)
        time.sleep(self.delay_s)
        _check_runs(run)

    def _has_come(self, run: SignalledRun) -> bool:
        if self.place == "start":
            return True
        if run.last_step() < self.step:
            return False
        if self.place == "write":
            return any(run.output_dir.glob(".partial-checkpoint-*"))
        return True


def draw_moment(
    rng: random.Random, places: Sequence[str] = tuple(PLACES), steps: range | None = None
) -> Moment:
    """Draw a moment at one of these places, after one of these steps."""
    steps = steps or range(1, NUM_STEPS - 1)
    place = rng.choices(places, [PLACES[name] for name in places])[0]
    longest = {"start": _START_S, "write": _WRITE_S}.get(place, _STEP_S)
    step = NUM_STEPS if place == "end" else rng.choice(steps)
    return Moment(place, step, rng.uniform(0, longest))


def _check_runs(run: SignalledRun) -> None:
    if run.process.poll() is not None:
        raise TooLateError
