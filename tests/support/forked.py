"""Runs Python programs in forks of a process that has imported Paddle and this package.

Importing takes seconds and forking takes milliseconds. A fork is as fresh as a start: the server
has imported modules and done nothing else, so it has no thread, no tensor and no random state.
A fork differs from a start in two ways: its modules were imported before its own environment was
set, and it shares the hash seed with other forks of its server. So each environment that is read
at imports gets its own server, and ranks are forked in turn from two servers with two hash seeds.

Tests whose subject is the start itself (a launcher, what a command imports, a setting that must be
there at the start) use `subprocess`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# Beginnings of the names of variables that Python, libc or Paddle reads at its start or import.
_READ_AT_IMPORTS = ("FLAGS_", "GLIBC_", "GLOG_", "LD_", "MALLOC_", "OMP_", "PYTHON")
_POLL_INTERVAL = 0.005
# Besides this package; the later ones are imported by the first step.
_IMPORTED = (
    "paddle.distributed.fleet", "pytest", "paddle.distributed.auto_parallel.fully_shard_fusion",
    "paddle.optimizer.fusion_utils",
)  # fmt: skip
# What all forks have, so that they share their servers.
_COMMON = {
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tools", ROOT / "tools" / "benchmarks"])),
    "OMP_NUM_THREADS": "1",
}


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: Path,
    stderr: Path | None = None,
    folder: Path = ROOT,
    server: int = 0,
) -> "Forked | Started":
    """Start `python *arguments` in a session of its own.

    Args:
        arguments: a file, `-m` and a module, or `-c` and a program; then its arguments.
        environment: variables added to this process's, without those of a launcher.
        stdout, stderr: files for its output; without `stderr` both go to `stdout`.
        folder: its working directory.
        server: forks of servers with different numbers have different hash seeds.
    """
    own = {name: text for name, text in os.environ.items() if not name.startswith("PADDLE_")}
    environment = {**own, **_COMMON, **environment}
    if _has_cuda():
        # CUDA does not survive a fork.
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in (stdout, stderr) if path]
            return Started(
                [sys.executable, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[-1],
                cwd=folder,
                start_new_session=True,
            )
    read = {name: text for name, text in environment.items() if name.startswith(_READ_AT_IMPORTS)}
    paths = (str(stdout), str(stderr or stdout))
    job = (list(arguments), environment, paths, str(folder))
    return _server(server, tuple(sorted(read.items()))).fork(job)


def run(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """Run `python *arguments` to its end, as `subprocess.run` with captured text would.

    Args:
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = Path(outputs, "stdout"), Path(outputs, "stderr")
        process = start(
            arguments,
            environment=environment or {},
            stdout=stdout,
            stderr=stderr,
            folder=folder,
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        texts = [path.read_text("utf-8", "backslashreplace") for path in (stdout, stderr)]
        return subprocess.CompletedProcess(list(arguments), code, *texts)


class Started(subprocess.Popen):
    """A program in a new process, whose session ends with it."""

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


class Forked:
    """A program in a fork, with the methods of `subprocess.Popen`."""

    def __init__(self, server: "_Server", pid: int):
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._server.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: there is none after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            time.sleep(_POLL_INTERVAL)
        return code

    def kill(self) -> None:
        """End it with all processes of its session."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def processor_seconds(self) -> float:
        """What it and its children have used, once there is an exit code."""
        return self._server.seconds[self.pid]


class _Server:
    """This process's end of a fork server."""

    def __init__(self, environment: Mapping[str, str]):
        self._connection, end = Pipe()
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(_READ_AT_IMPORTS)}
        with end:
            process = subprocess.Popen(
                [sys.executable, __file__, str(end.fileno())],
                env={**inherited, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno()],
                # Ctrl-C is for the tests alone, which then end the servers.
                start_new_session=True,
            )
        self._codes: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        # The server ends when the connection does.
        atexit.register(process.wait)
        atexit.register(self._connection.close)

    def fork(self, job: tuple) -> Forked:
        self._connection.send(job)
        while (pid := self._receive()) is None:
            pass
        return Forked(self, pid)

    def exit_code(self, pid: int) -> int | None:
        while pid not in self._codes and self._connection.poll():
            self._receive()
        return self._codes.get(pid)

    def _receive(self) -> int | None:
        """Take a message; returns the number of a process that has started."""
        pid, code, self.seconds[pid] = self._connection.recv()
        if code is None:
            return pid
        self._codes[pid] = code
        return None


@functools.cache
def _server(number: int, environment: tuple[tuple[str, str], ...]) -> _Server:
    return _Server(dict(environment))


@functools.cache
def _has_cuda() -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("paddlepaddle-gpu"))
    return False


def _serve(connection: Connection) -> tuple:
    """Fork a process for each job that comes; returns in the fork, with its job."""
    running: dict[int, int] = {}  # The number of each process by its descriptor.
    while True:
        for ready in wait([connection, *running]):
            if isinstance(ready, int):
                pid = running.pop(ready)
                os.close(ready)
                _, status, used = os.wait4(pid, 0)
                seconds = used.ru_utime + used.ru_stime
                connection.send((pid, os.waitstatus_to_exitcode(status), seconds))
                continue
            try:
                job = connection.recv()
            except (EOFError, ConnectionResetError):
                for pid in running.values():
                    os.killpg(pid, signal.SIGKILL)
                sys.exit()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                # Sent here, so that a process known to the tests leads its session.
                connection.send((os.getpid(), None, 0.0))
                connection.close()
                for descriptor in running:
                    os.close(descriptor)
                return job
            running[os.pidfd_open(pid)] = pid


def _become(job: tuple) -> None:
    """Run a job's program in this process, as Python's command line would."""
    arguments, environment, (stdout, stderr), folder = job
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv = [sys.executable, *arguments]
    # What modules have drawn or read at their import.
    np.random.seed()
    for name, module in sys.modules.items():
        if name.startswith("paddle_vl.") and hasattr(module, "PARENT"):
            module.PARENT = os.getppid()
    kind, *rest = arguments
    if kind in ("-m", "-c"):
        sys.path[0] = folder if kind == "-m" else ""
        sys.argv = [kind, *rest[1:]]
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv = list(arguments)
        runpy.run_path(kind, run_name="__main__")


def without_loss_curves() -> None:
    """From now on runs in this process leave an empty loss.png; to draw takes as long as to train
    four steps of a tiny model."""
    reporter = importlib.import_module("paddle_vl.train.reporting.reporter")
    reporter.draw_loss_curve = lambda lines, path: path.touch()


def _import_all() -> None:
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    import paddle_vl

    for module in pkgutil.walk_packages(paddle_vl.__path__, "paddle_vl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    without_loss_curves()
    # Forks do not visit, and so copy, what was imported.
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    _import_all()
    _become(_serve(Connection(int(sys.argv[1]))))
