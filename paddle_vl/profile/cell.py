"""One cell of a matrix: a profile in processes of its own, watched from outside.

A cell that needs more memory than there may be must not take the machine or the other cells with
it. Its processes stop by themselves between steps; within a step this process looks at their
resident sets and kills them in time; and if the kernel is faster, its count of such kills says so.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from paddle_vl.parallel.launcher import LAUNCHER_VARIABLE
from paddle_vl.profile.last_words import MemoryLimitError, Word, read_words, short_message
from paddle_vl.profile.memory import resident_bytes

Status = Literal["ok", "oom", "failed", "timeout"]
LOG_FILE = "output.log"
_LOOK_EVERY_SECONDS = 0.02
# A process that dies is missed before its peers notice, but seen later than they.
_HEAD_START_SECONDS = 0.5
_KERNEL_COUNTS = Path("/proc/vmstat")


class Outcome(NamedTuple):
    """How a cell ended, and in words why."""

    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Limits:
    """What a cell may take.

    Attributes:
        seconds: from its start to its end.
        memory_bytes: resident set of each of its processes; None leaves memory to the device.
    """

    seconds: float
    memory_bytes: int | None = None


def run_cell(
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] | None = None,
    kernel_counts: Path = _KERNEL_COUNTS,
) -> Outcome:
    """Run a command to its end, or end it; nothing that it started is left.

    Args:
        command: its processes leave their words (`paddle_vl.profile.last_words`) in the folder; it
            ends with 0 where all went well.
        folder: emptied of words before; receives the command's output as well.
        environment: variables on top of this process's.

    Returns:
        oom only for what is known to be one: a process that says so, one above the limit, or one
        that died without a word while the kernel killed for memory.
    """
    for old in folder.glob("rank-*.json"):
        old.unlink()
    kills = _kernel_kills(kernel_counts)
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # It ends when this process does.
            env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid()), **(environment or {})},
            start_new_session=True,
        )
        watch = _Watch(folder, limits)
        try:
            while process.poll() is None and watch.verdict is None:
                time.sleep(_LOOK_EVERY_SECONDS)
                watch.look()
        finally:
            _kill_all(process, watch.words)
    if watch.verdict is not None:
        return watch.verdict
    return watch.judged(process.returncode, _kernel_kills(kernel_counts) > kills)


@dataclass
class _Watch:
    folder: Path
    limits: Limits
    verdict: Outcome | None = None
    words: list[Word] = field(default_factory=list)
    # By rank when a process was missed that had said nothing but that it runs.
    missed: dict[int, float] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Judge what is seen at this moment; sets `verdict` when the cell has to end."""
        if time.monotonic() - self.begin > self.limits.seconds:
            self.verdict = Outcome("timeout", f"not done after {self.limits.seconds:g} s")
            return
        self.words = read_words(self.folder)
        for word in self.words:
            if word.state != "running" or word.rank in self.missed:
                continue
            used = _resident(word.pid)
            if used == 0:
                self.missed[word.rank] = time.time()
            elif self.limits.memory_bytes is not None and used > self.limits.memory_bytes:
                reached = MemoryLimitError(f"rank {word.rank}", used, self.limits.memory_bytes)
                self.verdict = Outcome("oom", f"{reached}, within a step")

    def judged(self, exit_code: int, kernel_killed: bool) -> Outcome:
        """How a cell went that ended by itself."""
        self.words = read_words(self.folder)
        if exit_code == 0 and all(word.state == "done" for word in self.words):
            return Outcome("ok")
        for word in self.words:
            if word.state == "oom":
                return Outcome("oom", f"rank {word.rank}: {word.detail}")
        silent = [word for word in self.words if word.state == "running"]
        if silent and kernel_killed:
            return Outcome("oom", "the kernel killed a process for memory")
        ends = [
            (word.time, f"rank {word.rank}: {word.detail}")
            for word in self.words
            if word.state == "failed"
        ]
        for word in silent:
            when = self.missed.get(word.rank, time.time())
            text = f"rank {word.rank} died without a word: {last_line(self.folder)}"
            ends.append((when - _HEAD_START_SECONDS, text))
        if ends:
            return Outcome("failed", min(ends)[1])
        return Outcome("failed", f"exit code {exit_code}: {last_line(self.folder)}")


def last_line(folder: Path) -> str:
    """The last line of a cell's output that says something."""
    try:
        text = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        return short_message(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:400]


def _resident(pid: int) -> int:
    """0 when the process is gone, or dead and not yet fetched by its parent."""
    try:
        return resident_bytes(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _kernel_kills(counts: Path) -> int:
    if not counts.exists():
        return 0
    lines = dict(line.split() for line in counts.read_text().splitlines())
    return int(lines.get("oom_kill", 0))


def _kill_all(process: subprocess.Popen, words: Sequence[Word]) -> None:
    """Kill a process and what it and the named ones have started, in sessions of their own too."""
    roots = {process.pid} if process.poll() is None else set()
    # Processes of a launcher that is gone; a number may have been given away again since.
    roots |= {word.pid for word in words if word.state == "running" and _is_orphan(word.pid)}
    while alive := roots | _descendants(roots):
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_LOOK_EVERY_SECONDS)
        process.poll()
        roots = {pid for pid in alive if _resident(pid)}
    process.wait()


def _is_orphan(pid: int) -> bool:
    """Whether a process of ours runs on without the one that started it."""
    parent = _parents().get(pid)
    return parent == 1 and bool(_resident(pid))


def _descendants(roots: set[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    frontier = set(roots)
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _parents() -> dict[int, int]:
    """Process number to its parent's, of all that run."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name before the last bracket may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1])
    return found
