"""What one process sends and reads in turns of the training loop, counted."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddle_vl.parallel.recorder import Collective, Recording, record_collectives
from paddle_vl.train.host_reads import record_host_reads
from paddle_vl.train.phases import Phase, PhaseClock
from paddle_vl.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
# Reads of messages between hosts; and of Paddle's attention for CPUs, which others do not have.
OF_NO_DEVICE = ("parallel/processes.py", "nn/masked_attention.py")
NO_PHASE = "no phase"


@dataclass(frozen=True)
class TurnCounts:
    """One turn of the training loop on one process.

    Attributes:
        step: that it made.
        collectives: in order, by phase of the step.
        reads: `file:line` of each read of the device.
        host_reads: the same of reads that are none of the device's.
    """

    step: int
    collectives: list[Collective]
    reads: list[str]
    host_reads: list[str]


class _NamingClock(PhaseClock):
    """Names the phases of a step to a recording of collectives."""

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
    """Record collectives by the phase of a step; what is in none of them is in `NO_PHASE`."""
    with record_collectives() as recording:
        recording.phase = NO_PHASE
        with _NamingClock(recording).step():
            yield recording


def counted_turn(turn: Callable[[], object], trainer: Trainer) -> TurnCounts:
    """Do one turn of the loop and count."""
    with recorded_phases() as recording, record_host_reads() as reads:
        turn()
    reads = [place.removeprefix(f"{ROOT}/") for place in reads]
    of_device = [not place.startswith(OF_NO_DEVICE) for place in reads]
    return TurnCounts(
        trainer.step,
        recording.calls,
        [place for place, is_of in zip(reads, of_device, strict=True) if is_of],
        [place for place, is_of in zip(reads, of_device, strict=True) if not is_of],
    )


def by_kind_of_step(turns: Sequence[TurnCounts], logging_steps: int, reads_later: bool) -> dict:
    """The most of each among all steps outside of logging steps, and among those on them.

    Args:
        reads_later: a report is read in the turn behind its own, whose reads count as the logging
            step's then.
    """
    reads = {turn.step: turn.reads for turn in turns}
    found = {}
    for kind in ("outside", "on"):
        chosen = []
        for turn in turns:
            logs, follows = (step % logging_steps == 0 for step in (turn.step, turn.step - 1))
            if kind == "on" and logs and (not reads_later or turn.step + 1 in reads):
                later = reads[turn.step + 1] if reads_later else []
                chosen.append((turn, [*turn.reads, *later]))
            elif kind == "outside" and not logs:
                chosen.append((turn, [] if reads_later and follows else turn.reads))
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
