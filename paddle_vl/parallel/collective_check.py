"""Raises an error at the first collective on which ranks disagree, instead of hanging.

For a section of code:

    with check_collectives() as recording:
        recording.phase = "forward"
        ...

or for a full run, by an environment variable of all ranks with the seconds to wait:

    PADDLE_VL_CHECK_COLLECTIVES=60 fleetrun tools/train.py CONFIG

Before each collective the ranks of its group report it to the board, a process started by rank 0,
which compares them. The check issues no collectives and costs a fraction of a millisecond per
collective. Messages between pipeline stages are recorded but not checked.
"""

import math
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from typing import Any

import paddle.distributed as dist
from paddle.distributed import collective

from paddle_vl.parallel import collective_board
from paddle_vl.parallel.collective_board import receive, send
from paddle_vl.parallel.gloo_fleet.peers import peer_error
from paddle_vl.parallel.recorder import (
    Collective,
    Recording,
    caller,
    is_in_backward,
    observed,
)
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
    finally:
        check.close()


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
    """One rank's connection to the board, see `paddle_vl.parallel.collective_board`."""

    def __init__(self, timeout: float):
        global _num_checks
        _num_checks += 1
        self.rank, self.recording = dist.get_rank(), Recording()
        self.problem: str | None = None
        self._server: subprocess.Popen[str] | None = None
        key, store = f"collective_check/{_num_checks}", collective._default_store
        if self.rank == 0:
            store.set(key, self._start_board(timeout))
        store.wait(key)
        host, port, password = bytes(store.get(key)).decode().split()
        self._board = Client((host, int(port)), authkey=password.encode())
        send(self._board, self.rank)

    def meet(self, call: Collective) -> Collective:
        """Report a collective, and wait until all its ranks have; returns it with its phase."""
        phase = self.recording.phase or ("backward" if is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            shown = f"{call.describe()}, called from {caller()}"
            self._ask("meet", ranks=list(call.ranks), agreed=repr(call.agreed), shown=shown)
        return call

    def leave(self) -> None:
        """Leave the checked section, and wait until all ranks have."""
        self._ask("leave")

    def fail(self, error: BaseException) -> None:
        """Report why this rank starts no further collectives."""
        self._ask("fail", error=f"failed with {type(error).__name__}: {error}")

    def close(self) -> None:
        self._board.close()
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()

    def _ask(self, method: str, **arguments: Any) -> None:
        send(self._board, {"do": method, **arguments})
        self.problem = receive(self._board)
        if self.problem is not None:
            raise peer_error(self.problem)

    def _start_board(self, timeout: float) -> str:
        """Start the board; returns its host, port and password."""
        host = meet().addresses.own
        password = secrets.token_hex()
        self._server = subprocess.Popen(
            [sys.executable, "-m", collective_board.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C must not reach the board, which ends with the ranks.
            start_new_session=True,
        )
        print(host, dist.get_world_size(), timeout, password, file=self._server.stdin, flush=True)
        port = self._server.stdout.readline().strip() if self._server.stdout else ""
        return f"{host} {port} {password}"
