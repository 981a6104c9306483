"""What loaders share: batches that worker processes prepare ahead, and the wait for them."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lane_share import CALL_S, LaneShare
from paddle_vl.data.worker_pool import WorkerPool, WorkerProgress, current_sample

Own = TypeVar("Own", bound="PrefetchingLoader")


class DataWaitLeftError(Exception):
    """A stop signal arrived while a step waited for its data."""


class NoBatchError(Exception):
    """All batches were requested."""


class PendingBatch(NamedTuple):
    """A batch that was requested and not yet returned.

    Attributes:
        name: for messages: `batch 3 of epoch 0`.
        pool: number of the pool that prepares it.
    """

    name: str
    pool: int = 0


class LoadedBatch(NamedTuple):
    """What was loaded.

    Attributes:
        batch: None if no sample was usable.
        more: skipped samples by kind of fault; of a mix of sources the states of the strands. JSON
            values, with numbers as keys too.
    """

    batch: dict[str, Any] | None
    more: dict[Any, Any]


# All ranks of a lane raise these as the one that reads.
_ERRORS = {each.__name__: each for each in (BadSampleError, DataWaitLeftError)}


class PrefetchingLoader(ABC):
    """An iterator over batches, prepared by worker processes or by this one, whose position can be
    saved.

    Attributes:
        rank, size: data-parallel rank and world size.
        epoch, batches_consumed: place in the data: `batches_consumed` of `len(self)` of that epoch
            were returned.
        while_waiting: called repeatedly while workers prepare the next batch. An exception from it
            ends the wait; the following `next` waits for the same batch again.
        what: the data is made of, for messages.
        share: with the other ranks of the data lane on this machine; None to read alone.
        own_rows: makes of the lane's batch this rank's, where they differ; None where they do not.
        target_sources: names of the sources whose target tokens its batches count.
    """

    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    what = "samples"
    share: LaneShare | None = None
    own_rows: Callable[[Any], Any] | None = None
    epoch: Any
    batches_consumed: Any

    def __init__(
        self,
        load: Callable[..., Any],
        data: Any,
        collator: Callable[..., Any],
        num_workers: int,
        prefetch_batches: int,
        rank: int,
        size: int,
        *,
        num_pools: int = 1,
    ):
        """
        Args:
            load: makes a batch of `data`, `collator` and the arguments of a job.
            num_workers: worker processes; 0 prepares batches in this process.
            prefetch_batches: batches requested ahead of use.
            num_pools: pools that the workers form; a job waits for a worker of its own pool.
        """
        self._load, self._shared = load, (data, collator)
        self._num_workers, self._num_pools = num_workers, num_pools
        self._max_pending, self.rank, self.size = prefetch_batches, rank, size
        self.target_sources: Sequence[str] = getattr(collator, "target_sources", ())
        self._pools: list[WorkerPool] = []
        # Requested batches, the next one first, with their number among the jobs of their pool; and
        # the one that `next` waited for last.
        self._pending: deque[tuple[PendingBatch, int, Future[Any]]] = deque()
        self._awaited: tuple[PendingBatch, WorkerPool | None, int] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __next__(self) -> Any: ...

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
    def _job(self, ahead: int) -> tuple[PendingBatch, tuple[Any, ...]]:
        """The batch so many behind the next one, and the arguments that load it.

        Raises:
            NoBatchError: there is none.
        """

    @abstractmethod
    def _place(self, sample: int) -> str:
        """Location of a sample, for messages."""

    def waiting_for(self) -> str:
        """Description of the batch that `next` waits for and who prepares it; thread-safe."""
        if self._awaited is None:
            return "no batch was requested"
        batch, pool, job = self._awaited
        if self.share is not None and not self.share.reads:
            return f"{self._named(batch)}; rank {self.share.reader} prepares it for this lane"
        return self._described(batch, None if pool is None else pool.progress(), job)

    def _described(
        self, batch: PendingBatch, workers: Sequence[WorkerProgress] | None, job: int
    ) -> str:
        """Names a batch, and the process that prepares it with its sample.

        Args:
            workers: progress of the workers; None where this process prepares the batch.
            job: its number among their jobs.
        """
        text = self._named(batch)
        if workers is None:
            own = self._at(current_sample())
            return f"{text}; this process prepares it itself (data.num_workers is 0) and {own}"
        named = [
            f"worker {each.worker} (process {each.pid}) "
            + ("has had no batch yet" if each.job is None else self._at(each.sample))
            for each in sorted(workers, key=lambda each: each.job != job)
        ]
        if any(each.job == job for each in workers):
            return f"{text}; {named[0]}"
        return f"{text}; no worker is at it: {'; '.join(named) or 'none has started'}"

    def _named(self, batch: PendingBatch) -> str:
        return batch.name + (f" of data-parallel rank {self.rank}" if self.size > 1 else "")

    def _at(self, sample: int | None) -> str:
        return f"is between {self.what}" if sample is None else f"is at {self._place(sample)}"

    def _refuse_changes(self, problems: Sequence[str]) -> None:
        """Raise a ValueError that names what differs from a saved position in the data."""
        if problems:
            raise ValueError(
                f"cannot continue in the data: {'; '.join(problems)}. The {self.what} or their "
                "order would differ; restore the data and settings of the run, or start a new one"
            )

    def _request(self) -> None:
        """Submit batches to the workers up to the prefetch limit; the next one is the first."""
        each = self._num_workers // self._num_pools
        while len(self._pools) < self._num_pools:
            first = each * len(self._pools)
            self._pools.append(WorkerPool(self._shared, each, first))
        while len(self._pending) < self._max_pending:
            try:
                batch, arguments = self._job(len(self._pending))
            except NoBatchError:
                return
            pool = self._pools[batch.pool]
            number = pool.num_jobs
            self._pending.append((batch, number, pool.submit(self._load, *arguments)))

    def _request_ahead(self) -> None:
        """Give the workers work while the batch that they made is used."""
        if self._num_workers and (self.share is None or self.share.reads):
            # The next wait tells of a worker that died.
            with suppress(BrokenProcessPool):
                self._request()

    def _loaded(self) -> LoadedBatch:
        """The next batch: made by a worker, by this process, or by the rank that reads for it.

        Raises:
            BadSampleError: a bad sample that is not skipped.
            RuntimeError: a worker process died, or the rank that reads.
        """
        make = self._take if self._num_workers else self._load_here
        if self.share is None:
            loaded = make()
        else:
            batch, _ = self._job(0)
            self._awaited = batch, None, 0
            loaded = LoadedBatch(*self.share.made(batch.name, make, self.while_waiting, _ERRORS))
        if self.own_rows is None or loaded.batch is None:
            return loaded
        return loaded._replace(batch=self.own_rows(loaded.batch))

    def _load_here(self) -> LoadedBatch:
        batch, arguments = self._job(0)
        self._awaited = batch, None, 0
        return self._load(*self._shared, *arguments)

    def _take(self) -> LoadedBatch:
        """What a worker makes of the next batch.

        Raises:
            BadSampleError: a bad sample that is not skipped.
            RuntimeError: a worker process died.
        """
        try:
            self._request()
            batch, number, future = self._pending[0]
            self._awaited = batch, self._pools[batch.pool], number
            while not wait([future], CALL_S).done:
                self.while_waiting()
            loaded = future.result()
            self._pending.popleft()
            return loaded
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                f"a data worker process died while preparing {self._job(0)[0].name}. Its own "
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
        for *_, future in self._pending:
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
