"""Counts of collectives and of host reads of the device in turns of the training loop, on one rank.

A host read waits until the device has computed the value. Counts hold on any machine: on a CPU a
read waits for nothing but happens at the same places of the code.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddle_vl.parallel.recorder import Collective, Recording, record_collectives
from paddle_vl.testing import record_host_reads
from paddle_vl.train.phases import Phase, PhaseClock
from paddle_vl.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
# Files that read messages between hosts, or that only run on a CPU: not reads of the device.
HOST_ONLY = ("parallel/ranks.py", "nn/attention.py", "nn/cpu/")
NO_PHASE = "no phase"


@dataclass(frozen=True)
class TurnCounts:
    """One turn of the training loop on one rank.

    Attributes:
        step: number of the step.
        collectives: in order, with the phase of the step.
        reads: `file:line` of each host read of the device.
        host_reads: the same of reads in `HOST_ONLY` files.
    """

    step: int
    collectives: list[Collective]
    reads: list[str]
    host_reads: list[str]


class _NamingClock(PhaseClock):
    """Tells a recording of collectives the phase of the step."""

    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def inside(self, name: Phase) -> AbstractContextManager[None]:
        return self._named(name)

    @contextmanager
    def _named(self, name: Phase) -> Iterator[None]:
        around, self._recording.phase = self._recording.phase, name.value
        try:
            with super().inside(name):
                yield
        finally:
            self._recording.phase = around


@contextmanager
def recorded_phases() -> Iterator[Recording]:
    """Record collectives with their phase of a step; outside of phases it is `NO_PHASE`."""
    with record_collectives() as recording:
        recording.phase = NO_PHASE
        with _NamingClock(recording).step():
            yield recording


def counted_turn(turn: Callable[[], object], trainer: Trainer) -> TurnCounts:
    """Run one turn of the loop and count."""
    with recorded_phases() as recording, record_host_reads() as reads:
        turn()
    reads = [place.removeprefix(f"{ROOT}/") for place in reads]
    return TurnCounts(
        trainer.step,
        recording.calls,
        [place for place in reads if not place.startswith(HOST_ONLY)],
        [place for place in reads if place.startswith(HOST_ONLY)],
    )


def by_kind_of_step(turns: Sequence[TurnCounts], logging_steps: int) -> dict:
    """Maximum counts over steps outside of logging steps, and over logging steps.

    A report is read in the turn after its own step; that read counts for the logging step.
    """
    reads = {turn.step: turn.reads for turn in turns}
    found = {}
    for kind in ("outside", "on"):
        chosen = []
        for turn in turns:
            logs, follows = (step % logging_steps == 0 for step in (turn.step, turn.step - 1))
            if kind == "on" and logs and turn.step + 1 in reads:
                chosen.append((turn, [*turn.reads, *reads[turn.step + 1]]))
            elif kind == "outside" and not logs:
                chosen.append((turn, [] if follows else turn.reads))
        turn, places = max(chosen, key=lambda one: (len(one[1]), len(one[0].collectives)))
        calls = Counter((call.phase, call.kind, call.num_bytes) for call in turn.collectives)
        found[kind] = {
            "collectives": [[*call, number] for call, number in calls.items()],
            "num_collectives": max(len(turn.collectives) for turn, _ in chosen),
            "reads": dict(Counter(places)),
            "num_reads": max(len(places) for _, places in chosen),
            "host_reads": dict(Counter(turn.host_reads)),
        }
    return found
