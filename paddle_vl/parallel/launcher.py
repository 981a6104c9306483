"""The launcher of `--nproc`: runs a subcommand in several ranks on this machine.

`fleetrun` runs the same command on several machines. Paddle's launcher sends SIGTERM three times
for every stop request, kills ranks after 30 seconds even while they write, leaves ranks running
when it is killed, and copies the output of rank 0 every two seconds. Here:

- rank 0 writes to the terminal, the others to LOG_DIR/workerlog.RANK;
- a stop request reaches every rank once, and the caller sets how long ranks may take;
- a failed rank ends the others within seconds; the last line that is shown is its error with the
  path of its log;
- ranks end when this process does, see `paddle_vl.train.stop_signals`.

Everything listens on loopback. Devices are assigned as Paddle's launcher does.
"""

import io
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import NamedTuple

from paddle_vl.parallel.stop_requests import STOP_SIGNALS, StopRequest, StopRequests
from paddle_vl.processes import NO_LIMITS, Failure, Limits, Processes, last_lines

logger = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "PADDLE_VL_LAUNCHER_PID"
# The launcher's own command line, which says how to start the run again.
COMMAND_VARIABLE = "PADDLE_VL_COMMAND"
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
_NOT_SAVED = 1


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
    limits: Limits = NO_LIMITS,
    is_quiet: bool = False,
    variables: Mapping[str, str] = {},
) -> int:
    """Run `paddle-vl ARGUMENTS` in several ranks on this machine, with restarts.

    Args:
        stop_grace_s: seconds that ranks may take after a request to stop; None for no limit.
        next_attempt: called after a failure.
        limits: of each attempt.
        is_quiet: nothing is shown here: rank 0 writes to a file too, and failures are not logged.
        variables: of the ranks' environment, where this process's has none of that name.

    Returns:
        0 on success; 128 + N after stop signal N if all ranks saved; the exit code of a failed
        rank, or 128 + N if signal N killed it; 1 if ranks were killed before they saved.

    Raises:
        ValueError: there are fewer devices than ranks.
        TimeLimitError, MemoryLimitError: a limit was passed, and the ranks were killed.
    """
    attempt: Attempt | None = Attempt(arguments, num_ranks)
    with StopRequests() as requests:
        while attempt is not None:
            # Ranks that were asked to stop end with 128 + N.
            ends = (0, *(128 + number for number in STOP_SIGNALS))
            with Processes(limits, successes=ends) as ranks:
                run = _Run(ranks, log_dir, requests, stop_grace_s, is_quiet, variables)
                code = run.wait(attempt)
            attempt = None
            if ranks.failure is not None and not run.was_asked_to_stop:
                attempt = next_attempt(ranks.failure)
    return code


class _Run:
    """One attempt: what its ranks are told, and how long they may take."""

    def __init__(
        self,
        ranks: Processes,
        log_dir: Path,
        requests: StopRequests,
        stop_grace_s: float | None,
        is_quiet: bool,
        variables: Mapping[str, str],
    ):
        self._variables = variables
        self._ranks, self._log_dir, self._requests = ranks, log_dir, requests
        self._grace_s, self._is_quiet = stop_grace_s, is_quiet
        self._deadline: float | None = None
        self._has_failed = False
        self.was_asked_to_stop = False

    def wait(self, attempt: Attempt) -> int:
        """Run the ranks to their end; returns the exit code."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-u", str(_MAIN), *attempt.arguments]
        with ExitStack() as stack:
            ports = [stack.enter_context(_reserved_port()) for _ in range(attempt.num_ranks)]
            environments = list(_environments(ports, self._log_dir, not self._is_quiet))
            self._requests.set_handlers()  # Paddle was imported to list the devices.
            (self._log_dir / "workerlog.0").unlink(missing_ok=True)
            for rank, own in enumerate(environments):
                file = self._log_dir / f"workerlog.{rank}"
                variables = {**self._variables, **own}
                self._ranks.start(command, variables, file if rank or self._is_quiet else None)
            for _ in self._ranks.watched():
                if not self._may_go_on():
                    break
        # Rank 0 has written its last line.
        if self._ranks.failure is not None and not self._is_quiet:
            self._log_failure(self._ranks.failure)
        return self._exit_code()

    def _may_go_on(self) -> bool:
        """Handle requests and failures; returns whether the ranks have time left."""
        requests = self._requests.read()
        # Another launcher may have started this one.
        launcher = os.environ.get(LAUNCHER_VARIABLE)
        is_orphan = launcher is not None and os.getppid() != int(launcher)
        if is_orphan and not self.was_asked_to_stop:
            requests.append(StopRequest(signal.SIGTERM, is_again=False))
            self._deadline = time.monotonic() + _STRAGGLER_GRACE_S
        is_late = self._deadline is not None and time.monotonic() > self._deadline
        if is_late or any(request.is_again for request in requests):
            self._kill_unsaved()
            return False
        for request in requests:
            self.was_asked_to_stop = True
            self._ranks.signal(request.signal)
            if self._grace_s is not None:
                self._deadline = time.monotonic() + self._grace_s + _KILL_MARGIN_S
        if self._deadline is None and any(self._ranks.codes()):
            # Ranks that were asked to stop end together, unless one had not begun to train.
            self._deadline = time.monotonic() + _STRAGGLER_GRACE_S
        if self._ranks.failure is not None and not self._has_failed:
            self._has_failed = True
            self._deadline = time.monotonic() + _FAILURE_GRACE_S
        return True

    def _log_failure(self, failure: Failure) -> None:
        file, what = self._log_dir / f"workerlog.{failure.rank}", str(failure)
        # What a killed rank wrote last is not why it ended.
        if failure.code > 0 and (lines := last_lines(file, 1)):
            what = f"rank {failure.rank} failed: {lines[0].strip().removeprefix('error: ')}"
        logger.error("%s; its log is %s", what, file)

    def _kill_unsaved(self) -> None:
        left = [rank for rank, code in enumerate(self._ranks.codes()) if code is None]
        if left and self._ranks.failure is None:
            logger.warning(
                "rank(s) %s ended at once, without a checkpoint; continue with "
                "train.resume_from_checkpoint=auto",
                ", ".join(map(str, left)),
            )
        self._ranks.kill()

    def _exit_code(self) -> int:
        if self._ranks.failure is not None:
            code = self._ranks.failure.code
            return code if code > 0 else 128 - code
        # All have ended.
        codes = [code or 0 for code in self._ranks.codes()]
        return _NOT_SAVED if min(codes) < 0 else max(codes)


@contextmanager
def without_thread_warning() -> Iterator[None]:
    """Import Paddle in this context: it prints a warning when OMP_NUM_THREADS is above 1."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    finally:
        lines = said.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if "OMP_NUM_THREADS" not in line))


def _environments(
    ports: Sequence[int], log_dir: Path, rank_0_is_shown: bool
) -> Iterator[dict[str, str]]:
    """The environment of each rank, with the variables that Paddle's launcher sets."""
    inherited = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    # Variables of this package concern the run, not a rank.
    inherited |= {name: value for name, value in os.environ.items() if name[:10] == "PADDLE_VL_"}
    inherited |= {LAUNCHER_VARIABLE: str(os.getpid()), "PADDLE_LOG_DIR": str(log_dir.resolve())}
    inherited[COMMAND_VARIABLE] = json.dumps(sys.argv)
    size = len(ports)
    log_of_0 = {RANK_LOG_VARIABLE: str(log_dir / "workerlog.0")} if rank_0_is_shown else {}
    if size == 1:
        yield inherited | log_of_0
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
            own |= log_of_0
        yield inherited | own | devices[rank]


def _device_variables(size: int) -> list[dict[str, str]]:
    """The variables that assign a device to each rank; gloo without an accelerator."""
    with without_thread_warning():
        from paddle.distributed.launch.context.device import Device, DeviceType

    from paddle_vl.parallel.gloo_fleet import runs_on_gloo

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
