"""Ranks of a group in one process, strictly in turn.

Every rank has a thread, since a backward
pass issues collectives from inside Paddle's autograd. Only one of them runs at a time: at a
collective a rank hands over to the next, and continues once all ranks have come to it. So results
do not depend on timing, and an error says which rank is where.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from paddle import Tensor

from paddle_vl.parallel.recorder import Collective, caller
from paddle_vl.threads import JoinedThread

# Seconds that ranks get to unwind after an interrupt.
_UNWIND_S = 10.0


class RanksDisagreeError(RuntimeError):
    """Ranks started different collectives, or one waits for a rank that has ended."""


class Lockstep:
    """Runs the ranks of a group, and gives each collective the tensors of all of them.

    Args:
        size: number of ranks.
        on_switch: called with the number of the rank that leaves and of the one that continues
            (None for none), while no rank runs.

    Attributes:
        collectives: every rank's so far; `phase` is `forward` or `backward`.
    """

    def __init__(self, size: int, on_switch: Callable[[int | None, int | None], None]):
        self.size, self._on_switch = size, on_switch
        self.collectives: list[list[Collective]] = [[] for _ in range(size)]
        # The collective that a rank waits in, what it contributes, and the place of the call.
        self._posts: dict[int, tuple[Collective, Tensor | None, str]] = {}
        # What all ranks contributed to the last meeting, and what those that have ended returned.
        self._received: list[Tensor] = []
        self._results: dict[int, Any] = {}
        # The rank whose turn it is; each change is notified.
        self._changed = threading.Condition()
        self._running: int | None = None
        self._failure: BaseException | None = None

    def run(self, step: Callable[[int], Any]) -> list[Any]:
        """`step(rank)` of every rank.

        Raises:
            RanksDisagreeError: names the ranks, their collectives and the places of the calls.
            BaseException: the first error of a rank, with a note that names it.
        """
        threads = []
        for rank in range(self.size):
            context = contextvars.copy_context()
            thread = JoinedThread(
                target=context.run, args=(self._run_rank, rank, step), daemon=True
            )
            thread.name = f"simulated rank {rank}"
            threads.append(thread)
            thread.start()
        self._give_turn(0)
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            # Of this thread, such as an interrupt.
            self._set_failure(error)
            for thread in threads:
                thread.join(_UNWIND_S)
        finally:
            self._on_switch(self._running, None)
        if self._failure is not None:
            raise self._failure
        return [self._results[rank] for rank in range(self.size)]

    def exchange(self, rank: int, call: Collective, tensor: Tensor | None) -> list[Tensor]:
        """Wait for the other ranks of the collective.

        Args:
            rank: the calling rank.
            call: in the phase `forward` or `backward`.
            tensor: what it contributes; None for a barrier.

        Returns:
            What each rank contributes, in the group's order; empty for a barrier.

        Raises:
            RanksDisagreeError: see the class.
        """
        self._stop_if_failed()
        kept = None if tensor is None else tensor.detach().clone()
        self._posts[rank] = call, kept, caller()
        self.collectives[rank].append(call._replace(detail=""))
        for other, (posted, _, _) in sorted(self._posts.items()):
            if posted.agreed != call.agreed:
                first, second = sorted((other, rank))
                self._disagree(
                    f"ranks {first} and {second} start different collectives as number "
                    f"{len(self.collectives[rank])}: {self._where(first)}; {self._where(second)}"
                )
        if len(self._posts) == self.size:
            posted = [self._posts[each][1] for each in range(self.size)]
            self._received = [value for value in posted if value is not None]
            self._posts.clear()
        else:
            self._pass_on(rank)
            self._await_turn(rank)
            self._stop_if_failed()
        return self._received

    def _run_rank(self, rank: int, step: Callable[[int], Any]) -> None:
        self._await_turn(rank)
        if self._failure is not None:
            return
        try:
            self._results[rank] = step(rank)
            self._pass_on(rank)
        except BaseException as error:
            # Python 3.10 has no notes.
            add_note = getattr(error, "add_note", None)
            if self._failure is None and add_note is not None:
                add_note(f"raised on simulated rank {rank} of {self.size}")
            self._set_failure(error)

    def _pass_on(self, rank: int) -> None:
        """Let the next rank that can run continue.

        Raises:
            RanksDisagreeError: there is none, but some wait.
        """
        for other in [(rank + 1 + i) % self.size for i in range(self.size)]:
            if other not in self._posts and other not in self._results:
                self._give_turn(other)
                return
        if self._posts:
            where = "; ".join(map(self._where, range(self.size)))
            self._disagree(f"no rank can continue: {where}")

    def _give_turn(self, rank: int) -> None:
        self._on_switch(self._running, rank)
        with self._changed:
            self._running = rank
            self._changed.notify_all()

    def _await_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running == rank or self._failure is not None)

    def _where(self, rank: int) -> str:
        calls = self.collectives[rank]
        if rank in self._posts:
            call, _, place = self._posts[rank]
            return f"rank {rank} waits in {call.describe()}, called from {place}"
        if rank not in self._results:
            return f"rank {rank} can run"
        last = f", the last {calls[-1].describe()}" if calls else ""
        return f"rank {rank} has ended after {len(calls)} collectives{last}"

    def _disagree(self, problem: str) -> NoReturn:
        error = RanksDisagreeError(
            f"{problem}. Every rank must issue the same collectives in the same order, whatever "
            "its data"
        )
        self._set_failure(error)
        raise error

    def _set_failure(self, error: BaseException) -> None:
        """Keep the first error, and let all ranks unwind."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _stop_if_failed(self) -> None:
        """Unwind a rank after another one failed."""
        if self._failure is not None:
            raise RuntimeError(f"another simulated rank failed: {self._failure}")
