"""Processes that this one starts, watches and ends: ranks of a launcher, the doctor's worker.

Each has a session of its own, so that Ctrl-C reaches this process alone, and what a process has
started is killed with it. Does not load Paddle.
"""

import ctypes
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.05
_GB = 1e9
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Failure(NamedTuple):
    """A process that failed, by its place among those started together."""

    rank: int
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank} {end_in_words(self.code)}"


class Limits(NamedTuple):
    """Limits of processes, None for no limit.

    Attributes:
        seconds: from the start of the first to the end of the last.
        memory_bytes: resident set of each.
    """

    seconds: float | None = None
    memory_bytes: int | None = None


NO_LIMITS = Limits()


class TimeLimitError(RuntimeError):
    """Processes ran for longer than their limit."""


class MemoryLimitError(RuntimeError):
    """A rank uses more memory than its limit."""

    def __init__(self, rank: int, used: int, limit: int):
        super().__init__(
            f"rank {rank} uses {used / _GB:.2f} GB of memory, above the limit of "
            f"{limit / _GB:.2f} GB"
        )


class Processes:
    """Processes that belong together; those that still run at the end of the block are killed.

    Attributes:
        failure: the first failure that `watched` saw, a killed process before others.
    """

    def __init__(self, limits: Limits = NO_LIMITS, successes: Sequence[int] = (0,)):
        """
        Args:
            successes: exit codes that are no failure.
        """
        self.failure: Failure | None = None
        self._limits, self._successes = limits, successes
        self._begin = time.monotonic()
        self._processes: list[subprocess.Popen] = []
        self._outputs: list[Path | None] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path | None = None
    ) -> None:
        """Start a process; without a file it writes to the output of this one."""
        self._processes.append(start_process(command, environment, output))
        self._outputs.append(output)

    def codes(self) -> list[int | None]:
        """The exit code of each, -N after signal N; None while it runs."""
        return [process.poll() for process in self._processes]

    def watched(self) -> Iterator[None]:
        """Yields every 0.05 seconds until all have ended.

        Raises:
            TimeLimitError, MemoryLimitError: a limit is passed.
        """
        while True:
            codes = self.codes()
            failed = [
                Failure(rank, code)
                for rank, code in enumerate(codes)
                if code is not None and code not in self._successes
            ]
            if failed and self.failure is None:
                # A killed process makes others fail too.
                self.failure = min(failed, key=lambda each: (each.code > 0, each.rank))
            yield
            if None not in codes:
                return
            self._check_limits()
            time.sleep(_POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all that still run."""
        for process in self._running():
            process.send_signal(number)

    def end(self, grace_s: float) -> None:
        """Ask all to end, and kill those that run longer, with what each has started."""
        running = self._running()
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        _kill_sessions(running)

    def kill(self) -> None:
        """Kill all that still run, and what each has started."""
        _kill_sessions(self._running())

    def end_of_output(self, rank: int, num_lines: int) -> list[str]:
        """The last lines of a process's file."""
        file = self._outputs[rank]
        return [] if file is None else last_lines(file, num_lines)

    def _running(self) -> list[subprocess.Popen]:
        return [process for process in self._processes if process.poll() is None]

    def _check_limits(self) -> None:
        seconds, memory_bytes = self._limits
        if seconds is not None and time.monotonic() - self._begin > seconds:
            raise TimeLimitError(f"not done after {seconds:g} s")
        if memory_bytes is None:
            return
        for rank, process in enumerate(self._processes):
            with suppress(OSError):
                if (used := resident_bytes(process.pid)) > memory_bytes:
                    raise MemoryLimitError(rank, used, memory_bytes)


def start_process(
    command: Sequence[str], environment: Mapping[str, str], output: Path | None = None
) -> subprocess.Popen:
    """Start a process in a session of its own, without input."""
    stream = None if output is None else output.open("wb")
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    finally:
        if stream is not None:
            stream.close()


def _kill_sessions(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def end_in_words(code: int) -> str:
    """How a process ended, by its exit code, -N after signal N."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_lines(file: Path, num_lines: int) -> list[str]:
    """The last lines of a text file; none if it is missing."""
    if not file.exists():
        return []
    return file.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]


def in_one_line(error: BaseException) -> str:
    """Type and message of an error. Of Paddle's, which quotes the errors and stacks that it passed
    through in further lines, the innermost."""
    lines = str(error).split("\n")
    inner = [line.strip() for line in lines[1:] if re.match(r"\s*\w*Error: ", line)]
    outer = f"{type(error).__name__}: {next(filter(str.strip, lines), '').strip()}"
    return inner[-1] if inner else outer


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set of a process; 0 for one that has ended and is not waited for yet.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def release_free_memory() -> None:
    """Give the pages that malloc keeps for later back to the system; takes milliseconds.

    Nothing without glibc, whose call it is.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
