"""The process that tries the inputs of one parser; `campaign` starts it and watches it.

It sends each input that it begins, and the verdict. Inputs follow from the seed alone, so a new
process continues after the input that killed the previous one.
"""

import gc
import logging
import os
import warnings
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzzing.guard import Guard
from fuzzing.parser import Files, make_parser


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


def files_in(folder: Path) -> Files:
    """Files of a folder and of those in it, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def main(task: Task, sender: Connection, log: Path, directory: Path) -> None:
    """Try all inputs.

    Args:
        sender: of `("begin", number)` and `("done", verdict, files)` for every input, with the
            files of escapes alone; then of `("end",)`.
        log: file for the process's output.
        directory: an empty folder to work in.
    """
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    # Hypothesis collects what is not frozen.
    gc.freeze()
    os.chdir(directory)
    os.environ["MPLCONFIGDIR"] = str(directory.with_name("matplotlib"))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(directory.with_name("hypothesis"))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder, limits = task.folder, task.limits
    parser = make_parser(task.target, folder)
    valid = files_in(folder)
    # Imports and caches of the first call do not count.
    parser.parse()
    mebibytes = min(limits.mebibytes, parser.mebibytes)
    guard = Guard(folder, parser.named, limits.seconds, mebibytes)
    guard.limit_memory()
    numbers = count()

    @seed(limits.seed)
    @settings(
        max_examples=limits.inputs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck.__members__.values()],
    )
    @given(parser.inputs)
    def try_all(files: Files) -> None:
        if (number := next(numbers)) < task.first:
            return
        for name, content in files.items():
            (folder / name).write_bytes(content)
        sender.send(("begin", number))
        verdict = guard.judge(parser.parse)
        for name in files:
            if name in valid:
                (folder / name).write_bytes(valid[name])
            else:
                (folder / name).unlink(missing_ok=True)
        sender.send(("done", verdict, files if verdict.is_escape else {}))

    try_all()
    sender.send(("end",))
