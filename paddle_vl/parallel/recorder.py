"""What a rank sends: every collective of this package while recording, in order.

For counts that hold on any machine, and for comparing the order of ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle.distributed as dist
from paddle import Tensor

# Where this package calls each collective, and which argument holds what a rank contributes.
_SITES = (
    (dist, "all_reduce", 0),
    (dist, "all_gather", 1),
    (dist.stream, "all_gather", 1),
    (dist.stream, "reduce_scatter", 1),
    (dist, "alltoall_single", 1),
    (dist, "isend", 0),
)


class Collective(NamedTuple):
    """One call on one rank.

    Attributes:
        phase: what the recording was told it is in.
        kind: all_reduce, all_gather, reduce_scatter or alltoall_single; isend for a message to
            one rank.
        num_ranks: size of the group.
        num_bytes: what this rank contributes.
    """

    phase: str
    kind: str
    num_ranks: int
    num_bytes: int


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
    kept = [(module, name, getattr(module, name)) for module, name, _ in _SITES]
    try:
        for module, name, position in _SITES:
            function = getattr(module, name)
            setattr(module, name, _recording(recording, name, position, function))
        yield recording
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _recording(
    recording: Recording, kind: str, position: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        sent: Tensor = args[position]
        group = kwargs.get("group", args[2] if kind == "isend" else None)
        num_ranks = dist.get_world_size() if group is None else group.nranks
        num_bytes = sent.size * sent.element_size()
        recording.calls.append(Collective(recording.phase, kind, num_ranks, num_bytes))
        return function(*args, **kwargs)

    return recorded
