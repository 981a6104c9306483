"""What each process of a profile leaves for whoever supervises it: that it began, and how it ended.

A launcher ends all processes when one fails, with an exit code of its own; a process that is killed
says nothing. Files tell these apart: one that only says "running" belongs to a process that had no
chance to write another.
"""

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paddle_vl.profile.memory import GB

State = Literal["running", "done", "oom", "failed"]
_LONGEST = 400
# How allocators say it: Paddle's, the GPU driver's through it, and the C++ library's.
_NO_MEMORY = re.compile(r"out of memory|ResourceExhausted|bad_alloc|fail(ed)? to alloc", re.I)
_SUMMARY = re.compile(r"Error Message Summary:\s*-+\s*(.+)", re.S)


class MemoryLimitError(RuntimeError):
    """A process uses more memory than the profile's setting allows."""

    def __init__(self, place: str, used: int, limit: int):
        super().__init__(
            f"{place} uses {used / GB:.2f} GB of memory, above the limit of {limit / GB:.2f} GB"
        )


class Word(NamedTuple):
    """A process's last word: when, in seconds of `time.time()`, and in which state it was."""

    rank: int
    pid: int
    state: State
    detail: str
    time: float


@contextmanager
def leaving_word(folder: Path, rank: int) -> Iterator[None]:
    """Write into the folder that this process runs, and at the block's end how it went."""
    file = folder / f"rank-{rank}.json"
    _write(file, rank, "running", "")
    try:
        yield
    except BaseException as error:
        _write(file, rank, "oom" if is_out_of_memory(error) else "failed", short_message(error))
        raise
    _write(file, rank, "done", "")


def read_words(folder: Path) -> list[Word]:
    """Of all processes that have written so far, by rank."""
    words = [Word(**_read(path)) for path in folder.glob("rank-*.json")]
    return sorted(words)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up, whoever raised it."""
    if isinstance(error, MemoryError | MemoryLimitError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Paddle raises its allocators' errors as one of these.
    is_paddles = isinstance(error, RuntimeError | SystemError)
    return is_paddles and _NO_MEMORY.search(str(error)) is not None


def short_message(error: BaseException) -> str:
    """Kind and text of an exception in one line, without Paddle's list of C++ calls."""
    text = str(error)
    summary = _SUMMARY.search(text)
    words = " ".join((summary.group(1) if summary else text).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST]


def _write(file: Path, rank: int, state: State, detail: str) -> None:
    word = Word(rank, os.getpid(), state, detail, time.time())
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(word._asdict()), encoding="utf-8")
    partial.replace(file)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
