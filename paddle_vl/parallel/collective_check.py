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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paddle_vl.parallel.recorder import (
    Collective,
    Recording,
    caller,
    is_in_backward,
    observed,
)
from paddle_vl.parallel.store.membership import of_this_process, ranks_text
from paddle_vl.parallel.store.rendezvous import meet

VARIABLE = "PADDLE_VL_CHECK_COLLECTIVES"

_num_checks = 0
_check_of_run: list = []


@contextmanager
def check_collectives(timeout: float = 60.0) -> Iterator[Recording]:
    """Record and compare collectives inside the block; all ranks enter and leave it together.

    Args:
        timeout: seconds to wait for a rank at a collective, and at the end of the block.

    Raises:
        RuntimeError: on every rank that starts a collective or leaves: ranks of a group started
            different collectives, or one of them has ended or does not come. The message has each
            rank's collective, its place in the program and its phase.
    """
    check = _Check(timeout)
    with observed(lambda call: check.recording.calls.append(check.meet(call))):
        try:
            yield check.recording
        except BaseException as error:
            # Paddle hides an exception of a backward pass in its own traceback.
            if check.problem is None or check.problem is error:
                raise
            raise check.problem from error
    check.leave()


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
        self.recording = Recording()
        self.problem: RuntimeError | None = None
        meet()
        (self._store,) = of_this_process
        self._name, self._timeout = _num_checks, timeout
        self._numbers: Counter[Sequence[int]] = Counter()

    def meet(self, call: Collective) -> Collective:
        """Compare a collective with the other ranks'; returns it with its phase."""
        phase = self.recording.phase or ("backward" if is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            self._numbers[call.ranks] += 1
            here = f"collective {self._numbers[call.ranks]} of ranks {list(call.ranks)}"
            shown = f"{call.describe()}, called from {caller()}"
            self._compare(here, call.ranks, repr(call.agreed), shown)
        return call

    def leave(self) -> None:
        """Leave the checked section, when all ranks have come to its end."""
        end = "end of the checked section"
        self._compare(end, range(self._store.num_ranks), end, "leaves")

    def _compare(self, here: str, ranks: Sequence[int], agreed: str, shown: str) -> None:
        name, value = f"{self._name} {here}", [agreed, shown, here]
        answer = self._store.meet(name, list(ranks), value, self._timeout)
        # Different plans, each with its ranks.
        alike, plans = defaultdict(list), dict(answer["values"])
        for rank, (plan, _, _) in sorted(plans.items()):
            alike[plan].append(rank)
        told = "; ".join(f"{ranks_text(of)} {plans[of[0]][1]}" for of in alike.values())
        if missing := answer["missing"]:
            failed = [rank for rank, _ in answer["failed"]]
            gone = [rank for rank in [*answer["ended"], *failed] if rank in ranks]
            rank, has = missing[0], f"has not come within {self._timeout:g} s"
            if gone:
                rank, has = gone[0], "has ended"
            last = dict(answer["last"])[rank]
            before = f"its last collective: {last[1]}, {last[2]}" if last else "it reached none"
            self._raise(f"{here}: {told}; rank {rank} {has}; {before}")
        if len(alike) > 1:
            self._raise(f"{here}: the ranks are about to do different things: {told}")

    def _raise(self, problem: str) -> None:
        self.problem = RuntimeError(problem)
        raise self.problem
