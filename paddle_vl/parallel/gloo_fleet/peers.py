"""Errors of gloo operations that name the ranks that have ended or are late.

Gloo does not name them. A thread on every rank, which runs while the main thread waits in gloo,
reports operations that last longer than a moment to the run's store.
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

from paddle_vl.parallel.gloo_fleet.time_limit import set_group_timeout
from paddle_vl.parallel.store import rendezvous
from paddle_vl.parallel.store.membership import CONTINUE, logs_text, ranks_text

logger = logging.getLogger(__name__)

# A wait is reported after this many seconds; its end is reported within the same time.
_REPORT_AFTER_S = 1.0
# Seconds for the store to notice that a rank has ended.
_NOTICE_S = 2.0
_PEER = re.compile(r"pair_rank = (\d+)")


class PeerError(RuntimeError):
    """Another rank has ended, or is late."""


@dataclass(frozen=True)
class _Wait:
    """An operation in progress on this rank.

    Attributes:
        number: position among the operations of the group on this rank.
    """

    group: Any
    operation: str
    number: int
    begin: float = field(default_factory=time.monotonic)

    def describe(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "ranks": ranks_of(self.group),
            "number": self.number,
        }


# Global ranks of groups that are missing in Paddle's own list of groups.
_ranks: dict[int, list[int]] = {}
_ids: dict[int, int] = {}
_numbers: Counter[int] = Counter()
# By thread.
_in_progress: dict[int, _Wait] = {}
_reporter: list[threading.Thread] = []
_raised: list[PeerError] = []


def register_group(group: core.ProcessGroup, group_id: int, ranks: list[int] | None = None) -> None:
    """Register a new group, and give it the timeout of the run.

    Args:
        ranks: global ranks, if Paddle does not know the group.
    """
    set_group_timeout(group_id, group.rank(), group.size(), rendezvous.timeout_s())
    _ids[id(group)] = group_id
    if ranks is not None:
        _ranks[id(group)] = ranks
    if not _reporter:
        _reporter.append(threading.Thread(target=_report_waits, name="report-waits", daemon=True))
        _reporter[0].start()


def id_of(group: core.ProcessGroup) -> int | None:
    """The id of a group, None for one that was made before install()."""
    return _ids.get(id(group))


def ranks_of(group: core.ProcessGroup) -> list[int]:
    """The global ranks of a group, in its order."""
    if id(group) in _ranks:
        return _ranks[id(group)]
    known = collective._get_group_map().get(_ids.get(id(group)))
    return list(range(group.size())) if known is None else list(known.ranks)


def finish(group: core.ProcessGroup, operation: str, start: Callable[..., Any], *arguments) -> None:
    """Run an operation of gloo to its end.

    Raises:
        PeerError: it failed; names the ranks that have ended or are late.
    """
    _numbers[id(group)] += 1
    thread, wait = threading.get_ident(), _Wait(group, operation, _numbers[id(group)])
    _in_progress[thread] = wait
    try:
        start(group, *arguments).wait()
    except RuntimeError as error:
        _raise_explained(wait, error)
    finally:
        del _in_progress[thread]


def make_group(name: str, create: Callable[[], core.ProcessGroup]) -> core.ProcessGroup:
    """Make a group, whose ranks find each other through the store.

    Raises:
        PeerError: as `finish`.
    """
    # Gloo would wait minutes for a rank that left its address in the store before it ended.
    if ended := _ended_ranks(0.0):
        raise _not_made(name, ended)
    try:
        return create()
    except (RuntimeError, ValueError) as error:
        raise _not_made(name, _ended_ranks(), error) from error


def peer_error(message: str) -> PeerError:
    """The error to raise, which `unwrapped` recovers when Paddle has hidden it."""
    _raised.append(PeerError(message))
    return _raised[-1]


def unwrapped(paddles_own: Callable) -> Callable:
    """A backward function that raises the PeerError of a collective in it.

    Paddle raises another error in its place, with the traceback as its text.
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


def _not_made(name: str, ended: list[int], error: Exception | None = None) -> PeerError:
    problem = f"{ranks_text(ended)} ended meanwhile"
    if not ended and error is not None:
        problem = _first_line(error)
    return _logged_error(
        f"rank {_own_rank()}: {name} could not be made: {problem}; {_see(ended)}{CONTINUE}"
    )


def _raise_explained(wait: _Wait, error: RuntimeError) -> NoReturn:
    text, ranks = str(error), ranks_of(wait.group)
    seconds = time.monotonic() - wait.begin
    what = f"rank {_own_rank()}: {wait.operation} of ranks {ranks}"
    lost = _PEER.search(text)
    # Gloo reports a closed connection as TIMEOUT too, but then names the peer.
    is_late = "TIMEOUT" in text and lost is None
    culprits = _ended_ranks(0.0 if is_late else _NOTICE_S)
    if not culprits and lost and int(lost[1]) < len(ranks):
        culprits = [ranks[int(lost[1])]]
        problem = f"failed: the connection to {ranks_text(culprits)} is lost"
    elif culprits:
        has = "have ended, in this order" if len(culprits) > 1 else "has ended"
        problem = f"failed: {ranks_text(culprits)} {has}"
    elif is_late:
        culprits, where = _late_ranks(wait, ranks)
        problem = f"got no answer in {seconds:.0f} s: {where}"
    else:
        problem = f"failed: {_first_line(error)}"
    raise _logged_error(f"{what} {problem}; {_see(culprits)}{CONTINUE}") from error


def _late_ranks(wait: _Wait, ranks: list[int]) -> tuple[list[int], str]:
    """Ranks that are not in this operation, and a text about what they do."""
    membership = rendezvous.meet().membership
    membership.report_wait(wait.describe())
    reported = membership.waits()
    late, texts = [], []
    for rank in ranks:
        found = reported.get(rank)
        if found is not None and (found["ranks"], found["number"]) == (ranks, wait.number):
            continue
        late.append(rank)
        doing = "is busy with something else"
        if found is not None:
            doing = f"waits in {found['operation']} of ranks {found['ranks']}"
        texts.append(f"rank {rank} has not come to it and {doing}")
    if not late:
        return [], "all of them came to it in the end, the last one too late"
    return late, ", ".join(texts)


def _report_waits() -> None:
    """Report begin and end of this rank's waits to the store."""
    membership, reported = rendezvous.meet().membership, None
    while True:
        time.sleep(_REPORT_AFTER_S)
        now = time.monotonic()
        waits = [w for w in _in_progress.copy().values() if now - w.begin >= _REPORT_AFTER_S]
        longest = min(waits, key=lambda wait: wait.begin, default=None)
        if longest is not reported:
            reported = longest
            membership.report_wait(None if reported is None else reported.describe())


def _ended_ranks(seconds: float = _NOTICE_S) -> list[int]:
    """Ranks that have ended, in that order; waits up to that many seconds for one."""
    deadline = time.monotonic() + seconds
    while not (ended := rendezvous.ended_ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended


def _see(ranks: list[int]) -> str:
    return f"{logs_text(ranks)} for the cause, and " if ranks else ""


def _own_rank() -> int:
    return rendezvous.meet().rank


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _logged_error(message: str) -> PeerError:
    # Logged at once: a launcher that has seen a rank end kills the others within a second.
    logger.error(message)
    return peer_error(message)
