"""Worker processes that load and collate batches, and their progress.

Workers import NumPy and this package's data code, never Paddle.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from paddle_vl.threads import Watch

# Consecutive bad samples after which a batch fails, instead of decoding wrong data for hours.
MAX_BAD_IN_A_ROW = 1000

# Seconds that `close` gives workers to finish their current sample.
_CLOSE_S = 2.0
# Jobs in flight per worker of `results_in_order`, which bounds its memory.
_AHEAD = 4
_LEFT_TO_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


# A process has two cells for its progress: its last job and its current sample. No lock: each has
# one writer.
_JOB, _SAMPLE, _CELLS = range(3)
_NOTHING, _NOT_STARTED = -1, -2
# A worker replaces them by cells that the main process can read.
_cells: Any = [_NOTHING] * _CELLS


def current_sample() -> int | None:
    """Number of the sample that this process prepares, for any of its threads."""
    return None if _cells[_SAMPLE] == _NOTHING else _cells[_SAMPLE]


def note_sample(number: int | None) -> None:
    """Say which sample this process prepares; None for none, as while collating."""
    _cells[_SAMPLE] = _NOTHING if number is None else number


class _Warning(NamedTuple):
    logger: str
    about: str
    text: str


_warned: set[str] = set()
_warning = threading.Lock()
# Warnings of a worker that are sent with its next result; None in other processes.
_to_send: list[_Warning] | None = None


def warn_once(logger: logging.Logger, about: str, text: str) -> None:
    """Warn of a thing, such as a data file, once for this process and all its workers."""
    with _warning:
        if about in _warned:
            return
        _warned.add(about)
    if _to_send is None:
        logger.warning(text)
    else:
        _to_send.append(_Warning(logger.name, about, text))


class _Worker(NamedTuple):
    process: BaseProcess
    jobs: Connection
    results: Connection
    cells: Any


class WorkerPool:
    """Worker processes. Threads of this process give them jobs and take the results.

    Args:
        shared: first arguments of every job; they are pickled once per worker.
        first: number of the first worker, in messages.

    Attributes:
        num_jobs: jobs submitted so far; a job's number is its place in this order.
    """

    def __init__(self, shared: Sequence[Any], num_workers: int, first: int = 0):
        # "spawn": a fork of a process in which Paddle runs threads can hang.
        context = multiprocessing.get_context("spawn")
        self.num_jobs, self._first, self._is_broken = 0, first, False
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        with _starting():
            for _ in range(num_workers):
                # Two pipes of one way each, which are faster than one of both.
                their_jobs, jobs = context.Pipe(duplex=False)
                results, their_results = context.Pipe(duplex=False)
                cells = context.RawArray("q", [_NOT_STARTED] * _CELLS)
                process = context.Process(
                    target=_work, args=(their_jobs, their_results, shared, cells)
                )
                process.start()
                # So that the pipes end with the worker.
                their_jobs.close()
                their_results.close()
                self._workers.append(_Worker(process, jobs, results, cells))
                self._idle.put(self._workers[-1])
        # One more thread holds a job for the worker that is ready first.
        self._threads = ThreadPoolExecutor(num_workers + 1, "data-worker")
        # Before the interpreter's exit waits for its child processes.
        self._at_exit = Finalize(self, _kill, (self._workers,), exitpriority=1)

    def submit(self, load: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run `load(*shared, *arguments)` in a worker.

        Raises:
            BrokenProcessPool: a worker died.
        """
        self._check_alive()
        future = self._threads.submit(self._run, self.num_jobs, load, *arguments)
        self.num_jobs += 1
        return future

    def progress(self) -> list[WorkerProgress]:
        """Progress of every worker that has started; may be called from any thread."""
        return [
            WorkerProgress(number, process.pid or 0, *(None if n == _NOTHING else n for n in cells))
            for number, (process, *_, cells) in enumerate(self._workers, self._first)
            if cells[_JOB] != _NOT_STARTED
        ]

    def close(self) -> None:
        """Cancel jobs that have not begun and end the workers; a stuck one is killed."""
        self._is_broken = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _CLOSE_S
        for _ in self._workers:
            with suppress(Empty):
                self._idle.get(timeout=max(0.0, deadline - time.monotonic())).jobs.close()
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._at_exit()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads.shutdown()

    def _run(self, job: int, load: Callable[..., Any], *arguments: Any) -> Any:
        worker = self._idle.get()
        try:
            self._check_alive()
            worker.jobs.send((job, load, arguments))
            content = worker.results.recv_bytes()
        except (EOFError, OSError) as error:
            self._is_broken = True
            raise BrokenProcessPool("a worker died") from error
        finally:
            self._idle.put(worker)
        result, told, warnings = ForkingPickler.loads(content)  # type: ignore[attr-defined]
        for name, about, text in warnings:
            warn_once(logging.getLogger(name), about, text)
        if told is None:
            return result
        raise result from RuntimeError(f"in a data worker:\n{told}")

    def _check_alive(self) -> None:
        if self._is_broken:
            raise BrokenProcessPool("a worker died")


def results_in_order(
    load: Callable[..., Any], shared: Any, jobs: Iterable[Sequence[Any]], num_workers: int
) -> Generator[Any, None, None]:
    """Results of `load(shared, *job)` for all jobs, in their order.

    Args:
        num_workers: worker processes; 0 runs the jobs in this one.
    """
    if num_workers == 0:
        for job in jobs:
            yield load(shared, *job)
        return
    pool = WorkerPool([shared], num_workers)
    pending: deque[Future[Any]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(load, *job))
            if len(pending) > _AHEAD * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.close()


@contextmanager
def _starting() -> Iterator[None]:
    """New processes do not import the main script, as "spawn" otherwise does, and never get some
    signals.

    The script may import Paddle at its top, or lack the `if __name__ == "__main__"` guard. The
    signals may reach a whole process group: the main process ends its workers.
    """
    main = sys.modules["__main__"]
    hidden = {key: main.__dict__.pop(key) for key in ("__file__", "__spec__") if hasattr(main, key)}
    main.__spec__ = None
    # Its first start lets SIGINT and SIGTERM through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        main.__dict__.update(hidden)


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.join()


def _work(jobs: Connection, results: Connection, shared: Sequence[Any], cells: Any) -> None:
    """Do the jobs that come through a pipe until it is closed."""
    global _cells, _to_send
    cells[:] = [_NOTHING] * _CELLS
    warnings: list[_Warning] = []
    _cells, _to_send = cells, warnings
    Watch(_exit_with_parent, "exit-with-parent").start()
    with suppress(EOFError, OSError):
        while True:
            job, load, arguments = jobs.recv()
            cells[:] = [job, _NOTHING]
            told = None
            try:
                content = ForkingPickler.dumps((load(*shared, *arguments), None, warnings))
            except BaseException as error:
                told = traceback.format_exc()
                content = ForkingPickler.dumps((error, told, warnings))
            results.send_bytes(content)
            warnings.clear()
            # Not kept while waiting for the next job.
            del content


def _exit_with_parent() -> None:
    """A worker that is at a sample would notice only later that its main process was killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
