"""Raises an error at the first collective on which ranks disagree, instead of hanging.

For a section of code:

    with check_collectives() as recording:
        recording.phase = "forward"
        ...

or for a full run, by an environment variable of all ranks with the seconds to wait:

    PADDLE_VL_CHECK_COLLECTIVES=60 fleetrun tools/train.py CONFIG

Before each collective the ranks of its group compare what they are about to do, in the run's store.
The check issues no collectives and costs one request to the store per collective. Messages
between pipeline stages are recorded but not checked.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle_vl.parallel.gloo_fleet.peers import peer_error
from paddle_vl.parallel.recorder import (
    Collective,
    Recording,
    caller,
    is_in_backward,
    observed,
)
from paddle_vl.parallel.store.membership import Membership, of_this_process
from paddle_vl.parallel.store.rendezvous import meet

VARIABLE = "PADDLE_VL_CHECK_COLLECTIVES"

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


class _Check:
    """One rank's check, with its recording."""

    def __init__(self, timeout: float):
        global _num_checks
        _num_checks += 1
        self.recording, self.problem = Recording(), None
        meet()
        own = of_this_process[0]
        # A connection of its own, which waits for the other ranks.
        self._store = Membership(own.rank, own.num_ranks, own.host, own.port, timeout)
        self._name, self._timeout = str(_num_checks), timeout

    def meet(self, call: Collective) -> Collective:
        """Report a collective, and wait until all its ranks have; returns it with its phase."""
        phase = self.recording.phase or ("backward" if is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            shown = f"{call.describe()}, called from {caller()}"
            self._ask(meet=[call.ranks, repr(call.agreed), shown, self._timeout])
        return call

    def leave(self) -> None:
        """Leave the checked section, and wait until all ranks have."""
        self._ask(leave=[self._store.num_ranks, self._timeout])

    def fail(self, error: BaseException) -> None:
        """Report why this rank starts no further collectives."""
        self._ask(fail=[f"failed with {type(error).__name__}: {error}"])

    def _ask(self, **request: Any) -> None:
        self.problem = self._store.ask({"section": self._name, **request}, None)["problem"]
        if self.problem is not None:
            raise peer_error(self.problem)
