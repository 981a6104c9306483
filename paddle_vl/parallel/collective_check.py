"""Stop at the first collective that ranks do not agree on, instead of waiting for each other.

For whoever looks for the reason of a hang. Around a part of one's own code:

    with check_collectives() as recording:
        recording.phase = "forward"
        ...

or in a whole run, by a variable in the environment of all its processes, the seconds to wait:

    PADDLE_VL_CHECK_COLLECTIVES=60 fleetrun tools/train.py CONFIG

Before each collective the ranks of its group tell a board, a process of its own beside rank 0, what
they are about to do: nothing is sent over the groups themselves. It costs a fraction of a
millisecond per collective. Messages between stages of a pipeline are recorded and not checked.
"""

import contextlib
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import collective

from paddle_vl.parallel import collective_board
from paddle_vl.parallel.collective_board import receive, send
from paddle_vl.parallel.gloo_fleet.peers import peer_error
from paddle_vl.parallel.recorder import Recording
from paddle_vl.parallel.store.rendezvous import meet
from paddle_vl.parallel.traffic import Collective, observed

VARIABLE = "PADDLE_VL_CHECK_COLLECTIVES"
# Files whose frames tell nothing about a program; `<string>` is code without one.
_NOT_SHOWN = (
    str(Path(__file__).parent),
    str(Path(paddle.__file__).parent),
    contextlib.__file__,
    "<",
)

_num_checks = 0
_check_of_run: list = []


@contextmanager
def check_collectives(timeout: float = 60.0) -> Iterator[Recording]:
    """Record and compare collectives while entered; all ranks enter and leave it together.

    Args:
        timeout: seconds to wait for a rank that does nothing collective and has not left either.

    Raises:
        RuntimeError: on every rank that enters a collective or leaves: ranks of a group are about
            to do different things, one left or failed while others wait for it, or the time is up.
            Names the ranks, what each was about to do, where in a program and in which phase.
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
        # Paddle hides what is raised in a backward pass behind its own trace.
        raise RuntimeError(check.problem) from error
    finally:
        check.close()


def check_run_if_asked() -> None:
    """Check this process's collectives until its end if the environment asks for it.

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
    # Its end would be the check's.
    _check_of_run.append(check)


class _Check:
    """One rank's end of a check; see `paddle_vl.parallel.collective_board`."""

    def __init__(self, timeout: float):
        global _num_checks
        _num_checks += 1
        self.rank, self.recording = dist.get_rank(), Recording()
        self.problem: str | None = None
        self._board, self._server = None, None
        key, store = f"collective_check/{_num_checks}", collective._default_store
        if self.rank == 0:
            store.set(key, self._start_board(timeout))
        store.wait(key)
        host, port, password = bytes(store.get(key)).decode().split()
        self._board = Client((host, int(port)), authkey=password.encode())
        send(self._board, self.rank)

    def meet(self, call: Collective) -> Collective:
        """Come to a collective, and wait until all its ranks have; returns it with its phase."""
        phase = self.recording.phase or ("backward" if _is_in_backward() else "")
        call = call._replace(phase=phase)
        if not call.is_message:
            shown = f"{call.describe()}, called from {_caller()}"
            self._ask("meet", ranks=list(call.ranks), agreed=repr(call.agreed), shown=shown)
        return call

    def leave(self) -> None:
        """Tell the others that this rank does no more, and wait until they say so too."""
        self._ask("leave")

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank does no more."""
        self._ask("fail", error=f"failed with {type(error).__name__}: {error}")

    def close(self) -> None:
        self._board.close()
        if self._server is not None:
            self._server.stdin.close()

    def _ask(self, method: str, **arguments: Any) -> None:
        send(self._board, {"do": method, **arguments})
        self.problem = receive(self._board)
        if self.problem is not None:
            raise peer_error(self.problem)

    def _start_board(self, timeout: float) -> str:
        """Host, port and password of the board."""
        host = meet().addresses.own
        password = secrets.token_hex()
        self._server = subprocess.Popen(
            [sys.executable, "-m", collective_board.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What interrupts a run is for its ranks; the board ends with them.
            start_new_session=True,
        )
        print(host, dist.get_world_size(), timeout, password, file=self._server.stdin, flush=True)
        return f"{host} {self._server.stdout.readline().strip()} {password}"


def _is_in_backward() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward":
            return True
        frame = frame.f_back
    return False


def _caller() -> str:
    """The place in a program that led here, outside of Paddle and of what parallelism adds."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_SHOWN):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
