"""Runs a profile in separate processes and reports how it ended: done, out of memory, or failed.

A profile that needs more memory than allowed must not crash the machine or other profiles. Between
steps its ranks stop by themselves. Within a step the supervisor checks their resident sets and
kills them; kills by the kernel show in its counters.

Each rank writes a status file, since after a failure a launcher ends all ranks with its own exit
code. The file of a killed rank still says "running".
"""

import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from paddle_vl.parallel.launcher import LAUNCHER_VARIABLE
from paddle_vl.profile.memory import GB, resident_bytes

Status = Literal["ok", "oom", "failed", "timeout"]
State = Literal["running", "done", "oom", "failed"]
LOG_FILE = "output.log"
_LONGEST = 400
# Messages of allocators: Paddle's, the GPU driver's through it, and the C++ library's.
_NO_MEMORY = re.compile(r"out of memory|ResourceExhausted|bad_alloc|fail(ed)? to alloc", re.I)
_SUMMARY = re.compile(r"Error Message Summary:\s*-+\s*(.+)", re.S)
_LOOK_EVERY_SECONDS = 0.02
# The supervisor notices a dead rank later than the other ranks, which then fail too.
_HEAD_START_SECONDS = 0.5
_KERNEL_COUNTS = Path("/proc/vmstat")


class MemoryLimitError(RuntimeError):
    """A rank uses more memory than the profile's setting allows."""

    def __init__(self, place: str, used: int, limit: int):
        super().__init__(
            f"{place} uses {used / GB:.2f} GB of memory, above the limit of {limit / GB:.2f} GB"
        )


class RankStatus(NamedTuple):
    """The last status of a rank: its state, and its time as of `time.time()`."""

    rank: int
    pid: int
    state: State
    detail: str
    time: float


class Outcome(NamedTuple):
    """How a profile ended, and why, in words."""

    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of a profile.

    Attributes:
        seconds: from its start to its end.
        memory_bytes: resident set of each of its ranks; None leaves memory to the device.
    """

    seconds: float
    memory_bytes: int | None = None


@contextmanager
def leaving_status(folder: Path, rank: int) -> Iterator[None]:
    """Write this rank's status file: "running", and the outcome at the end of the block."""
    file = folder / f"rank-{rank}.json"
    _write(file, rank, "running", "")
    try:
        yield
    except BaseException as error:
        _write(file, rank, "oom" if is_out_of_memory(error) else "failed", short_message(error))
        raise
    _write(file, rank, "done", "")


def read_statuses(folder: Path) -> list[RankStatus]:
    """Statuses of all ranks that have written one, by rank."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank-*.json")]
    return sorted(RankStatus(**json.loads(text)) for text in texts)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory, from any library."""
    if isinstance(error, MemoryError | MemoryLimitError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Paddle raises the errors of its allocators as one of these.
    is_paddles = isinstance(error, RuntimeError | SystemError)
    return is_paddles and _NO_MEMORY.search(str(error)) is not None


def short_message(error: BaseException) -> str:
    """Kind and text of an exception in one line, without Paddle's list of C++ calls."""
    text = str(error)
    summary = _SUMMARY.search(text)
    words = " ".join((summary.group(1) if summary else text).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST]


def run_cell(
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str] | None = None,
    kernel_counts: Path = _KERNEL_COUNTS,
) -> Outcome:
    """Run a command within limits; none of its processes survives.

    Args:
        command: its ranks write their status to the folder (`leaving_status`); exits with 0 on
            success.
        folder: for status files, of which old ones are deleted first, and the command's output.
        environment: variables on top of those of this process.

    Returns:
        oom only where it is certain: a rank says so, a rank is above the limit, or a rank died
        without a message while the kernel killed a process for memory.
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
            # Read again: a launcher may end before the last look saw its ranks.
            _kill_all(process, read_statuses(folder))
    if watch.verdict is not None:
        return watch.verdict
    return watch.judged(process.returncode, _kernel_kills(kernel_counts) > kills)


@dataclass
class _Watch:
    """State of a running command; `missed`: by rank, when its process was found gone without a
    final status."""

    folder: Path
    limits: Limits
    verdict: Outcome | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    missed: dict[int, float] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Check once; sets `verdict` if the command has to be ended."""
        if time.monotonic() - self.begin > self.limits.seconds:
            self.verdict = Outcome("timeout", f"not done after {self.limits.seconds:g} s")
            return
        self.ranks = read_statuses(self.folder)
        for each in self.ranks:
            if each.state != "running" or each.rank in self.missed:
                continue
            used = _resident(each.pid)
            if used == 0:
                self.missed[each.rank] = time.time()
            elif self.limits.memory_bytes is not None and used > self.limits.memory_bytes:
                reached = MemoryLimitError(f"rank {each.rank}", used, self.limits.memory_bytes)
                self.verdict = Outcome("oom", f"{reached}, within a step")

    def judged(self, exit_code: int, kernel_killed: bool) -> Outcome:
        """The outcome of a command that ended by itself; of several failures the first."""
        self.ranks = read_statuses(self.folder)
        if exit_code == 0 and all(each.state == "done" for each in self.ranks):
            return Outcome("ok")
        for each in self.ranks:
            if each.state == "oom":
                return Outcome("oom", f"rank {each.rank}: {each.detail}")
        silent = [each for each in self.ranks if each.state == "running"]
        if silent and kernel_killed:
            return Outcome("oom", "the kernel killed a process for memory")
        ends = [
            (each.time, f"rank {each.rank}: {each.detail}")
            for each in self.ranks
            if each.state == "failed"
        ]
        for each in silent:
            when = self.missed.get(each.rank, time.time())
            text = f"rank {each.rank} died without a message: {last_line(self.folder)}"
            ends.append((when - _HEAD_START_SECONDS, text))
        if ends:
            return Outcome("failed", min(ends)[1])
        return Outcome("failed", f"exit code {exit_code}: {last_line(self.folder)}")


def last_line(folder: Path) -> str:
    """The last line of the output that names an error; without any, the last line."""
    try:
        text = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        return short_message(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:_LONGEST]


def _write(file: Path, rank: int, state: State, detail: str) -> None:
    status = RankStatus(rank, os.getpid(), state, detail, time.time())
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(status._asdict()), encoding="utf-8")
    partial.replace(file)


def _resident(pid: int) -> int:
    """Resident set in bytes; 0 if the process is gone or a zombie."""
    try:
        return resident_bytes(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _kernel_kills(counts: Path) -> int:
    if not counts.exists():
        return 0
    lines = dict(line.split() for line in counts.read_text().splitlines())
    return int(lines.get("oom_kill", 0))


def _kill_all(process: subprocess.Popen, ranks: Sequence[RankStatus]) -> None:
    """Kill a process, the ranks, and their descendants, which may be in other sessions."""
    roots = {process.pid} if process.poll() is None else set()
    # Only orphaned ranks: the id of an ended one may belong to another process by now.
    roots |= {each.pid for each in ranks if each.state == "running" and _is_orphan(each.pid)}
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
    """Whether the process runs but its launcher has ended."""
    return _parents().get(pid) == 1 and bool(_resident(pid))


def _descendants(roots: set[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    frontier = set(roots)
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _parents() -> dict[int, int]:
    """Process id to that of its parent, of all processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name before the last bracket may contain spaces and brackets.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1])
    return found
