"""Base class of the faults."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from faults.moments import PLACES, Moment, draw_moment
from faults.runs import NUM_RANKS, STARTS, Ended, SignalledRun

ALL_STARTS = tuple(STARTS)
SEVERAL_RANKS = tuple(start for start in STARTS if NUM_RANKS[start] > 1)


@dataclass
class Damage:
    """What a fault does to the folder of a run that has ended.

    Attributes:
        checkpoint: step of the damaged checkpoint.
        metrics: step whose line of metrics.jsonl is missing.
        what: description for the report.
        mentioned: text that the next start must log.
    """

    checkpoint: int | None = None
    metrics: int | None = None
    what: str = ""
    mentioned: Sequence[str] = field(default_factory=tuple)


class Fault(ABC):
    """A kind of fault. Subclasses define when and how it strikes and what is expected of the run.

    Attributes:
        name: name in the table and for `--kinds`.
        sentence: what it does.
        starts: how the runs are started, keys of `STARTS`.
        overrides: settings of the runs.
        places, steps: see `draw_moment`.
        is_request: the run must leave a checkpoint of the last reported step.
        goes_on: the run must survive the fault and complete.
        codes: accepted exit codes of the command; None for any.
        extra_lines: lines added to the training data, see `write_tiny_run`.
    """

    name: str
    sentence: str
    starts: Sequence[str] = ALL_STARTS
    overrides: Sequence[str] = ()
    places: Sequence[str] = tuple(PLACES)
    steps: range | None = None
    is_request: bool = False
    goes_on: bool = False
    codes: Sequence[int] | None = None
    extra_lines: ClassVar[Sequence[bytes]] = ()

    def unavailable(self) -> str | None:
        """Reason why this machine cannot inject the fault; None if it can."""
        return None

    def moment(self, rng: random.Random) -> Moment:
        """Draw the moment of the fault."""
        return draw_moment(rng, self.places, self.steps)

    @contextmanager
    def around(self, output_dir: Path) -> Iterator[None]:
        """Context from before the first start until the outcome is known."""
        yield

    @abstractmethod
    def strike(self, run: SignalledRun, rng: random.Random) -> list[str] | None:
        """Inject the fault now; return what went wrong with the injection, if anything.

        Raises:
            TooLateError: the run had ended.
        """

    def problems(self, ended: Ended) -> list[str]:
        """Deviations from how the run should have ended."""
        if self.codes is not None and ended.code not in self.codes:
            return [f"exit code {ended.code}, not one of {', '.join(map(str, self.codes))}"]
        return []

    def damage(self, output_dir: Path, rng: random.Random) -> Damage:
        """Damage the files of the run; called when it has ended."""
        return Damage()

    def before_comparison(self, output_dir: Path) -> None:
        """Called when the resumed run has completed."""
        return
