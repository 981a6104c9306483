"""The process that tries the inputs of one parser; `campaign` starts it and watches it.

It sends each input that it begins, and the verdict. Inputs follow from the seed alone, so a new
process continues after the input that killed the previous one.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzzing.guard import Guard, Verdict
from fuzzing.parser import Files, make_parser

_SHRINK_SECONDS = 20
_SHRUNK_AT_MOST = 10


@dataclass(frozen=True)
class Limits:
    """Number of inputs, and the limits for one input."""

    inputs: int = 200
    seed: int = 0
    seconds: float = 5.0
    mebibytes: float = 1024.0


class Task(NamedTuple):
    """The task of a child process.

    Attributes:
        target: the parser, as `module:function`.
        first: number of the first input to try.
    """

    target: str
    folder: Path
    limits: Limits
    first: int = 0


class Trial:
    """A parser and its folder, for many inputs."""

    def __init__(self, task: Task, say: Callable[..., None]):
        self.task, self.folder, self.say = task, task.folder, say
        self.parser = make_parser(task.target, self.folder)
        self._valid = files_in(self.folder)
        # Imports and caches of the first call do not count.
        self.parser.parse()
        mebibytes = min(task.limits.mebibytes, self.parser.mebibytes)
        self.guard = Guard(self.folder, self.parser.named, task.limits.seconds, mebibytes)
        self.guard.limit_memory()

    def judge(self, number: int, files: Files) -> Verdict:
        """Write the files of an input, parse them, and restore the valid files."""
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        self.say("begin", number)
        verdict = self.guard.judge(self.parser.parse)
        for name in files:
            if name in self._valid:
                (self.folder / name).write_bytes(self._valid[name])
            else:
                (self.folder / name).unlink(missing_ok=True)
        return verdict

    def each(self, act: Callable[[int, Files], None]) -> None:
        """Call `act` with the number and files of every input; the inputs are always the same."""
        numbers = iter(range(1 << 60))

        @seed(self.task.limits.seed)
        @settings(
            max_examples=self.task.limits.inputs,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[*HealthCheck.__members__.values()],
            report_multiple_bugs=False,
        )
        @given(self.parser.inputs)
        def run(files: Files) -> None:
            act(next(numbers), files)

        run()

    def try_all(self) -> dict[str, int]:
        """Judge every input; return the first input of each fault.

        The files of an input are sent if no smaller one with its fault is known.
        """
        found: dict[str, int] = {}
        smallest: dict[str, int] = {}

        def act(number: int, files: Files) -> None:
            if number < self.task.first:
                return
            verdict = self.judge(number, files)
            size, what = size_of(files), verdict.what
            is_smaller = verdict.is_escape and size < smallest.get(what, size + 1)
            if is_smaller:
                found.setdefault(what, number)
                smallest[what] = size
            self.say("done", verdict, files if is_smaller else {})

        self.each(act)
        return found

    def shrink(self, what: str, first: int) -> None:
        """Report the smallest input with a fault that hypothesis finds within its time.

        Args:
            first: number of an input with the fault.
        """
        smallest: Files | None = None
        end = time.monotonic() + _SHRINK_SECONDS

        def act(number: int, files: Files) -> None:
            nonlocal smallest
            if number < first:
                return
            verdict = self.judge(number, files)
            is_same = verdict.what == what
            if is_same and (smallest is None or size_of(files) <= size_of(smallest)):
                smallest = files
                self.say("shrunk", verdict, files)
            if smallest is None or time.monotonic() > end:
                raise _EnoughError
            if is_same:
                raise _FoundError

        # The smallest input is known, whatever hypothesis raises.
        with suppress(Exception, _EnoughError):
            self.each(act)


class _FoundError(Exception):
    """Tells hypothesis to look for a smaller input."""


class _EnoughError(BaseException):
    """Ends the search of hypothesis."""


def files_in(folder: Path) -> Files:
    """Files of a folder and of those in it, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def size_of(files: Files) -> int:
    return sum(map(len, files.values()))


def main(task: Task, sender: Connection, log: Path, directory: Path) -> None:
    """Try all inputs, then look for the smallest with each fault.

    Args:
        sender: of tuples of a kind (`begin`, `done`, `shrunk`, `end`) and its values.
        log: file for the process's output.
        directory: an empty folder to work in.
    """
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.chdir(directory)
    os.environ["MPLCONFIGDIR"] = str(directory.with_name("matplotlib"))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(directory.with_name("hypothesis"))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    trial = Trial(task, lambda *message: sender.send(message))
    found = trial.try_all()
    for what, first in list(found.items())[:_SHRUNK_AT_MOST]:
        # Shrinking slow and memory-hungry inputs would take too long.
        if not what.startswith(("slow", "memory")):
            trial.shrink(what, first)
    sender.send(("end",))
