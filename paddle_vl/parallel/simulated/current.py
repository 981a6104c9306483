"""The simulated rank that the running code belongs to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_local = threading.local()
_num_outside = 0


@dataclass(eq=False)
class SimulatedRank:
    """One rank of a simulated mp group.

    Attributes:
        mp_group: a `paddle.distributed` group, with `rank` and `nranks`.
        observers: called with each collective before it runs.
    """

    mp_group: Any = None
    observers: list[Callable[[Any], object]] = field(default_factory=list)


def current_rank() -> SimulatedRank | None:
    """The simulated rank of this thread; None outside of a simulation."""
    return getattr(_local, "rank", None)


@contextmanager
def run_as(rank: SimulatedRank) -> Iterator[None]:
    """Be this rank in this thread.

    Raises:
        RuntimeError: this thread is a simulated rank already.
    """
    if current_rank() is not None:
        raise RuntimeError(
            "a simulated rank was started inside a simulated rank: leave the first one before"
        )
    _local.rank = rank
    try:
        yield
    finally:
        _local.rank = None


@contextmanager
def outside_of_simulation() -> Iterator[None]:
    """Mark a block that observes this process, not a simulated rank."""
    global _num_outside
    _num_outside += 1
    try:
        yield
    finally:
        _num_outside -= 1


def check_nothing_observes_the_process() -> None:
    """Check that no recording is open that would miss the ranks' collectives.

    Raises:
        RuntimeError: one is open.
    """
    if _num_outside:
        raise RuntimeError(
            "record_collectives was entered before the simulated ranks were started and would "
            "record none of their collectives: enter it on a rank, or read the `collectives` of "
            "the result"
        )
