"""Worker processes that load and collate batches, and a shared table of their progress.

Workers import NumPy and this package's data code, never Paddle. Over 350 lines, since job, pool and
progress report change together.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paddle_vl.threads import Watch

# Consecutive bad samples after which a batch fails, instead of decoding wrong data for hours.
MAX_BAD_IN_A_ROW = 1000

# Seconds that `close` gives workers to finish their current sample.
_CLOSE_S = 2.0
# Interval between checks for dead workers; the executor notices most deaths itself.
_LOOK_S = 1.0
_LEFT_TO_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Sample = dict[str, np.ndarray]
# From a list of samples, for packed rows a list of lists, to a batch.
Collator = Callable[[Sequence[Any]], Any]


class SampleSource(Protocol):
    """A dataset for the loader. It must be picklable and not defined in `__main__`."""

    @property
    def on_bad_sample(self) -> str: ...

    @property
    def skipped(self) -> Counter[str]: ...

    @property
    def fingerprint(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...


@runtime_checkable
class DrawsByEpoch(Protocol):
    """A dataset with random draws that change with the epoch."""

    def in_epoch(self, epoch: int) -> SampleSource:
        """The dataset with the draws of that epoch."""
        ...


@runtime_checkable
class FromFiles(Protocol):
    """A dataset whose samples are lines of files."""

    files: Sequence[Any]

    def place(self, number: int) -> str:
        """Location of a sample: `file:line`."""
        ...


@runtime_checkable
class HasContents(Protocol):
    """A dataset whose fingerprint covers the contents of its files.

    Attributes:
        contents: per file its path, the hash of its lines, and the hash of the sizes of its images
            and videos.
        positions_fingerprint: fingerprint without contents, as older checkpoints store it.
    """

    contents: Sequence[tuple[str, str, str]]
    positions_fingerprint: int


class LoadedBatch(NamedTuple):
    """A collated batch, None if no sample was usable, and the skipped samples by kind of fault."""

    batch: dict[str, Any] | None
    skipped: Counter[str]


class WorkerProgress(NamedTuple):
    """Progress of a worker process.

    Attributes:
        worker: number of the worker.
        pid: its process id.
        job: number of its last job, None before the first.
        sample: number of its current sample, None between samples.
    """

    worker: int
    pid: int
    job: int | None
    sample: int | None


# A process has three cells for its progress: its pid, its last job and its current sample.
_PID, _JOB, _SAMPLE, _CELLS = range(4)
_NOTHING = -1
# A worker replaces them by cells that the main process can read.
_cells: Any = [_NOTHING] * _CELLS


class ProgressTable:
    """Progress of all workers in shared memory. No lock: each cell has one writer.

    It can be pickled only while a process is being started.
    """

    def __init__(self, num_workers: int, context: BaseContext):
        self._cells = context.RawArray("q", [_NOTHING] * (_CELLS * num_workers))
        self._taken = context.Value("i", 0)

    def take_cells(self) -> memoryview:
        """The cells of a worker that starts."""
        with self._taken.get_lock():
            begin = self._taken.value * _CELLS
            self._taken.value += 1
        cells = memoryview(self._cells).cast("B").cast("q")[begin : begin + _CELLS]
        cells[_PID] = os.getpid()
        return cells

    def workers(self) -> list[WorkerProgress]:
        """Progress of every worker that has started."""
        rows = [self._cells[i : i + _CELLS] for i in range(0, len(self._cells), _CELLS)]
        return [
            WorkerProgress(number, pid, *(None if cell == _NOTHING else cell for cell in rest))
            for number, (pid, *rest) in enumerate(rows)
            if pid != _NOTHING
        ]


def current_sample() -> int | None:
    """Number of the sample that this process prepares, for any of its threads."""
    sample = _cells[_SAMPLE]
    return None if sample == _NOTHING else sample


def note_sample(number: int | None) -> None:
    """Say which sample this process prepares; None for none, as while collating."""
    _cells[_SAMPLE] = _NOTHING if number is None else number


# Hashes of what was said once, shared by this process and its workers. No lock, as a killed worker
# would keep it: two processes may say the same at the same moment.
_MOST_SAID = 1024
_said: Any = None
_asked: set[str] = set()


def first_time(text: str) -> bool:
    """Whether neither this process nor one of its workers has asked for the text before."""
    if text in _asked:
        return False
    _asked.add(text)
    return _said is None or _is_unsaid(text)


def _is_unsaid(text: str) -> bool:
    number = zlib.crc32(text.encode(errors="surrogateescape")) + 1
    for place, other in enumerate(_said):
        if other in (0, number):
            _said[place] = number
            return other == 0
    return True


def _said_by_all() -> Any:
    """The hashes for workers; made with the first pool."""
    global _said
    if _said is None:
        _said = multiprocessing.get_context("spawn").RawArray("q", _MOST_SAID)
        for text in _asked:
            _is_unsaid(text)
    return _said


class WorkerPool:
    """Worker processes, started by the first job.

    Args:
        dataset, collator: first arguments of every job; they are pickled once per worker.

    Attributes:
        num_jobs: jobs submitted so far; a job's number is its place in this order.
    """

    def __init__(self, dataset: Any, collator: Collator | None, num_workers: int):
        # "spawn": a fork of a process in which Paddle runs threads can hang.
        context = multiprocessing.get_context("spawn")
        self.num_jobs = 0
        self._table = ProgressTable(num_workers, context)
        self._changing, self._is_broken = threading.Lock(), False
        # Any, since private attributes are used.
        self._executor: Any = ProcessPoolExecutor(
            num_workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(dataset, collator, self._table, _said_by_all()),
        )
        # The executor drops its own references at shutdown.
        self._results, self._processes = self._executor._result_queue, self._executor._processes
        Watch(_watch_pool, "worker-pool", (weakref.ref(self),)).start()

    def submit(self, load: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run `load(dataset, collator, *arguments)` in a worker.

        Raises:
            BrokenProcessPool: a worker died.
        """
        with self._changing, _main_script_hidden(), _signals_blocked():
            if self._is_broken:
                raise BrokenProcessPool("a worker died")
            future = self._executor.submit(_run_job, self.num_jobs, load, *arguments)
        self.num_jobs += 1
        return future

    def progress(self) -> list[WorkerProgress]:
        """Progress of every worker that has started; may be called from any thread."""
        return self._table.workers()

    def close(self) -> None:
        """Cancel jobs that have not begun and end the workers; a stuck one is killed."""
        # The executor drops its reference to the thread too.
        processes, thread = list(self._processes.values()), self._executor._executor_manager_thread
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _CLOSE_S
        while processes and (left := deadline - time.monotonic()) > 0:
            gone = connection.wait([process.sentinel for process in processes], left)
            processes = [process for process in processes if process.sentinel not in gone]
        self._break()
        if thread is not None:
            thread.join()

    def _has_lost_a_worker(self) -> bool:
        return bool(connection.wait([each.sentinel for each in list(self._processes.values())], 0))

    def _break(self) -> None:
        """Kill all workers and end the wait for their results.

        A worker that is killed while it writes a result leaves half of it in the pipe, and keeps
        the lock that the others need. The executor would wait for the other half for ever, because
        this process holds the pipe's writing end open too.
        """
        with self._changing:
            self._is_broken = True
            for process in list(self._processes.values()):
                process.kill()
            self._results._writer.close()


def results_in_order(
    load: Callable[..., Any],
    dataset: Any,
    jobs: Iterable[Sequence[Any]],
    num_workers: int,
    ahead: int = 4,
) -> Generator[Any, None, None]:
    """Results of `load(dataset, None, *job)` for all jobs, in their order.

    Args:
        num_workers: worker processes; 0 runs the jobs in this one.
        ahead: jobs in flight per worker, which bounds the memory.
    """
    if num_workers == 0:
        for job in jobs:
            yield load(dataset, None, *job)
        return
    pool = WorkerPool(dataset, None, num_workers)
    pending: deque[Future[Any]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(load, *job))
            if len(pending) > ahead * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.close()


def _watch_pool(pool: "weakref.ref[WorkerPool]") -> None:
    """Break a pool that lost a worker, if the executor has not done so by the next check."""
    was_lost = False
    while True:
        time.sleep(_LOOK_S)
        alive = pool()
        if alive is None or alive._is_broken:
            return
        is_lost = alive._has_lost_a_worker()
        if is_lost and was_lost:
            alive._break()
        was_lost = is_lost
        del alive


@contextmanager
def _main_script_hidden() -> Iterator[None]:
    """Keep new processes from importing the main script, as "spawn" otherwise does.

    The script may import Paddle at its top, or lack the `if __name__ == "__main__"` guard.
    """
    main = sys.modules["__main__"]
    hidden = {key: main.__dict__.pop(key) for key in ("__file__", "__spec__") if hasattr(main, key)}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started in the block inherit these signals as blocked, see `_exit_on_sigterm`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_state: tuple[Any, Collator | None]


def _start_worker(dataset: Any, collator: Collator | None, table: ProgressTable, said: Any) -> None:
    global _worker_state, _cells, _said
    _worker_state, _cells, _said = (dataset, collator), table.take_cells(), said
    for target in (_exit_on_sigterm, _exit_with_parent):
        Watch(target, target.__name__).start()


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM from the main process alone; signals may reach the whole process group.

    The executor sends it to the remaining workers of a pool in which one died.
    """
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        continue
    os._exit(128 + signal.SIGTERM)


def _exit_with_parent() -> None:
    """A killed main process cannot close its pool; workers would wait for jobs for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _run_job(job: int, load: Callable[..., Any], *arguments: Any) -> Any:
    _cells[_SAMPLE], _cells[_JOB] = _NOTHING, job
    return load(*_worker_state, *arguments)
