"""A profile in processes of its own, and how it ended: done, out of memory, out of time, or failed.

A profile that needs more memory than allowed must not crash the machine or other profiles. Between
steps its ranks stop by themselves, and within a step the launcher ends them. A rank that fails
leaves a file with the reason.
"""

import errno
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paddle_vl.parallel.launcher import launch
from paddle_vl.processes import Failure, Limits, MemoryLimitError, TimeLimitError

Status = Literal["ok", "oom", "failed", "timeout"]
_LONGEST = 400
# Messages of allocators: Paddle's, the GPU driver's through it, and the C++ library's.
_NO_MEMORY = re.compile(r"out of memory|ResourceExhausted|bad_alloc|fail(ed)? to alloc", re.I)
_SUMMARY = re.compile(r"Error Message Summary:\s*-+\s*(.+)", re.S)


class CellOutcome(NamedTuple):
    """How a profile ended, and why, in words."""

    status: Status
    detail: str = ""


@contextmanager
def reported_errors(folder: Path, rank: int) -> Iterator[None]:
    """Write an exception of the block to this rank's file."""
    file = _error_file(folder, rank)
    file.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        values = {
            "time": time.time(),
            "is_out_of_memory": is_out_of_memory(error),
            "message": short_message(error),
        }
        file.write_text(json.dumps(values), encoding="utf-8")
        raise


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
    arguments: Sequence[str],
    num_ranks: int,
    folder: Path,
    limits: Limits,
    variables: Mapping[str, str] = {},
) -> CellOutcome:
    """Run `paddle-vl ARGUMENTS` on ranks of its own within limits.

    Args:
        folder: for the ranks' output and errors, of which old ones are deleted.
        variables: see `paddle_vl.parallel.launcher.launch`.

    Returns:
        oom only where it is certain: a rank says so, or is above the limit.

    Raises:
        SystemExit: this process was asked to stop.
    """
    for rank in range(num_ranks):
        _error_file(folder, rank).unlink(missing_ok=True)
    failures = []
    try:
        code = launch(
            arguments,
            num_ranks,
            folder / "log",
            next_attempt=failures.append,
            limits=limits,
            is_quiet=True,
            variables=variables,
        )
    except TimeLimitError as error:
        return CellOutcome("timeout", str(error))
    except MemoryLimitError as error:
        return CellOutcome("oom", f"{error}, within a step")
    if failures:
        return _failed(failures[0], num_ranks, folder)
    if code:
        sys.exit(code)
    return CellOutcome("ok")


def _failed(failure: Failure, num_ranks: int, folder: Path) -> CellOutcome:
    errors: dict[int, dict[str, Any]] = {}
    for rank in range(num_ranks):
        if (file := _error_file(folder, rank)).exists():
            errors[rank] = json.loads(file.read_text(encoding="utf-8"))
    for rank, error in errors.items():
        if error["is_out_of_memory"]:
            return CellOutcome("oom", f"rank {rank}: {error['message']}")
    if failure.rank in errors:
        # The others fail soon after the first.
        rank = min(errors, key=lambda each: errors[each]["time"])
        return CellOutcome("failed", f"rank {rank}: {errors[rank]['message']}")
    return CellOutcome("failed", f"{failure}: {_last_line(folder / 'log', failure.rank)}")


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.error.json"


def _last_line(log_dir: Path, rank: int) -> str:
    """The last line of a rank's output that names an error; without any, the last line."""
    text = (log_dir / f"workerlog.{rank}").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:_LONGEST]
