"""Who does what when in a pipeline: the operations of every process, in order, computed beforehand.

The layers are cut into `stages x virtual` consecutive parts; part k lives on stage k mod stages, so
that neighbouring parts are on neighbouring stages (interleaved virtual stages; with one virtual
stage this is plain 1F1B). Every process computes the same plan for all of them by playing the step
through with a forward pass of one unit of time and a backward pass of two.

A message is placed right behind the work that makes it, at both of its ends and in one order that
all processes share. So sends that wait for their receiver cannot lock the processes up, and both
ends of a pair see the same order of messages.

Sources: PipeDream-Flush, Megatron-LM's interleaved schedule (how many micro-batches are in flight).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "send", "receive"]
FORWARD_TIME, BACKWARD_TIME = 1, 2


class Operation(NamedTuple):
    """One thing that a process does.

    Attributes:
        kind: `forward` and `backward` compute; `send` and `receive` are the two ends of a message.
        of: for a message, whether it carries `forward` rows or a `backward` gradient; the same as
            `kind` for work.
        part: the part that works, or whose work the message carries.
        micro_batch: which one.
        peer: the stage at the other end of a message; its own for work.
    """

    kind: Kind
    of: Literal["forward", "backward"]
    part: int
    micro_batch: int
    peer: int


class Work(NamedTuple):
    of: Literal["forward", "backward"]
    part: int
    micro_batch: int


@dataclass(frozen=True)
class Played:
    """Start and end of every work of a step.

    Attributes:
        times: (start, end) of every work.
        most_in_flight: per stage, the most forward passes that wait for their backward pass.
    """

    times: dict[Work, tuple[int, int]]
    most_in_flight: list[int]

    @property
    def length(self) -> int:
        return max(end for _, end in self.times.values())


@lru_cache(maxsize=16)
def plan(
    stages: int, virtual: int, micro_batches: int, forward_only: bool = False
) -> list[list[Operation]]:
    """The operations of every stage, in order. Kept: every step of a run asks for the same.

    Args:
        stages: processes of the pipeline.
        virtual: parts of the layers on each of them.
        forward_only: for evaluation.
    """
    played = play(stages, virtual, micro_batches, forward_only)
    last = stages * virtual - 1
    # Sorted by time; messages come before work that starts as they arrive.
    timed: list[list[tuple]] = [[] for _ in range(stages)]
    for work, (start, end) in played.times.items():
        stage = work.part % stages
        timed[stage].append((start, 1, work, Operation(work.of, *work, stage)))
        towards = work.part + (1 if work.of == "forward" else -1)
        if 0 <= towards <= last:
            peer = towards % stages
            timed[stage].append((end, 0, work, Operation("send", *work, peer)))
            timed[peer].append((end, 0, work, Operation("receive", *work, stage)))
    return [[operation for *_, operation in sorted(each)] for each in timed]


def play(stages: int, virtual: int, micro_batches: int, forward_only: bool = False) -> Played:
    """Play a step: every stage does what it can, forward passes first while few are in flight."""
    parts = stages * virtual
    forwards = [_order(stages, virtual, micro_batches, stage) for stage in range(stages)]
    backwards = [
        [] if forward_only else _order(stages, virtual, micro_batches, stage, last_part_first=True)
        for stage in range(stages)
    ]
    limits = [
        len(forwards[stage]) if forward_only else _limit(stages, virtual, stage)
        for stage in range(stages)
    ]
    times: dict[Work, tuple[int, int]] = {}
    in_flight, most = [0] * stages, [0] * stages
    free_at = [0] * stages
    now = 0

    def is_done(work: Work) -> bool:
        return work in times and times[work][1] <= now

    def is_ready(work: Work) -> bool:
        if work.of == "forward":
            return work.part == 0 or is_done(Work("forward", work.part - 1, work.micro_batch))
        behind = Work("backward", work.part + 1, work.micro_batch)
        own = Work("forward", work.part, work.micro_batch)
        return is_done(own) and (work.part == parts - 1 or is_done(behind))

    def begin(stage: int, work: Work) -> None:
        is_forward = work.of == "forward"
        (forwards if is_forward else backwards)[stage].remove(work)
        in_flight[stage] += 1 if is_forward else -1
        most[stage] = max(most[stage], in_flight[stage])
        free_at[stage] = now + (FORWARD_TIME if is_forward else BACKWARD_TIME)
        times[work] = (now, free_at[stage])

    def choose(stage: int, limit: int) -> Work | None:
        following = forwards[stage][:1]
        if following and in_flight[stage] < limit and is_ready(following[0]):
            return following[0]
        return next((work for work in backwards[stage] if is_ready(work)), None)

    while any(forwards) or any(backwards):
        for stage in range(stages):
            if free_at[stage] <= now and (work := choose(stage, limits[stage])):
                begin(stage, work)
        busy_until = [end for end in free_at if end > now]
        if busy_until:
            now = min(busy_until)
            continue
        # Everybody waits: a last group of micro-batches that is smaller than the pipeline needs
        # one more in flight somewhere.
        stage = next(s for s in range(stages) if forwards[s] and is_ready(forwards[s][0]))
        limits[stage] += 1
    return Played(times, most)


def _order(
    stages: int, virtual: int, micro_batches: int, stage: int, last_part_first: bool = False
) -> list[Work]:
    """Micro-batches in groups of as many as there are stages; a group passes part after part."""
    own = [round_ * stages + stage for round_ in range(virtual)]
    of = "backward" if last_part_first else "forward"
    return [
        Work(of, part, micro_batch)
        for first in range(0, micro_batches, stages)
        for part in (reversed(own) if last_part_first else own)
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]


def _limit(stages: int, virtual: int, stage: int) -> int:
    """Forward passes that a stage may have waiting for their backward pass."""
    if virtual == 1:
        return stages - stage
    return 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
