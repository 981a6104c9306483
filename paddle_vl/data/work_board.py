"""Which sample each process is at that prepares batches, for another to read while it works."""

import os
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from typing import NamedTuple

_NOTHING = -1
_PROCESS, _JOB, _SAMPLE, _LENGTH = range(4)


class Line:
    """What one process writes about itself."""

    def __init__(self, cells: memoryview | list[int]):
        self._cells = cells
        self._cells[_PROCESS] = os.getpid()

    def begin(self, job: int) -> None:
        """A job has reached the process."""
        self._cells[_SAMPLE] = _NOTHING
        self._cells[_JOB] = job

    @property
    def sample(self) -> int | None:
        """The sample it is at; None between samples, as when it puts them together."""
        sample = self._cells[_SAMPLE]
        return None if sample == _NOTHING else sample

    @sample.setter
    def sample(self, number: int | None) -> None:
        self._cells[_SAMPLE] = _NOTHING if number is None else number


def own_line() -> Line:
    """A line that only this process sees."""
    return Line([_NOTHING] * _LENGTH)


class AtWork(NamedTuple):
    """What a worker is at.

    Attributes:
        worker: its number.
        pid: of its process.
        job: number of the last job that reached it, None before the first.
        sample: the sample it is at, None where it is at none.
    """

    worker: int
    pid: int
    job: int | None
    sample: int | None


class WorkBoard:
    """Lines of all workers, in shared memory; no lock: each cell has one writer.

    It pickles on the way to a process that is being started, and only then.
    """

    def __init__(self, num_workers: int, context: BaseContext):
        self._cells = context.RawArray("q", [_NOTHING] * (_LENGTH * num_workers))
        self._taken = context.Value("i", 0)

    def take_line(self) -> Line:
        """The line of a worker that starts."""
        with self._taken.get_lock():
            worker = self._taken.value
            self._taken.value += 1
        begin = worker * _LENGTH
        return Line(memoryview(self._cells).cast("B").cast("q")[begin : begin + _LENGTH])

    def workers(self) -> list[AtWork]:
        """What each of them is at; those that have started."""
        cells: Sequence[int] = self._cells
        lines = [cells[i : i + _LENGTH] for i in range(0, len(cells), _LENGTH)]
        return [
            AtWork(worker, pid, *(None if cell == _NOTHING else cell for cell in rest))
            for worker, (pid, *rest) in enumerate(lines)
            if pid != _NOTHING
        ]
