"""Judges one input: its result, time, memory, and the files that it opened."""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paddle_vl.cli.main import PACKAGE, _is_meant_for_users

ACCEPTED, REFUSED = "accepted", "refused"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROOT = PACKAGE.parent
# Folders from which Python and its libraries read their own files.
_LIBRARIES = tuple(
    {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, _ROOT, *sys.path[1:]) if path}
)
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/share/zoneinfo", "/usr/lib",
           "/usr/share/fonts")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OPENED = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir")
_STARTED = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect",
            "socket.getaddrinfo")  # fmt: skip


@dataclass
class Verdict:
    """Result of one input.

    Attributes:
        what: `accepted`, `refused`, or the kind of escape: an exception with its place, `slow`,
            `memory`, `outside FILE`. Inputs with the same fault have the same text.
        details: a message or traceback.
        mebibytes: additional memory.
    """

    what: str
    details: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0

    @property
    def is_escape(self) -> bool:
        return self.what not in (ACCEPTED, REFUSED)


@dataclass
class Guard:
    """Runs inputs of one parser and judges them.

    Attributes:
        folder: the only folder whose files may be touched.
        named: texts; every refusal must contain one of them.
        seconds, mebibytes: limits for one input.
    """

    folder: Path
    named: tuple[str, ...]
    seconds: float
    mebibytes: float
    _touched: list[str] = field(default_factory=list)
    _is_armed: bool = False

    def __post_init__(self):
        self._inside = os.path.realpath(self.folder) + os.sep
        self._directory = os.path.realpath(os.getcwd())
        sys.addaudithook(self._audit)

    def limit_memory(self) -> None:
        """Limit the address space, so that allocations fail before the machine runs out of
        memory."""
        size = _memory("VmSize") + (1 << 20) * int(self.mebibytes) * 4
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def judge(self, parse: Callable[[], object]) -> Verdict:
        """Run a parser once and return the verdict."""
        self._touched.clear()
        _CLEAR.write_text("5")
        before, begin = _memory("VmRSS"), time.monotonic() - waited()
        self._is_armed = True
        try:
            parse()
            verdict = Verdict(ACCEPTED)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            verdict = self._of_error(error)
        self._is_armed = False
        verdict.seconds = time.monotonic() - waited() - begin
        verdict.mebibytes = max(0, _memory("VmHWM") - before) / (1 << 20)
        if verdict.is_escape:
            return verdict
        if self._touched:
            verdict.what, verdict.details = f"outside {self._touched[0]}", str(self._touched)
        elif verdict.seconds > self.seconds:
            verdict.what = f"slow: over {self.seconds:g} s"
        elif verdict.mebibytes > self.mebibytes:
            verdict.what = f"memory: over {self.mebibytes:g} MiB"
        return verdict

    def _of_error(self, error: BaseException) -> Verdict:
        problem = self._not_a_refusal(error)
        if problem is None:
            return Verdict(REFUSED, str(error))
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(str(PACKAGE))] or frames[-1:]
        place = f"{os.path.relpath(own[-1].filename, _ROOT)}:{own[-1].lineno}"
        shown = "".join(traceback.format_exception(error, limit=-6))[-3000:]
        return Verdict(f"{type(error).__name__} at {place} ({problem})", shown)

    def _not_a_refusal(self, error: BaseException) -> str | None:
        """Reason why an exception is not a proper refusal; None if it is one."""
        kind = type(error)
        is_own = kind.__module__.startswith("paddle_vl.")
        if not isinstance(error, ValueError | RuntimeError | OSError):
            return "not an error for users"
        if kind not in (ValueError, RuntimeError) and not is_own and not isinstance(error, OSError):
            return "not an error for users"
        if not _is_meant_for_users(error):
            return "raised outside of the package"
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not isinstance(error, OSError) and not (last.line or "").startswith("raise"):
            return "not raised on purpose"
        if not str(error).strip():
            return "without a message"
        if self.named and not any(name in str(error) for name in self.named):
            return "does not name its file"
        return None

    def _audit(self, event: str, arguments: tuple) -> None:
        if not self._is_armed:
            return
        if event in _STARTED:
            self._touched.append(f"{event} {arguments[:2]!r}")
        elif event in _OPENED and arguments and isinstance(arguments[0], str | bytes | os.PathLike):
            name = os.fsdecode(arguments[0])
            if "\0" in name:
                return
            path = os.path.realpath(name)
            is_read = event == "open" and not arguments[2] & _WRITING
            is_library = path.startswith((*_LIBRARIES, *_SYSTEM))
            if event == "os.listdir" and path == self._directory:
                # Imports list this folder too.
                return
            is_inside = (path + os.sep).startswith(self._inside)
            if not is_inside and not (is_library and (is_read or event.endswith("dir"))):
                self._touched.append(path)


def waited(process: str | int = "self") -> float:
    """Seconds that the main thread of a process was ready to run, and a busy machine ran others.

    They say nothing about an input. A process that has ended did not wait.
    """
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def _memory(name: str) -> int:
    """Bytes in one line of this process's status."""
    text = _STATUS.read_text()
    return int(text[text.index(name) :].split(None, 2)[1]) * 1024
