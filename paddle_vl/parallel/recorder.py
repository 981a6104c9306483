"""What a rank sends: every collective of this package while recording, in order.

For counts that hold on any machine, and for comparing the order of ranks; `collective_check` stops
a run at the first one that ranks do not agree on.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle.distributed as dist

# Where this package calls each collective, and the argument that holds what a rank contributes.
SITES = (
    (dist, "all_reduce", "tensor"),
    (dist, "all_gather", "tensor"),
    (dist.stream, "all_gather", "tensor"),
    (dist.stream, "reduce_scatter", "tensor_or_tensor_list"),
    (dist, "alltoall_single", "in_tensor"),
    (dist, "broadcast", "tensor"),
    (dist, "barrier", None),
    (dist, "all_gather_object", None),
    (dist, "isend", "tensor"),
    (dist, "irecv", "tensor"),
)
_MESSAGES = ("isend", "irecv")
# Ranks may contribute different numbers of rows to one, and objects of any size to the other.
_UNEVEN = ("alltoall_single", "all_gather_object")


class Collective(NamedTuple):
    """One call on one rank.

    Attributes:
        phase: what the recording was told it is in.
        kind: the function's name; isend and irecv are messages to and from one rank.
        ranks: of the group, in its order; sender and receiver of a message.
        num_bytes: what this rank contributes, or receives in a message; 0 for objects.
        dtype, shape: of that; empty for objects and barriers.
    """

    phase: str
    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def is_message(self) -> bool:
        return self.kind in _MESSAGES

    @property
    def line(self) -> tuple[bool, tuple[int, ...]]:
        """Whose order counts: all collectives of these ranks, or messages from one to another."""
        return self.is_message, self.ranks

    @property
    def agreed(self) -> tuple:
        """What must be the same on every rank of a line."""
        if self.is_message:
            return self.dtype, self.shape
        return (self.kind, self.dtype, () if self.kind in _UNEVEN else self.shape)

    def describe(self) -> str:
        """E.g. `all_gather of float32 [12, 4] in backward`."""
        what = f"{self.kind} of {self.dtype} {list(self.shape)}" if self.dtype else self.kind
        return f"{what} in {self.phase}" if self.phase else what


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


@contextmanager
def observed(observe: Callable[[Collective], object]) -> Iterator[None]:
    """Call `observe` on this rank right before each of its collectives."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in SITES]
    # Some of Paddle's are made of others.
    running: list[str] = []
    try:
        for module, name, argument in SITES:
            function = getattr(module, name)
            setattr(module, name, _observed(observe, running, name, argument, function))
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _observed(
    observe: Callable[[Collective], object],
    running: list[str],
    kind: str,
    argument: str | None,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def observing(*args: Any, **kwargs: Any) -> Any:
        if running:
            return function(*args, **kwargs)
        observe(_call(kind, argument, signature.bind(*args, **kwargs).arguments))
        running.append(kind)
        try:
            return function(*args, **kwargs)
        finally:
            running.pop()

    return observing


def _call(kind: str, argument: str | None, given: dict[str, Any]) -> Collective:
    group, own = given.get("group"), dist.get_rank()
    ranks = tuple(range(dist.get_world_size()) if group is None else group.ranks)
    if kind in _MESSAGES:
        ranks = (own, given["dst"]) if kind == "isend" else (given["src"], own)
    if argument is None:
        return Collective("", kind, ranks, 0)
    sent = given[argument]
    dtype = str(sent.dtype).removeprefix("paddle.")
    num_bytes = sent.size * sent.element_size()
    return Collective("", kind, ranks, num_bytes, dtype, tuple(sent.shape))


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
