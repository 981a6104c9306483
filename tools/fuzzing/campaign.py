"""Starts a process for each parser, watches it, and collects and prints the verdicts of its inputs.

The processes are forks of a server that has imported all parsers; with a Paddle for GPUs they are
new ones, since CUDA does not survive a fork.
"""

import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzzing.child import Limits, Task, files_in, main
from fuzzing.guard import ACCEPTED, REFUSED, Verdict, waited
from fuzzing.parser import PARSERS, SHARES, Files

_TOOLS = Path(__file__).resolve().parents[1]
_HAS_CUDA = any(True for _ in metadata.distributions(name="paddlepaddle-gpu"))
_CONTEXT: Any = multiprocessing.get_context("spawn" if _HAS_CUDA else "forkserver")
# The last one reads the fonts of the machine.
_MODULES = sorted({target.partition(":")[0] for target in PARSERS.values()})
_CONTEXT.set_forkserver_preload(["fuzzing.child", *_MODULES, "matplotlib.font_manager"])
_START_SECONDS = 180.0
# Grace in seconds beyond an input's time limit before the process is killed.
_GRACE_SECONDS = 2
# Process deaths after which a parser is given up.
_MOST_DEATHS = 5
# Writing an input to a busy disk takes longer than parsing it.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_HEAD = f"{'parser':<18}{'inputs':>8}{'accepted':>10}{'refused':>9}{'escaped':>9}{'slowest':>11}"
_MOST_SHOWN = 400
_OUTSIDE = ("outside.png", "outside.json", "outside.safetensors")


@dataclass
class Escape:
    """A fault that was found.

    Attributes:
        what: see `fuzzing.guard.Verdict`.
        count: number of inputs with the fault.
        files: files of the smallest of them.
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

    def add(self, verdict: Verdict, files: Files) -> None:
        what = verdict.what
        self.inputs += 1
        self.slowest = max(self.slowest, verdict.seconds)
        self.largest = max(self.largest, verdict.mebibytes)
        self.accepted += what == ACCEPTED
        self.refused += what == REFUSED
        if not verdict.is_escape:
            return
        if known := self.escapes.get(what):
            known.count += 1
            if sum(map(len, files.values())) < sum(map(len, known.files.values())):
                known.details, known.files = verdict.details, files
        else:
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
    limits = replace(limits, inputs=max(1, round(limits.inputs * SHARES.get(name, 1))))
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_IN_MEMORY) as place:
        for _ in range(_MOST_DEATHS):
            folder = Path(place) / "inputs"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            # Next to it are files that no input may open.
            for outside in _OUTSIDE:
                (folder.parent / outside).write_bytes(b"{}")
            task = Task(PARSERS.get(name, name), folder, limits, first)
            killer = _run_child(task, tally, Path(place))
            if killer is None:
                tally.is_whole = True
                break
            first = killer + 1
    return tally


def _run_child(task: Task, tally: Tally, place: Path) -> int | None:
    """Add the verdicts of a process; return the number of the input that ended it, if any."""
    log, empty, seconds = place / "stderr", place / "empty", task.limits.seconds
    empty.mkdir(exist_ok=True)
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=main, args=(task, sender, log, empty), daemon=True)
    with _environment():
        process.start()
    sender.close()
    begun, patience, is_late, kind = None, _START_SECONDS, False, ""
    with suppress(EOFError):
        while kind != "end":
            if is_late := _is_silent(receiver, process.pid, patience):
                process.kill()
                break
            kind, *values = receiver.recv()
            if kind == "begin":
                (begun,), patience = values, seconds + _GRACE_SECONDS
            elif kind == "done":
                tally.add(*values)
                begun, patience = None, _START_SECONDS
    process.join()
    if kind == "end":
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
    what = f"slow: over {seconds:g} s" if is_late else f"died with code {process.exitcode}"
    tally.add(Verdict(what, said, seconds), files_in(task.folder))
    return begun


def _is_silent(receiver: Connection, process: int, seconds: float) -> bool:
    """Whether a process says nothing for so many seconds in which it could run."""
    begin = time.monotonic() - waited(process)
    while not receiver.poll(seconds):
        if time.monotonic() - waited(process) - begin >= seconds:
            return True
    return False


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


def run_all(names: Sequence[str], limits: Limits, save: Path | None = None) -> int:
    """Try all parsers one after the other and print the outcomes.

    Args:
        save: folder for the smallest input of each fault.

    Returns:
        1 if an input escaped or was not tried; otherwise 0.
    """
    print(f"{_HEAD}{'memory':>12}", flush=True)
    is_good = True
    for name in names:
        tally = fuzz(name, limits)
        escaped = sum(escape.count for escape in tally.escapes.values())
        total = max(tally.inputs, 1)
        print(
            f"{name:<18}{tally.inputs:>8}{tally.accepted / total:>10.0%}"
            f"{tally.refused / total:>9.0%}{escaped:>9}{tally.slowest:>9.2f} s"
            f"{tally.largest:>8.0f} MiB",
            flush=True,
        )
        for number, escape in enumerate(tally.escapes.values(), start=1):
            print(described(escape), flush=True)
            if save is not None:
                folder = save / f"{name}-{number}"
                folder.mkdir(parents=True, exist_ok=True)
                for file, content in escape.files.items():
                    (folder / re.sub(r"[^\w.-]", "_", file)).write_bytes(content)
        if not tally.is_whole:
            print("  given up: too many inputs ended the process", flush=True)
        is_good = is_good and tally.is_whole and not tally.escapes
    return 0 if is_good else 1


def described(escape: Escape) -> str:
    """A fault, its count, its traceback and the smallest input."""
    lines = [f"  {escape.what}, {escape.count} inputs"]
    lines += [f"    | {text}" for text in escape.details.rstrip().splitlines()[-14:]]
    for name, content in escape.files.items():
        shown = repr(content)[1:]
        rest = f"... ({len(content)} bytes)" if len(shown) > _MOST_SHOWN else ""
        lines.append(f"    {name}: {shown[:_MOST_SHOWN]}{rest}")
    return "\n".join(lines)
