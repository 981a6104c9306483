"""What a rank sends: every collective and message of this process while recording, in order.

Fleet's own traffic and this package's, for counts that hold on any machine, and for comparing the
order of ranks; `collective_check` stops a run at the first one that ranks do not agree on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from paddle_vl.parallel.traffic import Collective, observed

__all__ = ["Collective", "Recording", "first_difference", "record_collectives"]


@dataclass
class Recording:
    """Calls so far; set `phase` to name what follows."""

    phase: str = ""
    calls: list[Collective] = field(default_factory=list)

    def of(self, phase: str) -> list[Collective]:
        return [call for call in self.calls if call.phase == phase]


@contextmanager
def record_collectives() -> Iterator[Recording]:
    """Record this rank's collectives while entered; they run as ever."""
    recording = Recording()

    def record(call: Collective) -> None:
        recording.calls.append(call._replace(phase=recording.phase))

    with observed(record):
        yield recording


def first_difference(calls_of_ranks: Sequence[Sequence[Collective]]) -> str | None:
    """Where the recordings of all ranks, by rank, first differ, line by line; None if nowhere.

    Compares kind, dtype, shape and phase of every collective with those of the line's first rank,
    and dtype and shape of every message with those at its other end.
    """
    lines = dict.fromkeys(call.line for calls in calls_of_ranks for call in calls)
    for line in lines:
        is_message, ranks = line
        first, *others = dict.fromkeys(ranks)
        own = [[call for call in calls if call.line == line] for calls in calls_of_ranks]
        for other in others:
            pairs = zip(own[first], own[other], strict=False)
            same = [
                one.agreed == two.agreed and (is_message or one.phase == two.phase)
                for one, two in pairs
            ]
            position = same.index(False) if False in same else len(same)
            if position < max(len(own[first]), len(own[other])):
                what = "message" if is_message else "collective"
                return (
                    f"{what} {position + 1} of ranks {list(ranks)}: "
                    f"rank {first} {_at(own[first], position)}, "
                    f"rank {other} {_at(own[other], position)}"
                )
    return None


def _at(calls: Sequence[Collective], position: int) -> str:
    if position < len(calls):
        return calls[position].describe()
    return f"nothing, its last {calls[-1].describe()}" if calls else "nothing at all"
