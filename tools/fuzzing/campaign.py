"""Starts a process for each parser, watches it, and collects the verdicts of its inputs."""

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuzzing.child import Task
from fuzzing.guard import ACCEPTED, REFUSED
from fuzzing.parser import PARSERS, SHARES, Files

_TOOLS = Path(__file__).resolve().parents[1]
_START_SECONDS = 180
# Grace in seconds beyond an input's time limit before the process is killed.
_GRACE_SECONDS = 2
# Process deaths after which a parser is given up.
_MOST_DEATHS = 5
# Writing an input to a busy disk takes longer than parsing it.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_OUTSIDE = ("outside.png", "outside.json", "outside.safetensors")


@dataclass(frozen=True)
class Limits:
    """Number of inputs, and the limits for one input."""

    inputs: int = 200
    seed: int = 0
    seconds: float = 5.0
    mebibytes: float = 1024.0


@dataclass
class Escape:
    """A fault that was found.

    Attributes:
        what: see `fuzzing.guard.Verdict`.
        count: number of inputs with the fault.
        files: files of the smallest known input with the fault.
    """

    what: str
    details: str
    files: Files
    count: int = 1


@dataclass
class Tally:
    """Verdicts of all inputs of a parser.

    Attributes:
        slowest: seconds of the slowest input.
        largest: MiB of the input that took the most memory.
        is_whole: whether all inputs were tried.
    """

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: float = 0.0
    escapes: dict[str, Escape] = field(default_factory=dict)
    is_whole: bool = False

    def add(self, verdict: dict[str, Any], files: Files | None) -> None:
        self.inputs += 1
        self.slowest = max(self.slowest, verdict["seconds"])
        self.largest = max(self.largest, verdict["mebibytes"])
        what = verdict["what"]
        self.accepted += what == ACCEPTED
        self.refused += what == REFUSED
        if what in self.escapes:
            self.escapes[what].count += 1
        elif what not in (ACCEPTED, REFUSED):
            self.escapes[what] = Escape(what, verdict["details"], files or {})


def fuzz(name: str, limits: Limits) -> Tally:
    """Try the inputs of one parser in a process of its own.

    Args:
        name: a name in `PARSERS`, or another parser's `module:function`.

    Raises:
        RuntimeError: the process ended between inputs: the parser does not accept its valid files,
            or inputs could not be made.
    """
    tally, first = Tally(), 0
    inputs = max(1, round(limits.inputs * SHARES.get(name, 1)))
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_IN_MEMORY) as place:
        for _ in range(_MOST_DEATHS):
            folder = _fresh_folder(Path(place))
            task = Task(
                PARSERS.get(name, name), str(folder), inputs, limits.seed, limits.seconds,
                limits.mebibytes, first,
            )  # fmt: skip
            killer = _run_child(task, tally, Path(place))
            if killer is None:
                tally.is_whole = True
                break
            first = killer + 1
    return tally


def _fresh_folder(place: Path) -> Path:
    """Make an empty folder for inputs, and next to it files that no input may open."""
    folder = place / "inputs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in _OUTSIDE:
        (place / name).write_bytes(b"{}")
    return folder


def _run_child(task: Task, tally: Tally, place: Path) -> int | None:
    """Add the verdicts of a process; return the number of the input that ended it, if any."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_TOOLS), str(_TOOLS.parent)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(place / "matplotlib"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(place / "hypothesis"),
    }
    command = [sys.executable, "-m", "fuzzing.child", json.dumps(asdict(task))]
    begun, is_late, is_shrinking, is_whole = None, False, False, False
    patience = _Patience(_START_SECONDS)
    log, empty = place / "stderr", place / "empty"
    empty.mkdir(exist_ok=True)
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=empty
        ) as process,
    ):
        for message in _messages(process, patience):
            if message is None:
                is_late = True
                process.kill()
            elif "begin" in message:
                begun, patience.seconds = message["begin"], task.seconds + _GRACE_SECONDS
            elif "done" in message:
                tally.add(message["done"], decoded(message["files"]))
                begun, patience.seconds = None, _START_SECONDS
            elif "shrunk" in message:
                is_shrinking, known = True, tally.escapes[message["shrunk"]]
                known.details, files = message["details"], decoded(message["files"])
                known.files = files or {}
            is_whole = is_whole or bool(message and "end" in message)
    if is_whole or is_shrinking:
        return None
    said = log.read_text(errors="replace")
    said = said if len(said) < 4000 else f"{said[:2000]}\n...\n{said[-2000:]}"
    if begun is None:
        raise RuntimeError(
            f"{task.target}: its process ended without an input's doing, with code "
            f"{process.returncode}: the valid files are not accepted, or no inputs could be made; "
            f"it says:\n{said}"
        )
    what = f"slow: over {task.seconds:g} s" if is_late else f"died with code {process.returncode}"
    folder = Path(task.folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    tally.add({"what": what, "details": said, "seconds": task.seconds, "mebibytes": 0.0}, files)
    return begun


def decoded(files: dict[str, str] | None) -> Files | None:
    """Files from a JSON line."""
    if files is None:
        return None
    return {name: base64.b64decode(content) for name, content in files.items()}


@dataclass
class _Patience:
    """Time limit for the next line of a process."""

    seconds: float


def _messages(process: subprocess.Popen, patience: _Patience) -> Iterator[dict[str, Any] | None]:
    """Lines of a process as they arrive; None when the next one is late."""
    assert process.stdout is not None, "started with a pipe"
    descriptor, buffer = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        end = time.monotonic() + patience.seconds
        while True:
            if not selector.select(max(0.0, end - time.monotonic())):
                yield None
                return
            part = os.read(descriptor, 1 << 16)
            if not part:
                return
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                yield json.loads(line)
            end = time.monotonic() + patience.seconds
