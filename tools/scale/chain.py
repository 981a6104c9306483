"""The calls of a simulated rank, and the longest chain of those of all stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paddle_vl.train.memory_needed import NeededMemory

# A pass of a micro-batch through a stage, and its time: forward, and backward.
PASS, FORWARD, BACKWARD = "pass", 1, 2


@dataclass(frozen=True)
class Call:
    """A collective or message of a step, or a pass.

    Attributes:
        kind: what it carries, such as `gradients`.
        operation, ranks: see `paddle_vl.parallel.recorder.Collective`; or `PASS` and this rank.
        num_bytes: that this rank contributes, or receives by a recv.
        pieces: calls that it stands for, as full parameters take more buckets.
        is_sized: whether parameters determine the bytes of the run, and not how they grow.
        heads: of attention, that each rank has of what it carries; 0 where it carries no heads.
        time: of a pass, in forward passes of the stage.
    """

    kind: str
    operation: str
    ranks: tuple[int, ...]
    num_bytes: int
    pieces: int = 1
    is_sized: bool = False
    heads: int = 0
    time: float = 0

    @property
    def sent(self) -> float:
        """Bytes that leave the rank: over a ring, or directly."""
        others = len(self.ranks) - 1
        part = others / (others + 1)
        shares = {"all_gather": others, "recv": 0, "send": 1, "all_reduce": 2 * part}
        return self.num_bytes * shares.get(self.operation, part)


class Simulated(NamedTuple):
    """One rank of a run.

    Attributes:
        calls: of a step, with its passes through the pipeline, in order.
        memory: what the rank holds, without activations.
        group_sizes: ranks of every group that it is in.
        start_calls: collectives of the start, but for those about files and data.
        agreed: numbers that all ranks exchange before a step.
        rows: token rows of a micro-batch.
    """

    rank: int
    calls: list[Call]
    memory: NeededMemory
    group_sizes: list[int]
    start_calls: int
    agreed: int
    rows: int


def longest_chain(by_stage: Sequence[Simulated], of: Callable[[Call], float]) -> float:
    """The most that calls of a step which follow one another, with passes between them, take: a
    rank's own, messages, and collectives of several stages.

    Args:
        by_stage: the first rank of each pipeline stage.
        of: what a call takes.
    """
    left = {each.rank: list(each.calls) for each in by_stage}
    depth = dict.fromkeys(left, 0.0)
    # Depths of the messages on their way, by sender and receiver.
    under_way: dict[tuple[int, ...], list[float]] = {}

    def take(rank: int) -> bool:
        call, members, begin = left[rank][0], [rank], depth[rank]
        if call.operation == "send":
            under_way.setdefault(call.ranks, []).append(begin)
        elif call.operation == "recv":
            if not under_way.get(call.ranks):
                return False
            begin = max(begin, under_way[call.ranks].pop(0))
        else:
            members = [each for each in call.ranks if each in left]
            heads = [left[each][:1] for each in members]
            if any(not head or head[0].ranks != call.ranks for head in heads):
                return False
            begin = max(depth[each] for each in members)
        for each in members:
            depth[each] = begin + of(call)
            left[each].pop(0)
        return True

    while any(left.values()):
        if not any([take(rank) for rank, calls in left.items() if calls]):
            raise ValueError("a stage waits for a message that no stage sends")
    return max(depth.values())
