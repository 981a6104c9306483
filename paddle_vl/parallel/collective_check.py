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
from collections.abc import Iterator
from contextlib import contextmanager

import paddle.distributed as dist
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.peers import peer_error
from paddle_vl.parallel.recorder import Collective, Recording, caller, is_in_backward, observed
from paddle_vl.parallel.store.membership import ranks_text

VARIABLE = "PADDLE_VL_CHECK_COLLECTIVES"
# Between two looks for other ranks: short at first, as most are about to come.
_LOOK_S, _LONGEST_LOOK_S = 0.0002, 0.02

_num_checks = 0
_check_of_run: list = []


@contextmanager
def check_collectives(timeout: float = 60.0) -> Iterator[Recording]:
    """Record and compare collectives inside the block; all ranks enter it.

    Args:
        timeout: seconds to wait for a rank that does not come to a collective.

    Raises:
        RuntimeError: on every rank of a group: they started different collectives, or one did not
            come in time. The message has each rank's collective, its place in the program and its
            phase, or the last collective of the missing rank.
    """
    check = _Check(timeout)
    try:
        with observed(lambda call: check.recording.calls.append(check.meet(call))):
            yield check.recording
    except BaseException as error:
        if check.problem is None:
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


class _Check:
    """One rank's check, with its recording.

    A rank has two places for what it is about to do in a group, which it takes in turn: it writes a
    third time only after all have read the first, so the store does not grow.
    """

    def __init__(self, timeout: float):
        global _num_checks
        _num_checks += 1
        self.recording, self.problem = Recording(), None
        self._store, self._name = collective._default_store, f"collective_check/{_num_checks}"
        self._rank, self._timeout = dist.get_rank(), timeout
        # Of each group's collectives.
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def meet(self, call: Collective) -> Collective:
        """Report a collective, and wait until all its ranks have; returns it with its phase."""
        phase = self.recording.phase or ("backward" if is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            self.problem = self._problem(call)
            if self.problem is not None:
                raise peer_error(self.problem)
        return call

    def _problem(self, call: Collective) -> str | None:
        group, shown = call.ranks, f"{call.describe()}, called from {caller()}"
        self._numbers[group] += 1
        number = self._numbers[group]
        here = f"collective {number} of ranks {list(group)}"
        key, place = f"{self._name}/{'-'.join(map(str, group))}", number % 2
        own = json.dumps([repr(call.agreed), shown])
        self._store.set(f"{key}/{place}/{self._rank}", own)
        self._store.set(f"{self._name}/last/{self._rank}", f"{shown}, {here}")
        self._store.add(f"{key}/number/{self._rank}", 1)
        self._store.add(f"{self._name}/has_last/{self._rank}", 1)
        deadline, look_s = time.monotonic() + self._timeout, _LOOK_S
        missing = [rank for rank in group if rank != self._rank]
        while missing := [r for r in missing if self._store.add(f"{key}/number/{r}", 0) < number]:
            if time.monotonic() > deadline:
                return (
                    f"{here}: rank {self._rank} is about to do {shown}; rank {missing[0]} has not "
                    f"come within {self._timeout:g} s{self._last_of(missing[0])}"
                )
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        alike, shown_by = defaultdict(list), {}
        for rank in group:
            agreed, shown_by[rank] = json.loads(self._get(f"{key}/{place}/{rank}"))
            alike[agreed].append(rank)
        if len(alike) == 1:
            return None
        different = "; ".join(
            f"{ranks_text(ranks)} {shown_by[ranks[0]]}" for ranks in map(sorted, alike.values())
        )
        return f"{here}: the ranks are about to do different things: {different}"

    def _last_of(self, rank: int) -> str:
        if self._store.add(f"{self._name}/has_last/{rank}", 0) == 0:
            return "; it reached none before"
        return f"; its last collective: {self._get(f'{self._name}/last/{rank}')}"

    def _get(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()
