"""What a kind of fault is: when and how it strikes, and what is expected of the run.

Moments are drawn from a seed, and found in a run by the files that it writes.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from faults.runs import NUM_RANKS, STARTS, Ended, SignalledRun
from faults.tiny_run import NUM_STEPS

ALL_STARTS = tuple(STARTS)
SEVERAL_RANKS = tuple(start for start in STARTS if NUM_RANKS[start] > 1)
# Places of a run and their weights: during startup, after a step (in the next step, an evaluation
# or a save, depending on the delay), while a checkpoint is written, at the end.
PLACES = {"start": 2, "step": 5, "write": 2, "end": 1}
_START_S = 8.0
_STEP_S = 0.5
_WRITE_S = 0.05
_WAIT_S = 120.0
_POLL_S = 0.003


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
            run.check_runs()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self} does not come within {_WAIT_S:g} s:\n{run.said()}")
            time.sleep(_POLL_S)
        time.sleep(self.delay_s)
        run.check_runs()

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


@dataclass
class Damage:
    """What a fault does to the folder of a run that has ended.

    Attributes:
        checkpoint: step of the damaged checkpoint.
        restored: step of a checkpoint that is not in its place and that the next start must find.
        metrics: step whose line of metrics.jsonl is missing.
        what: description for the report.
        mentioned: text that the next start must log.
        problems: what went wrong while the folder was damaged.
    """

    checkpoint: int | None = None
    restored: int | None = None
    metrics: int | None = None
    what: str = ""
    mentioned: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: name in the table and for `--kinds`.
        sentence: what it does.
        strike: injects the fault now; returns what went wrong with the injection, if anything;
            raises `TooLateError` if the run had ended.
        damage: damages the files of the run; called when it has ended.
        starts: how the runs are started, keys of `STARTS`.
        overrides: settings of the runs.
        places, steps: see `draw_moment`; without places the rank itself has the moment.
        is_request: the run must leave a checkpoint of the last reported step.
        goes_on: the run must survive the fault and complete.
        waits: `strike` returns when the fault has happened; otherwise it happens when it is called.
        may_trace: a traceback in the output is right.
        check: deviations from how the run should have ended.
        own_data: the fault changes the data, and has some of its own.
        data_settings: settings of the runs and of the undisturbed one; DATA is their data's folder.
        extra_lines: lines added to the training data, see `write_tiny_run`.
        environment: variables of the first start, see `hooks/sitecustomize.py`; called with the
            output folder and the start.
        around: context from before the first start until the outcome is known.
        unavailable: reason why this machine cannot inject the fault; None if it can.
        before_comparison: called when the resumed run has completed.
    """

    name: str
    sentence: str
    strike: Callable[[SignalledRun, random.Random], list[str] | None]
    damage: Callable[[SignalledRun, random.Random], Damage] = lambda run, rng: Damage()
    starts: Sequence[str] = ALL_STARTS
    overrides: Sequence[str] = ()
    places: Sequence[str] = tuple(PLACES)
    steps: range | None = None
    is_request: bool = False
    goes_on: bool = False
    waits: bool = False
    may_trace: bool = False
    check: Callable[[Ended], list[str]] = lambda ended: []
    own_data: bool = False
    data_settings: Sequence[str] = ()
    extra_lines: Sequence[bytes] = ()
    environment: Callable[[Path, str, random.Random], dict[str, str]] = lambda out, start, rng: {}
    around: Callable[[Path], AbstractContextManager[object]] = lambda output_dir: nullcontext()
    unavailable: Callable[[], str | None] = lambda: None
    before_comparison: Callable[[Path], None] = lambda output_dir: None

    def moment(self, rng: random.Random) -> Moment:
        """Draw the moment of the fault."""
        return draw_moment(rng, self.places, self.steps) if self.places else Moment("start", 0, 0.0)

    def problems(self, ended: Ended) -> list[str]:
        """Deviations from how the run should have ended."""
        if self.goes_on and ended.code != 0:
            return [f"exit code {ended.code}, not 0"]
        return self.check(ended)
