"""Starts a process for each parser, watches it, and collects the verdicts of its inputs.

The processes are forks of a server that has imported all parsers; with a Paddle for GPUs they are
new ones, since CUDA does not survive a fork.
"""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fuzzing.child import Task, main, size_of
from fuzzing.guard import ACCEPTED, REFUSED, Verdict
from fuzzing.parser import PARSERS, SHARES, Files

_TOOLS = Path(__file__).resolve().parents[1]
_HAS_CUDA = any(True for _ in metadata.distributions(name="paddlepaddle-gpu"))
_CONTEXT: Any = multiprocessing.get_context("spawn" if _HAS_CUDA else "forkserver")
# The last one reads the fonts of the machine.
_MODULES = sorted({target.partition(":")[0] for target in PARSERS.values()})
_CONTEXT.set_forkserver_preload(["fuzzing.child", *_MODULES, "matplotlib.font_manager"])
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

    def show(self, verdict: Verdict, files: Files) -> None:
        """Take files with the fault, unless smaller ones are known. None are sent for others."""
        if files and size_of(files) <= size_of(self.files):
            self.details, self.files = verdict.details, files


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

    def add(self, verdict: Verdict, files: Files) -> None:
        what = verdict.what
        self.inputs += 1
        self.slowest = max(self.slowest, verdict.seconds)
        self.largest = max(self.largest, verdict.mebibytes)
        self.accepted += what == ACCEPTED
        self.refused += what == REFUSED
        if what in self.escapes:
            self.escapes[what].count += 1
            self.escapes[what].show(verdict, files)
        elif verdict.is_escape:
            self.escapes[what] = Escape(what, verdict.details, files)


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
    log, empty = place / "stderr", place / "empty"
    empty.mkdir(exist_ok=True)
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=main, args=(task, sender, log, empty), daemon=True)
    with _environment():
        process.start()
    sender.close()
    begun, patience, is_late, is_done = None, float(_START_SECONDS), False, False
    with suppress(EOFError):
        while not is_late:
            if not receiver.poll(patience):
                is_late = True
                process.kill()
                break
            kind, *values = receiver.recv()
            if kind == "begin":
                (begun,), patience = values, task.seconds + _GRACE_SECONDS
            elif kind == "done":
                tally.add(*values)
                begun, patience = None, float(_START_SECONDS)
            elif kind == "shrunk":
                tally.escapes[values[0].what].show(*values)
            # All inputs are tried before one is shrunk.
            is_done = is_done or kind in ("shrunk", "end")
    process.join()
    if is_done:
        return None
    said = log.read_text(errors="replace") if log.exists() else ""
    said = said if len(said) < 4000 else f"{said[:2000]}\n...\n{said[-2000:]}"
    if begun is None:
        how = f"was killed after {patience:g} s of silence" if is_late else "ended"
        raise RuntimeError(
            f"{task.target}: its process {how} without an input's doing, with code "
            f"{process.exitcode}: the valid files are not accepted, or no inputs could be made; "
            f"it says:\n{said}"
        )
    what = f"slow: over {task.seconds:g} s" if is_late else f"died with code {process.exitcode}"
    files = {p.name: p.read_bytes() for p in Path(task.folder).iterdir() if p.is_file()}
    tally.add(Verdict(what, said, task.seconds), files)
    return begun


@contextmanager
def _environment() -> Iterator[None]:
    """Environment variables of the server and the processes, which inherit those of this one."""
    kept = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(_TOOLS), str(_TOOLS.parent)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
