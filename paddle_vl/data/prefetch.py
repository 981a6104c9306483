"""What loaders share: batches that worker processes prepare ahead, and the wait for them."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.worker_pool import (
    FromFiles,
    SampleSource,
    WorkerPool,
    WorkerProgress,
    current_sample,
)

# Interval between calls of `while_waiting`.
_CALL_S = 0.2
_SHOWN_SAMPLES = 8
Loaded = TypeVar("Loaded")
Own = TypeVar("Own", bound="PrefetchingLoader")


def refuse_changes(problems: Sequence[str], what: str) -> None:
    """Raise a ValueError that names what differs from a saved position in the data.

    Args:
        what: `samples` or `documents`.
    """
    if problems:
        raise ValueError(
            f"cannot continue in the data: {'; '.join(problems)}. The {what} or their order would "
            "differ; restore the data and settings of the run, or start a new one"
        )


class PendingBatch(NamedTuple):
    """A batch that was requested and not yet returned.

    Attributes:
        epoch, number: its epoch and its place in the epoch.
        samples: its sample numbers.
        job: its number among the jobs of the workers, None where this process prepares it.
    """

    epoch: int
    number: int
    samples: list[int]
    job: int | None = None


class PrefetchingLoader(ABC, Generic[Loaded]):
    """An iterator over batches, prepared by worker processes or by this one, whose position can be
    saved.

    Args:
        num_workers: worker processes; 0 prepares batches in this process.

    Attributes:
        rank, size: data-parallel rank and world size.
        epoch, batches_consumed: place in the data: `batches_consumed` of `len(self)` of that epoch
            were returned.
        while_waiting: called repeatedly while workers prepare the next batch. An exception from it
            ends the wait; the following `next` waits for the same batch again.
    """

    while_waiting: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, num_workers: int, rank: int, size: int):
        self._num_workers, self.rank, self.size = num_workers, rank, size
        self._pools: list[WorkerPool] = []
        # Requested batches, the next one first, and the last one that `next` waited for.
        self._pending: deque[tuple[PendingBatch, Future[Loaded]]] = deque()
        self._awaited: PendingBatch | None = None

    epoch: Any
    batches_consumed: Any

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __next__(self) -> dict[str, Any]: ...

    @property
    @abstractmethod
    def skipped(self) -> dict[str, int]:
        """Bad samples left out, by kind of fault."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Position after the last returned batch; JSON values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        """Continue from a position, with the batches that an uninterrupted run would get.

        Args:
            batches: how many the run had used, if known.

        Raises:
            ValueError: data or settings differ from those of the state, every difference is named;
                or it is no position in them.
        """

    @abstractmethod
    def waiting_for(self) -> str:
        """Description of the batch that `next` waits for and who prepares it; thread-safe."""

    @abstractmethod
    def _request(self) -> None:
        """Submit batches to the workers up to the prefetch limit; the next one is the first."""

    @abstractmethod
    def _name_of_next(self) -> str:
        """The next batch, for messages: `batch 3 of epoch 0`."""

    def _request_ahead(self) -> None:
        """Give the workers work while the batch that they made is used."""
        if self._num_workers:
            # The next wait tells of a worker that died.
            with suppress(BrokenProcessPool):
                self._request()

    def _from_workers(self) -> Loaded:
        """The next batch.

        Raises:
            BadSampleError: a bad sample that is not skipped.
            RuntimeError: a worker process died.
        """
        try:
            self._request()
            self._awaited, future = self._pending[0]
            while not wait([future], _CALL_S).done:
                self.while_waiting()
            loaded = future.result()
            self._pending.popleft()
            return loaded
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                f"a data worker process died while preparing {self._name_of_next()}. Its own "
                "message, if any, is above; without one it was most likely killed for memory: "
                "lower data.num_workers or data.prefetch_batches. data.num_workers=0 prepares "
                "batches in this process"
            ) from error
        except (BadSampleError, RuntimeError) as error:
            self.close()
            # Drop the pool's frames: the command line classifies an error by its last frame.
            raise error.with_traceback(None) from error.__cause__
        except BaseException:
            self.close()
            raise

    def _drop_pending(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the worker processes. The next batch starts new ones."""
        for pool in self._pools:
            pool.close()
        self._pools = []
        self._drop_pending()

    def __iter__(self: Own) -> Own:
        return self

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def describe_wait(
    batch: PendingBatch,
    dataset: SampleSource,
    workers: Sequence[WorkerProgress] | None,
    rank: int | None = None,
) -> str:
    """Names the batch, its samples, and the process that prepares it.

    Args:
        workers: progress of the workers; None where this process prepares the batch.
        rank: data-parallel rank, None if there is only one.
    """
    shown = [_place(dataset, number) for number in batch.samples[:_SHOWN_SAMPLES]]
    if more := len(batch.samples) - len(shown):
        shown.append(f"{more} more")
    text = f"batch {batch.number} of epoch {batch.epoch}"
    text += "" if rank is None else f" of data-parallel rank {rank}"
    text += f", made from {', '.join(shown)}"
    if isinstance(dataset, FromFiles) and dataset.files:
        text += f" (data: {', '.join(map(str, dataset.files))})"
    if workers is None:
        at = _at(dataset, current_sample())
        return f"{text}; this process prepares it itself (data.num_workers is 0) and {at}"
    owners = [worker for worker in workers if worker.job == batch.job]
    if owners:
        return f"{text}; {_worker(dataset, owners[0])}"
    others = "; ".join(_worker(dataset, worker) for worker in workers)
    return f"{text}; no worker is at it: {others or 'none has started'}"


def _worker(dataset: SampleSource, worker: WorkerProgress) -> str:
    at = "has had no batch yet" if worker.job is None else _at(dataset, worker.sample)
    return f"worker {worker.worker} (process {worker.pid}) {at}"


def _at(dataset: SampleSource, sample: int | None) -> str:
    return "is between samples" if sample is None else f"is at {_place(dataset, sample)}"


def _place(dataset: SampleSource, number: int) -> str:
    return dataset.place(number) if isinstance(dataset, FromFiles) else f"sample {number}"
