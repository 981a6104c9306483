"""Errors of gloo operations that name the ranks that have ended or are late.

Gloo does not name them; the run's store knows which ranks have ended, and which have given up.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.time_limit import set_group_timeout
from paddle_vl.parallel.store import rendezvous
from paddle_vl.parallel.store.membership import CONTINUE, logs_text, of_this_process, ranks_text

logger = logging.getLogger(__name__)

# Seconds for the store to notice that a rank has ended, or that others give up too.
_NOTICE_S = 2.0


class PeerError(RuntimeError):
    """Another rank has ended, or is late."""


# Global ranks of groups that are missing in Paddle's own list of groups.
_ranks: dict[int, list[int]] = {}
_ids: dict[int, int] = {}
_raised: list[PeerError] = []
# Groups live as long as the process, and the store of a group as long as the group.
_alive: list[object] = []


def register_group(group: core.ProcessGroup, group_id: int, ranks: list[int] | None = None) -> None:
    """Register a new group, and give it the timeout of the run.

    Args:
        ranks: global ranks, if Paddle does not know the group.
    """
    set_group_timeout(group_id, group.rank(), group.size(), rendezvous.timeout_s())
    _ids[id(group)] = group_id
    _alive.append(group)
    if ranks is not None:
        _ranks[id(group)] = ranks


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
    begin = time.monotonic()
    try:
        start(group, *arguments).wait()
    except RuntimeError as error:
        raise _explained(group, operation, time.monotonic() - begin, error) from error


def make_gloo_group(name: str, rank: int, size: int, group_id: int) -> core.ProcessGroup:
    """Make a group whose ranks find each other under its own keys in the store.

    Raises:
        PeerError: as `finish`.
    """
    told = f"group {name} of {size} ranks"
    store = rendezvous.store_of(f"gloo group {name}")
    # Gloo would wait minutes for a rank that left its address in the store before it ended.
    if ended := _ended_ranks(0.0):
        raise _not_made(told, ended)
    try:
        group = core.ProcessGroupGloo.create(store, rank, size, group_id)
    except (RuntimeError, ValueError) as error:
        raise _not_made(told, _ended_ranks(), error) from error
    _alive.extend((store, group))
    return group


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
    return _logged_error(f"{name} could not be made: {problem}; {_see(ended)}{CONTINUE}")


def _explained(
    group: core.ProcessGroup, operation: str, seconds: float, error: RuntimeError
) -> PeerError:
    text, ranks = str(error), ranks_of(group)
    # Gloo reports a closed connection as TIMEOUT too, but then names the peer.
    is_late = "TIMEOUT" in text and re.search(r"pair_rank = \d", text) is None
    culprits = _ended_ranks(0.0 if is_late else _NOTICE_S)
    problem = f"failed: {_first_line(error)}"
    if culprits:
        has = "have ended, in this order" if len(culprits) > 1 else "has ended"
        problem = f"failed: {ranks_text(culprits)} {has}"
    elif is_late:
        culprits = _late_ranks(operation, ranks)
        late = ", ".join(f"rank {rank} has not come to it" for rank in culprits)
        problem = f"got no answer in {seconds:.0f} s: {late or 'the last one came too late'}"
    return _logged_error(f"{operation} of ranks {ranks} {problem}; {_see(culprits)}{CONTINUE}")


def _late_ranks(operation: str, ranks: list[int]) -> list[int]:
    """Of these ranks those that do not give up too, within the time in which others do."""
    (membership,) = of_this_process
    membership.report_end(f"got no answer in {operation} of ranks {ranks}")
    time.sleep(_NOTICE_S)
    failed = membership.state()["failed"]
    return [rank for rank in ranks if rank not in failed]


def _ended_ranks(seconds: float = _NOTICE_S) -> list[int]:
    """Ranks that have ended, in that order; waits up to that many seconds for one."""
    deadline = time.monotonic() + seconds
    while of_this_process:
        if (ended := of_this_process[0].state()["ended"]) or time.monotonic() > deadline:
            return ended
        time.sleep(0.05)
    return []


def _see(ranks: list[int]) -> str:
    return f"{logs_text(ranks)} for the cause, and " if ranks else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _logged_error(message: str) -> PeerError:
    message = f"rank {of_this_process[0].rank}: {message}"
    # Logged at once: a launcher that has seen a rank end kills the others within a second.
    logger.error(message)
    return peer_error(message)
