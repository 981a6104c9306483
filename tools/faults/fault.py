"""What a kind of fault is: when and how it strikes, and what is expected of the run."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from faults.moments import PLACES, Moment, draw_moment
from faults.runs import NUM_RANKS, STARTS, Ended, SignalledRun

ALL_STARTS = tuple(STARTS)
SEVERAL_RANKS = tuple(start for start in STARTS if NUM_RANKS[start] > 1)


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
