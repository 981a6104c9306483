"""What a rank says when an operation of a gloo group fails: which rank has ended, or does not come.

Gloo names neither. Every rank that waits for more than a moment tells the run's store where, from a
thread: Python runs on while the main thread waits in gloo.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.time_limit import limit_waits
from paddle_vl.parallel.store import rendezvous
from paddle_vl.parallel.store.membership import CONTINUE, logs_text, ranks_text

logger = logging.getLogger(__name__)

# A wait is told after this many seconds, and found to be over within as many.
_TELL_AFTER = 1.0
# For the store to notice that a rank has ended: its connections are closed one after the other.
_NOTICE_SECONDS = 2.0
_PEER = re.compile(r"pair_rank = (\d+)")


class PeerError(RuntimeError):
    """Another rank has ended, or does not come."""


@dataclass(frozen=True)
class _Wait:
    """An operation under way on this rank."""

    group: Any
    operation: str
    # Which of the group's operations on this rank.
    number: int
    begin: float = field(default_factory=time.monotonic)

    def describe(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "ranks": ranks_of(self.group),
            "number": self.number,
        }


# Ranks of the run in a group that Paddle's own list of groups does not know.
_ranks: dict[int, list[int]] = {}
_ids: dict[int, int] = {}
_numbers: Counter[int] = Counter()
# By thread.
_under_way: dict[int, _Wait] = {}
_teller: list[threading.Thread] = []
_raised: list[PeerError] = []


def know_group(group: core.ProcessGroup, group_id: int, ranks: list[int] | None = None) -> None:
    """Remember a group that has been made: its number, and its ranks if Paddle is not told them.

    From now on it waits as long for its ranks as `parallel.timeout_s` says.
    """
    limit_waits(group_id, group.rank(), group.size(), rendezvous.timeout_s())
    _ids[id(group)] = group_id
    if ranks is not None:
        _ranks[id(group)] = ranks
    if not _teller:
        _teller.append(threading.Thread(target=_tell_waits, name="tell-waits", daemon=True))
        _teller[0].start()


def id_of(group: core.ProcessGroup) -> int | None:
    """The number of a group, None for one that was made before install()."""
    return _ids.get(id(group))


def ranks_of(group: core.ProcessGroup) -> list[int]:
    """The ranks of the run that are in a group, in its order."""
    if id(group) in _ranks:
        return _ranks[id(group)]
    known = collective._get_group_map().get(_ids.get(id(group)))
    return list(range(group.size())) if known is None else list(known.ranks)


def finish(group: core.ProcessGroup, operation: str, start: Callable[..., Any], *arguments) -> None:
    """Run an operation of gloo to its end.

    Raises:
        PeerError: it fails; names the ranks that have ended, or do not come.
    """
    _numbers[id(group)] += 1
    thread, wait = threading.get_ident(), _Wait(group, operation, _numbers[id(group)])
    _under_way[thread] = wait
    try:
        start(group, *arguments).wait()
    except RuntimeError as error:
        raise_explained(wait, error)
    finally:
        del _under_way[thread]


def make_group(name: str, create: Callable[[], core.ProcessGroup]) -> core.ProcessGroup:
    """Make a group, for which its ranks meet in the store.

    Raises:
        PeerError: as `finish`.
    """
    # Gloo would wait minutes for a rank that had left its address before it ended.
    if gone := _gone(0.0):
        raise _not_made(name, gone)
    try:
        return create()
    except (RuntimeError, ValueError) as error:
        raise _not_made(name, _gone(), error) from error


def _not_made(name: str, gone: list[int], error: Exception | None = None) -> PeerError:
    problem = f"{ranks_text(gone)} ended meanwhile" if gone else _first_line(error)
    return _lost(f"rank {_own_rank()}: {name} could not be made: {problem}; {_see(gone)}{CONTINUE}")


def raise_explained(wait: _Wait, error: RuntimeError) -> NoReturn:
    """Raise what a failed operation means."""
    text, ranks = str(error), ranks_of(wait.group)
    seconds = time.monotonic() - wait.begin
    what = f"rank {_own_rank()}: {wait.operation} of ranks {ranks}"
    lost = _PEER.search(text)
    # Gloo says TIMEOUT of a closed connection too, and then names the peer.
    is_late = "TIMEOUT" in text and lost is None
    gone = _gone(0.0 if is_late else _NOTICE_SECONDS)
    if not gone and lost and int(lost[1]) < len(ranks):
        gone = [ranks[int(lost[1])]]
        problem = f"failed: the connection to {ranks_text(gone)} is lost"
    elif gone:
        has = "have ended, in this order" if len(gone) > 1 else "has ended"
        problem = f"failed: {ranks_text(gone)} {has}"
    elif is_late:
        gone, where = _absent(wait, ranks)
        problem = f"got no answer in {seconds:.0f} s: {where}"
    else:
        problem = f"failed: {_first_line(error)}"
    raise _lost(f"{what} {problem}; {_see(gone)}{CONTINUE}") from error


def unwrapped(paddles_own: Callable) -> Callable:
    """A function that runs a backward pass, which raises what a peer's end raised in it.

    Paddle raises another error, whose text is the trace.
    """

    def backward(*args, **kwargs):
        num_raised = len(_raised)
        try:
            return paddles_own(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            if len(_raised) == num_raised:
                raise
            raise _raised[-1] from error

    return backward


def _absent(wait: _Wait, ranks: list[int]) -> tuple[list[int], str]:
    """Ranks that are not in this operation, and in words what they do."""
    membership = rendezvous.meet().membership
    membership.tell(wait.describe())
    told = membership.waits()
    absent, words = [], []
    for rank in ranks:
        found = told.get(rank)
        if found is not None and (found["ranks"], found["number"]) == (ranks, wait.number):
            continue
        absent.append(rank)
        doing = "is busy with something else"
        if found is not None:
            doing = f"waits in {found['operation']} of ranks {found['ranks']}"
        words.append(f"rank {rank} has not come to it and {doing}")
    if not absent:
        return [], "all of them came to it in the end, the last one too late"
    return absent, ", ".join(words)


def _tell_waits() -> None:
    """Tell the store what this rank waits in, and when it does no more."""
    membership, told = rendezvous.meet().membership, None
    while True:
        time.sleep(_TELL_AFTER)
        now = time.monotonic()
        waits = [wait for wait in _under_way.copy().values() if now - wait.begin >= _TELL_AFTER]
        longest = min(waits, key=lambda wait: wait.begin, default=None)
        if longest is not told:
            told = longest
            membership.tell(None if told is None else told.describe())


def _gone(seconds: float = _NOTICE_SECONDS) -> list[int]:
    """Ranks that have ended, in that order; waits that long for one."""
    deadline = time.monotonic() + seconds
    while not (gone := rendezvous.gone_ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone


def _see(ranks: list[int]) -> str:
    return f"{logs_text(ranks)} for the cause, and " if ranks else ""


def _own_rank() -> int:
    return rendezvous.meet().rank


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _lost(message: str) -> PeerError:
    # At once: a launcher that has seen a rank end leaves the others less than a second.
    logger.error(message)
    return peer_error(message)


def peer_error(message: str) -> PeerError:
    """The error to raise, which `unwrapped` knows again when Paddle has hidden it."""
    _raised.append(PeerError(message))
    return _raised[-1]
