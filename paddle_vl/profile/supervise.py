"""Runs a profile in processes of its own and tells how it ended: done, out of memory, or failed.

A profile that needs more memory than allowed must not take the machine or other profiles with it.
Its ranks stop by themselves between steps. Within a step the supervisor looks at their resident
sets and kills them in time; and if the kernel is faster, its count of such kills tells.

Each rank leaves a status file, since a launcher ends all ranks with an exit code of its own when
one fails, and a rank that is killed can write nothing: its file still says "running".
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
# The supervisor sees a dead rank later than the other ranks notice it and fail too.
_HEAD_START_SECONDS = 0.5
_KERNEL_COUNTS = Path("/proc/vmstat")


class MemoryLimitError(RuntimeError):
    """A rank uses more memory than the profile's setting allows."""

    def __init__(self, place: str, used: int, limit: int):
        super().__init__(
            f"{place} uses {used / GB:.2f} GB of memory, above the limit of {limit / GB:.2f} GB"
        )


class RankStatus(NamedTuple):
    """What a rank wrote last: its state, and when, in seconds of `time.time()`."""

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
    """What a profile may take.

    Attributes:
        seconds: from its start to its end.
        memory_bytes: resident set of each of its ranks; None leaves memory to the device.
    """

    seconds: float
    memory_bytes: int | None = None


@contextmanager
def leaving_status(folder: Path, rank: int) -> Iterator[None]:
    """Write into the folder that this rank runs, and at the end of the block how it went."""
    file = folder / f"rank-{rank}.json"
    _write(file, rank, "running", "")
    try:
        yield
    except BaseException as error:
        _write(file, rank, "oom" if is_out_of_memory(error) else "failed", short_message(error))
        raise
    _write(file, rank, "done", "")


def read_statuses(folder: Path) -> list[RankStatus]:
    """Those of all ranks that have written so far, by rank."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank-*.json")]
    return sorted(RankStatus(**json.loads(text)) for text in texts)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up, whoever raised it."""
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
    """Run a command to its end, or end it; no process that it started is left.

    Args:
        command: its ranks leave their status in the folder (`leaving_status`); it exits with 0 if
            all went well.
        folder: old status files are deleted first; receives the command's output as well.
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
    """What is known of a running command; `missed` has, by rank, when a process was gone that had
    not written how it ended."""

    folder: Path
    limits: Limits
    verdict: Outcome | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    missed: dict[int, float] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Look once; sets `verdict` if the command has to be ended."""
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
    """0 when the process is gone, or a zombie."""
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
    # Ranks whose launcher is gone; a process id may have been given to another process since.
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
    """Whether a process runs on without the one that started it."""
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
                # The name before the last bracket may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1])
    return found
