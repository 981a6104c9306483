"""Processes that prepare batches. They import NumPy and this package's data code, never Paddle."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.work_board import AtWork, WorkBoard, own_line

# Bad samples in a row after which a batch is given up: the data or a setting is wrong then, and
# decoding all of it to find out could take hours.
MAX_BAD_IN_A_ROW = 1000

# For workers to end the sample that they are at.
_CLOSE_S = 2.0
# Between two looks at whether all workers are there; most deaths the executor notices itself.
_LOOK_S = 1.0
_LEFT_TO_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What this process is at; a worker writes it where the main process sees it.
_line = own_line()

Sample = dict[str, np.ndarray]
# Takes samples, or for packed rows the samples of each.
Collator = Callable[[Sequence[Any]], Any]


class SampleSource(Protocol):
    """What a loader needs of a dataset. It must pickle, and not be defined in `__main__`."""

    on_bad_sample: str
    skipped: Counter[str]
    fingerprint: int

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...


@runtime_checkable
class DrawsByEpoch(Protocol):
    """A dataset whose samples have something drawn anew in every epoch."""

    def in_epoch(self, epoch: int) -> SampleSource:
        """Its samples as they are in that epoch."""


@runtime_checkable
class FromFiles(Protocol):
    """A dataset whose samples stand in files."""

    files: Sequence[Any]

    def place(self, number: int) -> str:
        """Where a sample stands: `file:line`."""


@runtime_checkable
class KnowsContents(Protocol):
    """A dataset whose fingerprint covers what stands in its files.

    Attributes:
        contents: file, hash of its lines and hash of the sizes of its images and videos, of each.
        positions_fingerprint: without contents, as older checkpoints have it.
    """

    contents: Sequence[tuple[str, str, str]]
    positions_fingerprint: int


class LoadedBatch(NamedTuple):
    """A collated batch, or None where every sample was left out; and what was skipped, by kind."""

    batch: dict[str, Any] | None
    skipped: Counter[str]


def load_batch(
    dataset: SampleSource, collator: Collator, numbers: np.ndarray, replace_bad: bool, epoch: int
) -> LoadedBatch:
    """Load and collate the samples with these numbers, as they are in this epoch.

    Where the dataset says that bad samples are skipped, one is replaced by the next good sample in
    file order (`replace_bad`, so that the batch keeps its size) or left out.

    Raises:
        BadSampleError: a bad sample that is not to be skipped, or too many of them in a row.
    """
    if isinstance(dataset, DrawsByEpoch):
        dataset = dataset.in_epoch(epoch)
    skipped: Counter[str] = Counter()
    samples = []
    for number in numbers.tolist():
        attempts = min(len(dataset), MAX_BAD_IN_A_ROW) if replace_bad else 1
        for step in range(attempts):
            tried = (number + step) % len(dataset)
            _line.sample = tried
            try:
                samples.append(dataset[tried])
                break
            except BadSampleError as error:
                if dataset.on_bad_sample == "fail":
                    raise
                skipped[error.kind] += 1
                last_error = error
        else:
            if replace_bad:
                raise BadSampleError(
                    last_error.kind,
                    f"{attempts} samples in a row are bad, so none was found to replace one; the "
                    f"last is: {last_error.reason}",
                    last_error.place,
                )
    _line.sample = None
    return LoadedBatch(collator(samples) if samples else None, skipped)


def load_packed_batch(
    dataset: SampleSource, collator: Collator, rows: Sequence[np.ndarray], max_length: int
) -> LoadedBatch:
    """Load and collate rows of several samples; a bad sample is left out of its row.

    Raises:
        BadSampleError: a bad sample that is not to be skipped.
        RuntimeError: the samples of a row have grown since they were measured.
    """
    skipped: Counter[str] = Counter()
    loaded = []
    for numbers in rows:
        samples = []
        for number in numbers.tolist():
            _line.sample = number
            try:
                samples.append(dataset[number])
            except BadSampleError as error:
                if dataset.on_bad_sample == "fail":
                    raise
                skipped[error.kind] += 1
        length = sum(len(sample["input_ids"]) for sample in samples)
        if length > max_length:
            raise RuntimeError(
                f"samples {numbers.tolist()} were measured to fit a row of {max_length} tokens "
                f"and have {length}: images or videos changed under the same name; delete the "
                ".lengths-*.npz file beside the data"
            )
        loaded.append(samples)
    _line.sample = None
    return LoadedBatch(collator(loaded), skipped)


def sample_at_work() -> int | None:
    """The sample that this process itself prepares, from any of its threads."""
    return _line.sample


class WorkerPool:
    """Worker processes, started when they are first needed.

    Attributes:
        num_jobs: jobs submitted so far; they are numbered in their order.
    """

    def __init__(self, dataset: SampleSource, collator: Collator | None, num_workers: int):
        # "spawn": a forked copy of a process with Paddle's threads in it can hang.
        context = multiprocessing.get_context("spawn")
        self.num_jobs = 0
        self._board = WorkBoard(num_workers, context)
        self._changing, self._is_broken = threading.Lock(), False
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(dataset, collator, self._board),
        )
        # Kept here: the executor forgets them when it is shut down.
        self._results, self._processes = self._executor._result_queue, self._executor._processes
        threading.Thread(target=_look_after, args=(weakref.ref(self),), daemon=True).start()

    def submit(self, load: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Have a worker run `load(dataset, collator, *arguments)`.

        Raises:
            BrokenProcessPool: a worker died.
        """
        with self._changing, _main_script_hidden(), _signals_held_back():
            if self._is_broken:
                raise BrokenProcessPool("a worker died")
            future = self._executor.submit(_load_in_worker, self.num_jobs, load, *arguments)
        self.num_jobs += 1
        return future

    def at_work(self) -> list[AtWork]:
        """What each worker is at, from any thread; those that have started."""
        return self._board.workers()

    def close(self) -> None:
        """Drop what is not begun, and end the workers; one that is stuck does not hold this up."""
        # The executor forgets its thread too.
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
        """End all workers, and the wait for what they send.

        A worker that is killed while it writes a result leaves half of one, and the lock that the
        others need for writing theirs. The executor then waits for the other half for ever, since
        the end to write to is open in this process too.
        """
        with self._changing:
            self._is_broken = True
            for process in list(self._processes.values()):
                process.kill()
            self._results._writer.close()


def _look_after(pool: "weakref.ref[WorkerPool]") -> None:
    """Break a pool that has lost a worker, unless the executor does."""
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
def _signals_held_back() -> Iterator[None]:
    """New processes begin and stay with these signals blocked, see `_end_when_told`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_state: tuple[SampleSource, Collator | None]


def _start_worker(dataset: SampleSource, collator: Collator | None, board: WorkBoard) -> None:
    global _worker_state, _line
    _worker_state, _line = (dataset, collator), board.take_line()
    for target in (_end_when_told, _end_with_parent):
        threading.Thread(target=target, daemon=True).start()


def _end_when_told() -> None:
    """Signals may reach the whole group; only SIGTERM from the main process counts, which so ends
    the other workers of a pool in which one died. All stay blocked."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        continue
    os._exit(128 + signal.SIGTERM)


def _end_with_parent() -> None:
    """A killed main process cannot close its pool; workers would wait for work forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _load_in_worker(job: int, load: Callable[..., Any], *arguments: Any) -> Any:
    _line.begin(job)
    return load(*_worker_state, *arguments)
