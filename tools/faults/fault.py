"""What a kind of fault is."""

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
        checkpoint: step of the one that is no longer good.
        metrics: step whose line of metrics.jsonl is gone.
        what: for the report.
        mentioned: what the next start has to say.
    """

    checkpoint: int | None = None
    metrics: int | None = None
    what: str = ""
    mentioned: Sequence[str] = field(default_factory=tuple)


class Fault(ABC):
    """A kind of fault: subclasses say when and how it strikes, and what is expected of the run.

    Attributes:
        name: for the table and `--kinds`.
        sentence: what it does.
        starts: how runs are started that it strikes.
        overrides: settings of its runs.
        places, steps: see `draw_moment`.
        is_request: afterwards there has to be a checkpoint of the last step that was reported.
        goes_on: the run is not to end of it, and has to complete by itself.
        codes: exit codes of the command that are right; None for any.
        extra_lines: of the training data, see `write_tiny_run`.
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
        """Why it cannot be injected on this machine; None where it can."""
        return None

    def moment(self, rng: random.Random) -> Moment:
        """When it strikes."""
        return draw_moment(rng, self.places, self.steps)

    @contextmanager
    def around(self, output_dir: Path) -> Iterator[None]:
        """Entered before the first start and left when the outcome is known."""
        yield

    @abstractmethod
    def strike(self, run: SignalledRun, rng: random.Random) -> list[str] | None:
        """Inject it, now; what went wrong with that, if anything did.

        Raises:
            TooLateError: the run was over before.
        """

    def problems(self, ended: Ended) -> list[str]:
        """What is not as it should be about how the run ended."""
        if self.codes is not None and ended.code not in self.codes:
            return [f"exit code {ended.code}, not one of {', '.join(map(str, self.codes))}"]
        return []

    def damage(self, output_dir: Path, rng: random.Random) -> Damage:
        """Damage what the run has left; called when it has ended."""
        return Damage()

    def before_comparison(self, output_dir: Path) -> None:
        """Called when the run has been continued to its end."""
        return
