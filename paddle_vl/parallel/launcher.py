"""The launcher of `--nproc`: runs a subcommand in several ranks on this machine.

`fleetrun` runs the same command on several machines. Paddle's launcher sends SIGTERM three times
for every stop request, kills ranks after 30 seconds even while they write, leaves ranks running
when it is killed, and copies the output of rank 0 every two seconds. Here:

- rank 0 writes to the terminal, the others to LOG_DIR/workerlog.RANK;
- a stop request reaches every rank once, and the caller sets how long ranks may take;
- a failed rank ends the others within seconds, and its last lines are shown;
- ranks end when this process does, see `paddle_vl.train.stop_signals`.

Everything listens on loopback. Devices are assigned as Paddle's launcher does.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from paddle_vl.parallel.stop_requests import STOP_SIGNALS, StopRequest, StopRequests

logger = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "PADDLE_VL_LAUNCHER_PID"
# The parent process, read early: it changes when the parent ends.
PARENT = os.getppid()
RANK_LOG_VARIABLE = "PADDLE_VL_RANK_LOG"
_MAIN = Path(__file__).parents[1] / "__main__.py"
# Seconds after a failure until the other ranks are killed; they may log the reason first.
_FAILURE_GRACE_S = 3.0
# The same after the first rank ended on a stop request.
_STRAGGLER_GRACE_S = 10.0
# Added to the ranks' own time limit before they are killed.
_KILL_MARGIN_S = 3.0
_POLL_S = 0.05
_SHOWN_LINES = 12
_NOT_SAVED = 1


class Failure(NamedTuple):
    """A rank that ended a run."""

    rank: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ended with exit code {self.code}"


class Attempt(NamedTuple):
    """One start of a run: the arguments of `paddle-vl`, and the world size."""

    arguments: Sequence[str]
    num_ranks: int


# Returns the next start after a failure, or None.
NextAttempt = Callable[[Failure], Attempt | None]


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    stop_grace_s: float | None = None,
    next_attempt: NextAttempt = lambda failure: None,
) -> int:
    """Run `paddle-vl ARGUMENTS` in several ranks on this machine, with restarts.

    Args:
        stop_grace_s: seconds that ranks may take after a request to stop; None for no limit.
        next_attempt: called after a failure.

    Returns:
        0 on success; 128 + N after stop signal N if all ranks saved; the exit code of a failed
        rank, or 128 + N if signal N killed it; 1 if ranks were killed before they saved.

    Raises:
        ValueError: there are fewer devices than ranks.
    """
    attempt: Attempt | None = Attempt(arguments, num_ranks)
    with StopRequests() as requests:
        while attempt is not None:
            run = _Run(attempt, log_dir, requests, stop_grace_s)
            code, failure = run.wait()
            attempt = None
            if failure is not None and not run.was_asked_to_stop:
                attempt = next_attempt(failure)
    return code


class _Run:
    """The ranks of one attempt."""

    def __init__(
        self, attempt: Attempt, log_dir: Path, requests: StopRequests, stop_grace_s: float | None
    ):
        self._log_dir, self._requests, self._grace_s = log_dir, requests, stop_grace_s
        self._command = [sys.executable, "-u", str(_MAIN), *attempt.arguments]
        self._size = attempt.num_ranks
        self._ranks: list[subprocess.Popen] = []
        self._failure: Failure | None = None
        self._deadline: float | None = None
        self.was_asked_to_stop = False

    def wait(self) -> tuple[int, Failure | None]:
        """Run the ranks to their end; returns the exit code and the failure."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(self._kill)
            ports = [stack.enter_context(_reserved_port()) for _ in range(self._size)]
            environments = list(_environments(ports, self._log_dir))
            self._requests.set_handlers()  # Paddle was imported to list the devices.
            for rank, variables in enumerate(environments):
                output = None
                if rank > 0:
                    file = self._log_dir / f"workerlog.{rank}"
                    output = stack.enter_context(file.open("wb"))
                # In a new session, so that Ctrl-C reaches only this process, which passes it on.
                self._ranks.append(
                    subprocess.Popen(
                        self._command,
                        env=variables,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
            while self._is_running():
                time.sleep(_POLL_S)
        return self._exit_code(), self._failure

    def _is_running(self) -> bool:
        """Handle requests, failures and deadlines; returns whether ranks still run."""
        requests = self._requests.read()
        if self._is_orphan() and not self.was_asked_to_stop:
            requests.append(StopRequest(signal.SIGTERM, is_again=False))
            self._deadline = time.monotonic() + _STRAGGLER_GRACE_S
        codes = [process.poll() for process in self._ranks]
        is_late = self._deadline is not None and time.monotonic() > self._deadline
        if is_late or any(request.is_again for request in requests):
            self._kill_unsaved(codes)
            return False
        for request in requests:
            self._pass_on(request.signal)
        self._look_for_a_failure(codes)
        return None in codes

    def _is_orphan(self) -> bool:
        """Whether this launcher was started by another one, which has ended."""
        launcher = os.environ.get(LAUNCHER_VARIABLE)
        return launcher is not None and os.getppid() != int(launcher)

    def _pass_on(self, number: signal.Signals) -> None:
        self.was_asked_to_stop = True
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(number)
        if self._grace_s is not None:
            self._deadline = time.monotonic() + self._grace_s + _KILL_MARGIN_S

    def _look_for_a_failure(self, codes: Sequence[int | None]) -> None:
        if self._deadline is None and any(code and not _is_failure(code) for code in codes):
            # Ranks that were asked to stop end together, unless one had not begun to train.
            self._deadline = time.monotonic() + _STRAGGLER_GRACE_S
        failed = [
            Failure(rank, code) for rank, code in enumerate(codes) if code and _is_failure(code)
        ]
        if self._failure is not None or not failed:
            return
        # A killed rank makes others fail too, so it comes first.
        self._failure = min(failed, key=lambda failure: (failure.code > 0, failure.rank))
        logger.error("%s", self._failure)
        if self._failure.rank > 0:
            self._show_end_of_log(self._failure.rank)
        self._deadline = time.monotonic() + _FAILURE_GRACE_S

    def _show_end_of_log(self, rank: int) -> None:
        file = self._log_dir / f"workerlog.{rank}"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])
        logger.error("the end of %s:\n%s", file, shown or "  (empty)")

    def _kill_unsaved(self, codes: Sequence[int | None]) -> None:
        left = [rank for rank, code in enumerate(codes) if code is None]
        if left and self._failure is None:
            logger.warning(
                "rank(s) %s ended at once, without a checkpoint; continue with "
                "train.resume_from_checkpoint=auto",
                ", ".join(map(str, left)),
            )
        self._kill()

    def _kill(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._ranks:
            process.wait()

    def _exit_code(self) -> int:
        if self._failure is not None:
            return self._failure.code if self._failure.code > 0 else 128 - self._failure.code
        codes = [process.returncode for process in self._ranks]
        if any(code < 0 for code in codes):
            return _NOT_SAVED
        return max(codes)


def _is_failure(code: int) -> bool:
    """Whether an exit code is neither success nor that of a requested stop."""
    return code != 0 and code - 128 not in STOP_SIGNALS


def _environments(ports: Sequence[int], log_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of each rank, with the variables that Paddle's launcher sets."""
    inherited = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    # Variables of this package concern the run, not a rank.
    inherited |= {name: value for name, value in os.environ.items() if name[:10] == "PADDLE_VL_"}
    inherited |= {LAUNCHER_VARIABLE: str(os.getpid()), "PADDLE_LOG_DIR": str(log_dir.resolve())}
    # Silences messages of Paddle's C++ code about its connections.
    inherited.setdefault("GLOG_minloglevel", "1")
    size = len(ports)
    if size == 1:
        yield inherited
        return
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    devices = _device_variables(size)
    for rank, endpoint in enumerate(endpoints):
        own = {
            "PADDLE_MASTER": endpoints[0],
            "PADDLE_NNODES": "1",
            "PADDLE_GLOBAL_SIZE": str(size),
            "PADDLE_LOCAL_SIZE": str(size),
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        }
        if rank == 0:
            own[RANK_LOG_VARIABLE] = str(log_dir / "workerlog.0")
        yield inherited | own | devices[rank]


def _device_variables(size: int) -> list[dict[str, str]]:
    """The variables that assign a device to each rank; gloo without an accelerator."""
    from paddle.distributed.launch.context.device import Device, DeviceType

    from paddle_vl.parallel.gloo_fleet.installation import runs_on_gloo

    if runs_on_gloo():
        return [{"PADDLE_DISTRI_BACKEND": "gloo"}] * size
    device = Device.parse_device()
    if device.dtype == DeviceType.CPU:
        return [{"PADDLE_DISTRI_BACKEND": "gloo"}] * size
    chosen = device.get_selected_devices()
    if len(chosen) < size:
        raise ValueError(
            f"--nproc {size} needs as many devices, and {len(chosen)} are visible "
            f"({', '.join(device.labels)}): lower --nproc and the degrees of parallel, or make "
            "more devices visible"
        )
    custom = device.get_custom_device_envs() if device.dtype == DeviceType.CUSTOM_DEVICE else {}
    return [custom | {device.get_selected_device_key(): label} for label in chosen[:size]]


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port for a socket that reuses addresses, as the store's does."""
    with socket.socket() as placeholder:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        placeholder.bind(("127.0.0.1", 0))
        yield placeholder.getsockname()[1]
