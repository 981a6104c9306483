"""Runs all ranks of a group in one process, strictly in turn.

Every rank has a thread, since a backward pass issues collectives from inside Paddle's autograd.
Only one of them runs at a time: at a collective a rank hands over to the next, and continues once
all ranks of the group have come to it. So results do not depend on timing, and an error says which
rank is where.
"""

import contextvars
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paddle import Tensor

from paddle_vl.parallel.recorder import Collective, caller, is_in_backward
from paddle_vl.parallel.simulated.process_group import Call

# Seconds that ranks get to unwind after an error.
_UNWIND_S = 10.0


class RanksDisagreeError(RuntimeError):
    """Ranks started different collectives, or one waits for a rank that has ended."""


class _StoppedError(RuntimeError):
    """Unwinds a rank after another one failed."""


@dataclass(frozen=True)
class Meeting:
    """A collective that all ranks of a group came to.

    Attributes:
        call: as the first rank issued it.
        tensors: what each rank contributed, in the group's order; empty for a barrier.
    """

    call: Call
    tensors: list[Tensor]


@dataclass
class _Post:
    """A rank's arrival at a collective."""

    call: Call
    tensor: Tensor | None
    place: str

    def describe(self) -> str:
        return f"{self.call.describe()}, called from {self.place}"


@dataclass
class _State:
    """Where a rank is: `ready` to run, `waiting` at a collective, or `ended`."""

    where: str = "ready"
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    post: _Post | None = None
    received: list[Tensor] = field(default_factory=list)
    calls: list[Collective] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    result: Any = None


class Lockstep:
    """An `Exchange` between threads.

    Args:
        size: number of ranks.
        timeout_s: seconds that a rank may run without coming to a collective; None for no limit.
        keeps_tensors: keep what every rank contributed, in `meetings`.
        on_switch: called with the number of the rank that leaves and of the one that continues
            (None for none), while no rank runs.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float | None = None,
        keeps_tensors: bool = False,
        on_switch: Callable[[int | None, int | None], None] = lambda leaves, continues: None,
    ):
        self.size, self._timeout_s, self._keeps = size, timeout_s, keeps_tensors
        self._on_switch = on_switch
        self._states = [_State() for _ in range(size)]
        self._done, self._num_switches = threading.Event(), 0
        self._running: int | None = None
        self._failure: BaseException | None = None

    @property
    def collectives(self) -> list[list[Collective]]:
        """Every rank's collectives so far; `phase` is `forward` or `backward`."""
        return [state.calls for state in self._states]

    @property
    def meetings(self) -> list[list[Meeting]]:
        """Of every rank, what all ranks of its collectives contributed."""
        return [state.meetings for state in self._states]

    def run(self, step: Callable[[int], Any]) -> list[Any]:
        """`step(rank)` of every rank.

        Raises:
            RanksDisagreeError: names the ranks, their collectives and the places of the calls.
            TimeoutError: a rank ran for too long; says where it is.
            BaseException: the first error of a rank, with a note that names it.
        """
        threads = []
        for rank in range(self.size):
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._run_rank, rank, step), daemon=True
            )
            thread.name = f"simulated rank {rank}"
            threads.append(thread)
            thread.start()
        self._hand_over(None, 0)
        try:
            self._wait_for_all(threads)
        except BaseException as error:
            self._failure = self._failure or error
            self._wake_all()
            raise
        finally:
            for thread in threads:
                thread.join(_UNWIND_S if self._failure else None)
            self._on_switch(self._running, None)
        if self._failure is not None:
            raise self._failure
        return [state.result for state in self._states]

    def exchange(self, rank: int, call: Call, tensor: Tensor | None) -> list[Tensor]:
        """Wait for the other ranks of the collective.

        Raises:
            RanksDisagreeError: see the class.
        """
        self._stop_if_failed()
        phase = "backward" if is_in_backward() else "forward"
        call = call._replace(collective=call.collective._replace(phase=phase))
        kept = None if tensor is None else tensor.detach().clone()
        state, ranks = self._states[rank], call.collective.ranks
        state.post, state.where = _Post(call, kept, caller()), "waiting"
        state.calls.append(call.collective)
        waiting = {
            other: post
            for other in ranks
            if (post := self._states[other].post) is not None
            and post.call.collective.ranks == ranks
        }
        for other, post in waiting.items():
            if post.call.agreed != call.agreed:
                self._fail(self._difference(*sorted((other, rank))))
        if len(waiting) == len(ranks):
            self._deliver([self._states[other] for other in ranks], call)
        else:
            self._pass_on(rank)
            state.turn.acquire()
            self._stop_if_failed()
        state.where = "ready"
        return state.received

    def _deliver(self, states: list[_State], call: Call) -> None:
        posts = [state.post for state in states]
        tensors = [post.tensor for post in posts if post is not None and post.tensor is not None]
        for state in states:
            state.received, state.post, state.where = tensors, None, "ready"
            if self._keeps:
                state.meetings.append(Meeting(call, tensors))

    def _run_rank(self, rank: int, step: Callable[[int], Any]) -> None:
        state = self._states[rank]
        state.turn.acquire()
        try:
            if self._failure is None:
                state.result = step(rank)
        except BaseException as error:
            if self._failure is None:
                self._failure = _noted(error, f"raised on simulated rank {rank} of {self.size}")
        state.where = "ended"
        if self._failure is not None:
            self._wake_all()
            return
        try:
            self._pass_on(rank)
        except RanksDisagreeError:
            self._wake_all()

    def _pass_on(self, rank: int) -> None:
        """Let the next rank that can run continue.

        Raises:
            RanksDisagreeError: there is none, but some wait.
        """
        order = [(rank + 1 + i) % self.size for i in range(self.size)]
        following = [other for other in order if self._states[other].where == "ready"]
        if following:
            self._hand_over(rank, following[0])
        elif all(state.where == "ended" for state in self._states):
            self._done.set()
        else:
            self._fail("no rank can continue: " + "; ".join(map(self._where, range(self.size))))

    def _hand_over(self, rank: int | None, following: int) -> None:
        self._on_switch(rank, following)
        self._running = following
        self._num_switches += 1
        self._states[following].turn.release()

    def _difference(self, first: int, second: int) -> str:
        number = len(self._states[second].calls)
        return (
            f"ranks {first} and {second} start different collectives as number {number}: "
            f"{self._where(first)}; {self._where(second)}"
        )

    def _where(self, rank: int) -> str:
        state = self._states[rank]
        if state.post is not None:
            return f"rank {rank} waits in {state.post.describe()}"
        if state.where == "ready":
            return f"rank {rank} can run"
        last = f", the last {state.calls[-1].describe()}" if state.calls else ""
        return f"rank {rank} has ended after {len(state.calls)} collectives{last}"

    def _fail(self, problem: str) -> NoReturn:
        error = RanksDisagreeError(
            f"{problem}. Every rank must issue the same collectives in the same order, whatever "
            "its data"
        )
        self._failure = self._failure or error
        raise error

    def _stop_if_failed(self) -> None:
        if self._failure is not None:
            raise _StoppedError(f"another simulated rank failed: {self._failure}")

    def _wake_all(self) -> None:
        self._done.set()
        for state in self._states:
            state.turn.release()

    def _wait_for_all(self, threads: list[threading.Thread]) -> None:
        seen = -1
        while not self._done.wait(self._timeout_s):
            if self._num_switches == seen and self._running is not None:
                frame = sys._current_frames().get(threads[self._running].ident or 0)
                place = "".join(traceback.format_stack(frame, limit=3)) if frame else "unknown\n"
                raise TimeoutError(
                    f"simulated rank {self._running} ran for {self._timeout_s} s without coming to "
                    f"a collective or its end (timeout_s=None lifts the limit); it is at\n{place}"
                )
            seen = self._num_switches


def _noted(error: BaseException, note: str) -> BaseException:
    # Python 3.10 has no notes.
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    return error
