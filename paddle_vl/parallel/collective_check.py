"""Raises an error at the first collective on which ranks disagree, instead of hanging.

For a section of code:

    with check_collectives() as recording:
        recording.phase = "forward"
        ...

or for a full run, by an environment variable of all ranks with the seconds to wait:

    PADDLE_VL_CHECK_COLLECTIVES=60 fleetrun tools/train.py CONFIG

Before each collective the ranks of its group compare what they are about to do, in the run's store.
The check issues no collectives and costs some requests to the store per collective. Messages
between pipeline stages are recorded but not checked.
"""

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import paddle.distributed as dist
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.peers import peer_error
from paddle_vl.parallel.recorder import (
    Collective,
    Recording,
    caller,
    is_in_backward,
    observed,
)

VARIABLE = "PADDLE_VL_CHECK_COLLECTIVES"
# Between two looks for other ranks: short at first, as most are about to come.
_LOOK_S, _LONGEST_LOOK_S = 0.0002, 0.02
_LEFT = "has left the checked section"

_num_checks = 0
_check_of_run: list = []


@contextmanager
def check_collectives(timeout: float = 60.0) -> Iterator[Recording]:
    """Record and compare collectives inside the block; all ranks enter and leave it together.

    Args:
        timeout: seconds to wait for a rank that neither reaches a collective nor leaves.

    Raises:
        RuntimeError: on every rank that starts a collective or leaves: ranks of a group started
            different collectives, one left or failed while others wait for it, or the time is
            over. The message has each rank's collective, its place in the program and its phase.
    """
    check = _Check(timeout)
    try:
        with observed(lambda call: check.recording.calls.append(check.meet(call))):
            yield check.recording
        check.leave()
    except BaseException as error:
        if check.problem is None:
            check.fail(error)
            raise
        # Paddle hides an exception of a backward pass in its own traceback.
        raise RuntimeError(check.problem) from error


def check_run_if_asked() -> None:
    """Check all collectives of this rank from now on if the environment variable is set.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None or _check_of_run:
        return
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{VARIABLE} is {asked!r}; give the seconds that a rank waits for the others at a "
            "collective, such as 60"
        )
    check = observed(_Check(seconds).meet)
    check.__enter__()
    # A reference keeps the check alive.
    _check_of_run.append(check)


class Plan(NamedTuple):
    """A collective that a rank is about to start.

    Attributes:
        number: of this group's collectives on the rank, from 1.
        agreed: what must be equal on all ranks, as text.
        shown: description for messages.
    """

    number: int
    agreed: str
    shown: str


class Board:
    """The collectives that every rank has reached, in a store that all ranks can reach.

    Methods wait for other ranks and return a problem, or None; all ranks get the first one found.
    A rank that has ended is noticed when its time is over. Every rank has two places for its plans
    of a group, which it takes in turn: it writes a third plan only after all have read the first,
    so the store does not grow.

    Args:
        store: has `add`, `get` and `set`.
        name: of the keys; no other board has it.
        rank, num_ranks: this rank and the world size.
        timeout: seconds to wait for a rank.
    """

    def __init__(self, store: Any, name: str, rank: int, num_ranks: int, timeout: float):
        self._store, self._name = store, name
        self._rank, self._num_ranks, self._timeout = rank, num_ranks, timeout
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def meet(self, ranks: Sequence[int], agreed: str, shown: str) -> str | None:
        """Reach a collective of `ranks`, and wait until all of them have."""
        group = tuple(ranks)
        self._numbers[group] += 1
        number = self._numbers[group]
        here = f"collective {number} of ranks {list(ranks)}"
        key, place = "-".join(map(str, group)), number % 2
        self._set(f"{key}/plan{place}/{self._rank}", Plan(number, agreed, shown))
        self._set(f"last/{self._rank}", f"{shown}, {here}")
        if self._numbers.total() == 1:
            self._store.add(self._key(f"has_last/{self._rank}"), 1)
        self._store.add(self._key(f"{key}/number/{self._rank}"), 1)
        problem = self._wait(
            lambda rank: self._count(f"{key}/number/{rank}") >= number,
            group,
            f"{here}: rank {self._rank} is about to do {shown}",
        )
        if problem is not None:
            return problem
        plans = {rank: Plan(*self._get(f"{key}/plan{place}/{rank}")) for rank in group}
        if len({plan.agreed for plan in plans.values()}) == 1:
            return None
        return self._set_problem(
            f"{here}: the ranks are about to do different things: {_by_plan(plans)}"
        )

    def leave(self) -> str | None:
        """Leave the checked section, and wait until all ranks have."""
        self._store.add(self._key(f"left/{self._rank}"), 1)
        return self._wait(
            lambda rank: self._count(f"left/{rank}") > 0,
            range(self._num_ranks),
            f"rank {self._rank} {_LEFT}{self._last_of(self._rank)}",
        )

    def fail(self, error: str) -> None:
        """Report why this rank starts no further collectives."""
        self._set_problem(f"rank {self._rank} {error}{self._last_of(self._rank)}")

    def _wait(self, has_come: Callable[[int], bool], ranks: Sequence[int], here: str) -> str | None:
        """Wait until all ranks have come."""
        deadline, look_s = time.monotonic() + self._timeout, _LOOK_S
        missing = [rank for rank in ranks if rank != self._rank]
        while missing := [rank for rank in missing if not has_come(rank)]:
            left = [rank for rank in missing if self._count(f"left/{rank}") > 0]
            # One that came and left since the look above has not gone.
            if gone := [rank for rank in left if not has_come(rank)]:
                self._set_problem(f"{here}; rank {gone[0]} {_LEFT}{self._last_of(gone[0])}")
            elif time.monotonic() > deadline:
                self._set_problem(
                    f"{here}; rank {missing[0]} has not come within {self._timeout:g} s"
                    f"{self._last_of(missing[0])}"
                )
            if self._count("problem") > 0:
                problem = self._get("problem/text")
                return problem if problem.startswith(here) else f"{problem} [{here}]"
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return None

    def _set_problem(self, problem: str) -> str:
        """Report a problem, unless another rank has; returns the first one."""
        if self._store.add(self._key("problem/found"), 1) == 1:
            self._set("problem/text", problem)
            self._store.add(self._key("problem"), 1)
        while self._count("problem") == 0:
            time.sleep(_LOOK_S)
        return self._get("problem/text")

    def _last_of(self, rank: int) -> str:
        if self._count(f"has_last/{rank}") == 0:
            return "; it reached none before"
        return f"; its last collective: {self._get(f'last/{rank}')}"

    def _key(self, key: str) -> str:
        return f"collective_check/{self._name}/{key}"

    def _count(self, key: str) -> int:
        return self._store.add(self._key(key), 0)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(bytes(self._store.get(self._key(key))))


class _Check:
    """One rank's check, with its recording."""

    def __init__(self, timeout: float):
        global _num_checks
        _num_checks += 1
        self.recording, self.problem = Recording(), None
        store, world = collective._default_store, dist.get_world_size()
        self._board = Board(store, str(_num_checks), dist.get_rank(), world, timeout)

    def meet(self, call: Collective) -> Collective:
        """Report a collective, and wait until all its ranks have; returns it with its phase."""
        phase = self.recording.phase or ("backward" if is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            shown = f"{call.describe()}, called from {caller()}"
            self._raise(self._board.meet(call.ranks, repr(call.agreed), shown))
        return call

    def leave(self) -> None:
        """Leave the checked section, and wait until all ranks have."""
        self._raise(self._board.leave())

    def fail(self, error: BaseException) -> None:
        """Report why this rank starts no further collectives."""
        self._board.fail(f"failed with {type(error).__name__}: {error}")

    def _raise(self, problem: str | None) -> None:
        self.problem = problem
        if problem is not None:
            raise peer_error(problem)


def _by_plan(plans: dict[int, Plan]) -> str:
    """The different plans, each with its ranks."""
    ranks = defaultdict(list)
    for rank in sorted(plans):
        ranks[plans[rank].agreed].append(rank)
    return "; ".join(
        f"rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))} {plans[alike[0]].shown}"
        for alike in ranks.values()
    )
