"""A command with all processes that it starts, wherever they are in the process tree."""

import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

# Environment variable that identifies all processes of a command, orphans too.
_TOKEN = "FAULT_RUN_ID"
# Time within which every process must have ended.
LEFT_AFTER_S = 10.0


class End(NamedTuple):
    """How a command ended.

    Attributes:
        code: the command's exit code.
        seconds: until all processes had ended.
        left: command lines of processes that outlived the command by 10 seconds and were killed.
    """

    code: int
    seconds: float
    left: list[list[str]]


class Processes:
    """A command in its own session; remaining processes are killed when the context ends.

    Args:
        environment: all variables of the command.
        output: file for the command's output.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path):
        token = uuid.uuid4().hex
        self._mark = f"{_TOKEN}={token}".encode()
        with output.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**environment, _TOKEN: token},
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        """All live processes of this start."""
        found = []
        for pid in psutil.pids():
            try:
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def kill_all(self) -> None:
        """Send SIGKILL to all processes, the command first, until none is left."""
        while alive := self.alive():
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.process.poll()

    def end(self, begin: float, within_s: float) -> End:
        """Wait for the end of the command and check which processes are left 10 seconds later.

        Args:
            begin: start of the measured time, from `time.monotonic`.
            within_s: timeout after which the command itself counts as left.
        """
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = self.alive()
        else:
            deadline = time.monotonic() + LEFT_AFTER_S
            while (left := self.alive()) and time.monotonic() < deadline:
                time.sleep(0.05)
        seconds, lines = time.monotonic() - begin, [line_of(process) for process in left]
        self.kill_all()
        return End(self.process.wait(), seconds, lines)

    def __exit__(self, *exception: object) -> None:
        self.kill_all()
        self.process.wait()


def line_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
