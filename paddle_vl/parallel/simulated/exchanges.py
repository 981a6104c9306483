"""Runs all simulated ranks of a group, one at a time, and exchanges their tensors.

Every rank has a thread, since a backward pass issues collectives from inside Paddle's autograd. A
rank runs while it holds the lock, and waits at a collective without it until all ranks have come.
So results do not depend on timing, and an error says which rank is where.
"""

import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from paddle import Tensor

from paddle_vl.parallel.recorder import Collective, caller
from paddle_vl.threads import JoinedThread

# Seconds that ranks get to unwind after an error.
_UNWIND_S = 10.0


class RanksDisagreeError(RuntimeError):
    """Ranks started different collectives, or one waits for a rank that has ended."""


class Lockstep:
    """Runs ranks in threads; `exchange` is the `Exchange` between them.

    Args:
        size: number of ranks.
        timeout_s: seconds that a rank may run without coming to a collective; None for no limit.
        on_switch: called with the number of the rank that leaves and of the one that continues
            (None for none), while no rank runs.

    Attributes:
        collectives: every rank's so far; `phase` is `forward` or `backward`.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float | None = None,
        on_switch: Callable[[int | None, int | None], None] = lambda leaves, continues: None,
    ):
        self.size, self._timeout_s = size, timeout_s
        self._on_switch = on_switch
        self.collectives: list[list[Collective]] = [[] for _ in range(size)]
        # The collective that a rank waits in, what it contributes, and the place of the call.
        self._posts: dict[int, tuple[Collective, Tensor | None, str]] = {}
        # What all ranks contributed to the last collective, and what those that ended returned.
        self._received: list[Tensor] = []
        self._results: dict[int, Any] = {}
        self._lock = threading.Condition()
        self._running, self._num_turns = 0, 0
        self._failure: BaseException | None = None
        self._is_over = threading.Event()

    def run(self, step: Callable[[int], Any]) -> list[Any]:
        """`step(rank)` of every rank.

        Raises:
            RanksDisagreeError: names the ranks, their collectives and the places of the calls.
            TimeoutError: a rank ran for too long; says where it is.
            BaseException: the first error of a rank, with a note that names it.
        """
        threads = [
            JoinedThread(
                target=contextvars.copy_context().run,
                args=(self._run_rank, rank, step),
                name=f"simulated rank {rank}",
                daemon=True,
            )
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        seen = -1
        try:
            while not self._is_over.wait(self._timeout_s):
                if self._num_turns == seen:
                    self._raise_timeout(threads[self._running])
                seen = self._num_turns
        except BaseException as error:
            self._failure = self._failure or error
        end = time.monotonic() + _UNWIND_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()) if self._failure else None)
        if self._failure is not None:
            self._on_switch(None, None)
            raise self._failure
        return [self._results[rank] for rank in range(self.size)]

    def exchange(self, rank: int, call: Collective, tensor: Tensor | None) -> list[Tensor]:
        """Wait for the other ranks of the collective.

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
            self._lock.notify_all()
            return self._received
        self._check_progress()
        self._on_switch(rank, None)
        self._lock.wait_for(lambda: rank not in self._posts or self._failure is not None)
        self._continue(rank)
        self._stop_if_failed()
        return self._received

    def _run_rank(self, rank: int, step: Callable[[int], Any]) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._continue(rank)
            try:
                self._results[rank] = step(rank)
                self._check_progress()
            except BaseException as error:
                # Python 3.10 has no notes.
                add_note = getattr(error, "add_note", None)
                if self._failure is None and add_note is not None:
                    add_note(f"raised on simulated rank {rank} of {self.size}")
                self._failure = self._failure or error
            self._on_switch(rank, None)
            if self._failure is not None or len(self._results) == self.size:
                self._is_over.set()
                self._lock.notify_all()

    def _continue(self, rank: int) -> None:
        self._running, self._num_turns = rank, self._num_turns + 1
        self._on_switch(None, rank)

    def _check_progress(self) -> None:
        """Raise RanksDisagreeError if some ranks wait and none can continue."""
        if self._posts and len(self._posts) + len(self._results) == self.size:
            where = "; ".join(map(self._where, range(self.size)))
            self._disagree(f"no rank can continue: {where}")

    def _raise_timeout(self, thread: threading.Thread) -> NoReturn:
        frame = sys._current_frames().get(thread.ident or 0)
        place = "".join(traceback.format_stack(frame, limit=3)) if frame else "unknown"
        raise TimeoutError(
            f"{thread.name} ran for {self._timeout_s} s without coming to a collective or its end "
            f"(timeout_s=None lifts the limit); it is at\n{place}"
        )

    def _where(self, rank: int) -> str:
        calls = self.collectives[rank]
        if rank in self._posts:
            call, _, place = self._posts[rank]
            return f"rank {rank} waits in {call.describe()}, called from {place}"
        last = f", the last {calls[-1].describe()}" if calls else ""
        return f"rank {rank} has ended after {len(calls)} collectives{last}"

    def _disagree(self, problem: str) -> NoReturn:
        # Kept here too: Paddle hides an error of a backward pass in another one.
        self._failure = RanksDisagreeError(
            f"{problem}. Every rank must issue the same collectives in the same order, whatever "
            "its data"
        )
        raise self._failure

    def _stop_if_failed(self) -> None:
        """Unwind a rank after another one failed."""
        if self._failure is not None:
            raise RuntimeError(f"another simulated rank failed: {self._failure}")
