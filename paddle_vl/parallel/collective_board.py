"""The process that compares the collectives of all ranks, see `collective_check`.

A process, not a thread of rank 0: waiting in a collective may hold the interpreter lock. Does not
load Paddle.
"""

import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any, NamedTuple

Line = tuple[int, ...]
_MAX_MESSAGE_BYTES = 1 << 20
_LEFT = "has left the checked section"


class Plan(NamedTuple):
    """A collective that a rank is about to start.

    Attributes:
        agreed: what must be equal on all ranks, as text.
        shown: description for messages.
    """

    agreed: str
    shown: str


class Board:
    """The collectives that every rank has reached.

    Methods wait for other ranks and return a problem, or None; all ranks get the first one found.

    Args:
        num_ranks: world size.
        timeout: seconds to wait for a rank.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self._changed = threading.Condition()
        # By ranks of the group and index of the collective among theirs.
        self._plans: defaultdict[tuple[Line, int], dict[int, Plan]] = defaultdict(dict)
        self._passed: Counter[tuple[Line, int]] = Counter()
        self._positions: Counter[tuple[Line, int]] = Counter()
        self._last: dict[int, str] = {}
        # Why a rank starts no further collectives.
        self._gone: dict[int, str] = {}
        self._problem: str | None = None

    def meet(self, rank: int, ranks: Line, plan: Plan) -> str | None:
        """Reach a collective of `ranks`, and wait until all of them have."""
        with self._changed:
            self._positions[ranks, rank] += 1
            position = self._positions[ranks, rank]
            here = f"collective {position} of ranks {list(ranks)}"
            plans = self._plans[ranks, position]
            plans[rank] = plan
            self._last[rank] = f"{plan.shown}, {here}"
            self._changed.notify_all()
            problem = self._wait(
                lambda: [other for other in ranks if other not in plans],
                f"{here}: rank {rank} is about to do {plan.shown}",
            )
            if problem is not None:
                return problem
            if len({other.agreed for other in plans.values()}) > 1:
                return self._set_problem(
                    f"{here}: the ranks are about to do different things: {_by_plan(plans)}"
                )
            self._passed[ranks, position] += 1
            if self._passed[ranks, position] == len(ranks):
                del self._plans[ranks, position], self._passed[ranks, position]
            return None

    def leave(self, rank: int) -> str | None:
        """Leave the checked section, and wait until all ranks have."""
        with self._changed:
            self._gone[rank] = _LEFT
            self._changed.notify_all()
            return self._wait(
                lambda: [r for r in range(self.num_ranks) if self._gone.get(r) != _LEFT],
                f"rank {rank} {_LEFT}{self._last_of(rank)}",
            )

    def fail(self, rank: int, error: str) -> None:
        """Report why this rank starts no further collectives."""
        with self._changed:
            self._set_problem(f"rank {rank} {error}{self._last_of(rank)}")

    def lose(self, rank: int) -> None:
        """A rank's connection was closed: a problem only if other ranks wait for it."""
        with self._changed:
            self._gone.setdefault(rank, "has ended")
            self._changed.notify_all()

    def _wait(self, missing: Callable[[], Sequence[int]], here: str) -> str | None:
        """Wait until no rank is missing."""

        def is_over() -> bool:
            absent = missing()
            gone = [rank for rank in absent if rank in self._gone]
            if gone and self._problem is None:
                rank = gone[0]
                self._set_problem(f"{here}; rank {rank} {self._gone[rank]}{self._last_of(rank)}")
            return not absent or self._problem is not None

        if not self._changed.wait_for(is_over, self.timeout):
            rank = missing()[0]
            self._set_problem(
                f"{here}; rank {rank} has not come within {self.timeout:g} s{self._last_of(rank)}"
            )
        if not missing() or self._problem is None:
            return None
        return self._problem if self._problem.startswith(here) else f"{self._problem} [{here}]"

    def _set_problem(self, problem: str) -> str:
        if self._problem is None:
            self._problem = problem
            self._changed.notify_all()
        return self._problem

    def _last_of(self, rank: int) -> str:
        last = self._last.get(rank)
        return f"; its last collective: {last}" if last else "; it reached none before"


def _by_plan(plans: dict[int, Plan]) -> str:
    """The different plans, each with its ranks."""
    ranks = defaultdict(list)
    for rank in sorted(plans):
        ranks[plans[rank].agreed].append(rank)
    return "; ".join(
        f"rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))} {plans[alike[0]].shown}"
        for alike in ranks.values()
    )


def _serve(board: Board, connection: Connection) -> None:
    """Answer one rank, which sends its number first."""
    rank = int(receive(connection))
    try:
        while True:
            send(connection, _answer(board, rank, receive(connection)))
    except (EOFError, OSError, ValueError):
        board.lose(rank)


def _answer(board: Board, rank: int, message: dict[str, Any]) -> str | None:
    """The answer to a message: `{"do": method}` and its arguments."""
    match message["do"]:
        case "meet":
            plan = Plan(message["agreed"], message["shown"])
            return board.meet(rank, tuple(message["ranks"]), plan)
        case "leave":
            return board.leave(rank)
        case "fail":
            return board.fail(rank, message["error"])
        case unknown:
            raise ValueError(f"unknown method {unknown!r}")


def send(connection: Connection, message: Any) -> None:
    """Send a value as JSON; `Connection.send` would pickle it."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    """Receive a JSON value; `Connection.recv` would unpickle it."""
    return json.loads(connection.recv_bytes(_MAX_MESSAGE_BYTES))


def main() -> None:
    """Serve until standard input and the connections of all ranks are closed."""
    host, num_ranks, timeout, key = sys.stdin.readline().split()
    board, threads = Board(int(num_ranks), float(timeout)), []
    with Listener((host, 0), backlog=int(num_ranks), authkey=key.encode()) as listener:
        print(listener.address[1], flush=True)

        def accept() -> None:
            while True:
                connection = listener.accept()
                threads.append(threading.Thread(target=_serve, args=(board, connection)))
                threads[-1].start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
