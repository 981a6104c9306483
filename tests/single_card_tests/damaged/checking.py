"""What holds for a parser of users' files, whatever their bytes."""

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from paddle_vl.cli.main import _is_meant_for_users
from paddle_vl.processes import release_free_memory
from tests.single_card_tests.damaged.damage import Files

_SECONDS, _MEBIBYTES = 5, 400
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_STARTED = ("subprocess.Popen", "os.system", "os.posix_spawn", "socket.connect",
            "socket.getaddrinfo")  # fmt: skip
# The folder of the input that is parsed now, if any, and what was touched outside of it. A hook
# stays for the life of a process.
_inside: list[str] = []
_touched: list[str] = []


class SlowError(BaseException):
    """A parser took too long; no handler of the package takes it for another error."""


def check(folder: Path, parse: Callable[[], object], inputs: Files, *named: str) -> None:
    """Try damaged files: each is accepted or refused, and some are each.

    A refusal is an error of this package's own that names the file. No input takes more than five
    seconds of a processor or 400 MiB, starts a process, asks the network, writes outside of its
    folder, or reads what lies beside it.

    Args:
        folder: with files that are accepted.
        parse: reads them and uses the result.
        inputs: files that take the place of some of them, for a moment.
        named: every refusal has one of these texts; empty if the caller adds the name.
    """
    # Imports and caches of the first call do not count.
    parse()
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # A profile of more has others every time.
    counts, is_long = Counter(), settings.default.max_examples > 100

    @settings(
        max_examples=settings.default.max_examples if is_long else 40, derandomize=not is_long,
        database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(inputs)
    def try_one(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        try:
            _watched(parse, folder)
            counts["accepted"] += 1
        except (ValueError, RuntimeError, OSError) as error:
            if not _is_refusal(error):
                raise
            if named and not any(name in str(error) for name in named):
                raise AssertionError("a refusal does not name its file") from error
            counts["refused"] += 1
        finally:
            for path in map(folder.joinpath, files):
                path.write_bytes(kept[path]) if path in kept else path.unlink(missing_ok=True)

    try_one()
    assert counts["accepted"], "no input is accepted"
    assert counts["refused"], "no input is refused"


def _watched(parse: Callable[[], object], folder: Path) -> None:
    if not _inside:
        sys.addaudithook(_note)
    _touched.clear()
    # Runs of other tests may have told the allocator to keep what is freed.
    release_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # The peak of the memory is that of now.
    before, handler = _memory("VmRSS"), signal.signal(signal.SIGPROF, _stop)
    # Of this process: what a busy machine gives to others does not count.
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    _inside[:] = [os.path.realpath(folder)]
    try:
        parse()
    finally:
        _inside[:] = [""]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    taken = (_memory("VmHWM") - before) >> 10
    assert taken < _MEBIBYTES, f"an input took {taken} MiB"
    assert not _touched, f"an input touched {_touched}"


def _stop(*_: object) -> None:
    raise SlowError(f"an input takes more than {_SECONDS} s")


def _note(event: str, arguments: tuple) -> None:
    if not _inside or not _inside[0]:
        return
    if event in _STARTED:
        _touched.append(f"{event} {arguments[:2]!r}")
    elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, folder = os.path.realpath(os.fsdecode(arguments[0]).replace("\0", "")), _inside[0]
        beside = (os.path.dirname(folder) + os.sep, "/etc/passwd")
        is_outside = path.startswith(beside) or (arguments[2] & _WRITING and path != os.devnull)
        if is_outside and not path.startswith(folder + os.sep):
            _touched.append(path)


def _is_refusal(error: Exception) -> bool:
    """Whether an error was raised on purpose, by this package or the system, and says something."""
    kind, last = type(error), traceback.extract_tb(error.__traceback__)[-1]
    is_own = kind in (ValueError, RuntimeError) or kind.__module__.startswith("paddle_vl.")
    is_raised = is_own and (last.line or "").startswith("raise")
    is_meant = _is_meant_for_users(error) and bool(str(error).strip())
    return is_meant and (is_raised or isinstance(error, OSError))


def _memory(name: str) -> int:
    """KiB in one line of this process's status."""
    text = Path("/proc/self/status").read_text()
    return int(text[text.index(name) :].split(None, 2)[1])
