"""Batches in a reproducible order, prepared ahead by worker processes; resumable at any batch."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.packed_order import PackedOrder
from paddle_vl.data.packing import RowBudget, SampleLengths
from paddle_vl.data.sample_order import SampleOrder
from paddle_vl.data.waiting import AskedBatch, described_wait
from paddle_vl.data.worker_pool import (
    Collator,
    KnowsContents,
    LoadedBatch,
    SampleSource,
    WorkerPool,
    load_batch,
    load_packed_batch,
)

# Between two calls of `while_waiting`.
_CALL_S = 0.2


class Packing(NamedTuple):
    """What rows of several samples are made from."""

    lengths: SampleLengths
    budget: RowBudget


class PrefetchLoader:
    """An iterator over batches; the stream depends on neither workers nor prefetching.

        with PrefetchLoader(dataset, collator, batch_size=8, shuffle=True, seed=1, drop_last=True,
                            num_workers=2) as loader:
            for batch in loader: ...

    For training: `shuffle=True, drop_last=True` and no `num_epochs` gives batches without end, all
    of the same size; `len(loader)` is the number in an epoch. For evaluation: `shuffle=False,
    drop_last=False, num_epochs=1` gives every sample once, and begins anew at the next `iter`.

    Packed rows: with `packing` and a `PackedCollator` a batch has `batch_size` rows of several
    samples, every sample once in an epoch; it takes `shuffle=True, drop_last=False`.

    Bad samples: where the dataset skips them, `drop_last=True` puts the next good sample in file
    order in their place, so that every rank keeps its number of batches, and `drop_last=False`
    leaves them out, so that nothing counts twice.

    A dataset that draws something for its samples (`DrawsByEpoch`) is asked for those of the epoch;
    packed rows are not made of such.

    Attributes:
        epoch: of the next batch.
        batches_consumed: batches of that epoch already handed out.
        while_waiting: called now and then while workers prepare the next batch; what it raises ends
            the wait, and `next` waits for the same batch again.
    """

    while_waiting: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        dataset: SampleSource,
        collator: Collator,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int = 0,
        num_epochs: int | None = None,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        rank: int = 0,
        size: int = 1,
        packing: Packing | None = None,
    ):
        """Set up; processes start at the first batch.

        Args:
            batch_size: samples of a batch on one data-parallel rank.
            num_epochs: passes over the data; None for no end.
            num_workers: processes; 0 prepares batches in this one when they are asked for.
            prefetch_batches: batches asked of the workers ahead of use; at least one per worker.
            rank, size: this data-parallel rank, and their number.
            packing: lengths of the samples and what a row may hold; None for one sample a row.

        Raises:
            ValueError: the samples do not fill one batch, or a number is out of range.
        """
        for name, value, least in (
            ("num_workers", num_workers, 0),
            ("prefetch_batches", prefetch_batches, 1),
            ("num_epochs", 1 if num_epochs is None else num_epochs, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; at least {least} is needed")
        self._dataset = dataset
        self._collator = collator
        self._drop_last = drop_last
        self._order: SampleOrder | PackedOrder
        if packing is None:
            self._order = SampleOrder(
                len(dataset), batch_size, shuffle, seed, drop_last, rank, size
            )
        elif shuffle and not drop_last:
            self._order = PackedOrder(*packing, batch_size, seed, rank, size)
        else:
            raise ValueError("packed rows are shuffled and leave no sample out")
        self._num_epochs = num_epochs
        self._num_workers = num_workers
        self._max_pending = max(prefetch_batches, num_workers)
        self._pool: WorkerPool | None = None
        self._pending: deque[AskedBatch] = deque()
        self._awaited: AskedBatch | None = None
        self._skipped: Counter[str] = Counter()
        self._move_to(0, 0)

    def __len__(self) -> int:
        """Batches of the epoch of the next batch, the same on every rank."""
        return self._order.batches_in(self.epoch)

    def batches_in(self, num_epochs: float) -> float:
        """Batches of the first epochs, and of a part of one."""
        whole = int(num_epochs)
        batches = sum(map(self._order.batches_in, range(whole)))
        part = num_epochs - whole
        return batches + part * self._order.batches_in(whole) if part else batches

    def __iter__(self) -> "PrefetchLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch of the stream.

        Raises:
            BadSampleError: a bad sample that is not to be skipped, as `file:line: reason`.
            RuntimeError: a worker process died.
            ValueError: every sample of an epoch was bad.
        """
        while self._num_epochs is None or self.epoch < self._num_epochs:
            batch = self._advance()
            if batch is not None:
                return batch
        self._move_to(0, 0)
        raise StopIteration

    @property
    def skipped(self) -> dict[str, int]:
        """Kind of fault to the number of bad samples skipped: when opening, and so far.

        Samples that are passed over in several epochs count in each.
        """
        return dict(self._dataset.skipped + self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out; JSON values, the same on every rank."""
        return {
            "epoch": self.epoch,
            "batches_consumed": self.batches_consumed,
            "skipped": dict(self._skipped),
            "stream": self._stream(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; the batches are those of the run that was not interrupted.

        State of before data had hashes of its contents is compared by the positions of lines.

        Raises:
            ValueError: the data or the settings give another stream; every difference is named,
                of edited data by its file.
        """
        was, here = state["stream"], self._stream()
        contents = here.pop("contents", [])
        edited = _edited(was.get("contents", []), contents)
        if contents and "contents" not in was:
            here["fingerprint"] = self._dataset.positions_fingerprint
        elif edited:
            # They say what the fingerprint only shows.
            del here["fingerprint"]
        differing = edited + [
            f"{name} was {was.get(name)} and is {value}"
            for name, value in here.items()
            if was.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"cannot continue in the data: {'; '.join(differing)}. The samples or their order "
                "would differ; restore the data and settings of the run, or start a new one"
            )
        self._skipped = Counter(state["skipped"])
        self._move_to(state["epoch"], state["batches_consumed"])

    def waiting_for(self) -> str:
        """The batch that was asked for last, whose samples it has, and which process is at which
        of them. From any thread, as long as a batch is waited for."""
        asked, pool = self._awaited, self._pool
        if asked is None:
            return "no batch was asked for"
        workers = None if asked.job is None or pool is None else pool.at_work()
        rank = self._order.rank if self._order.size > 1 else None
        return described_wait(asked, self._dataset, workers, rank)

    def close(self) -> None:
        """End the worker processes. The loader can be used again, and starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._move_to(self.epoch, self.batches_consumed)

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _advance(self) -> dict[str, Any] | None:
        """Consume one batch: the batch, or None where all of its samples were left out."""
        loaded = self._load_inline() if self._num_workers == 0 else self._load_from_workers()
        self._skipped.update(loaded.skipped)
        self._has_batch = self._has_batch or loaded.batch is not None
        self.batches_consumed += 1
        if self.batches_consumed == len(self):
            if not self._has_batch and self._order.rank == 0:
                raise ValueError(
                    f"every sample of epoch {self.epoch} is bad: {self.skipped}; see "
                    "data.on_bad_sample: fail for the first reason"
                )
            self.epoch, self.batches_consumed, self._has_batch = self.epoch + 1, 0, False
        return loaded.batch

    def _load_inline(self) -> LoadedBatch:
        samples, (load, *arguments) = self._job(self.epoch, self.batches_consumed)
        self._awaited = AskedBatch(self.epoch, self.batches_consumed, samples)
        return load(self._dataset, self._collator, *arguments)

    def _job(self, epoch: int, number: int) -> tuple[list[int], tuple]:
        """The samples of a batch; the function that loads it, and what it takes after dataset and
        collator."""
        samples = self._order.batch(epoch, number)
        if isinstance(self._order, PackedOrder):
            job = (load_packed_batch, samples, self._order.budget.tokens)
            return np.concatenate([*samples, []]).astype(np.int64).tolist(), job
        return samples.tolist(), (load_batch, samples, self._drop_last, epoch)

    def _load_from_workers(self) -> LoadedBatch:
        try:
            self._request()
            self._awaited = self._pending[0]
            self._wait_for(self._awaited.future)
            loaded = self._awaited.future.result()
            self._pending.popleft()
            self._request()
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                f"a data worker process died while preparing batch {self.batches_consumed} of "
                f"epoch {self.epoch}. Its own message, if any, is above; without one it was most "
                "likely killed for memory: lower data.num_workers or data.prefetch_batches. "
                "data.num_workers=0 prepares batches in this process"
            ) from error
        except (BadSampleError, RuntimeError) as error:
            self.close()
            # Ours, whatever frames of the pool it passed: the command tells errors by the last one.
            raise error.with_traceback(None) from error.__cause__
        except BaseException:
            self.close()
            raise
        return loaded

    def _wait_for(self, future: "Future[LoadedBatch]") -> None:
        while not wait([future], _CALL_S).done:
            self.while_waiting()

    def _request(self) -> None:
        """Ask the workers for batches up to the limit."""
        if self._pool is None:
            self._pool = WorkerPool(self._dataset, self._collator, self._num_workers)
        while len(self._pending) < self._max_pending:
            epoch, number = self._requested
            if self._num_epochs is not None and epoch >= self._num_epochs:
                return
            job_number = self._pool.num_jobs
            samples, job = self._job(epoch, number)
            future = self._pool.submit(*job)
            self._pending.append(AskedBatch(epoch, number, samples, job_number, future))
            is_last = number + 1 == self._order.batches_in(epoch)
            self._requested = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _move_to(self, epoch: int, batches_consumed: int) -> None:
        for asked in self._pending:
            asked.future.cancel()
        self._pending.clear()
        self.epoch = epoch
        self.batches_consumed = batches_consumed
        self._requested = (epoch, batches_consumed)
        self._has_batch = batches_consumed > 0

    def _stream(self) -> dict[str, Any]:
        """What the order and the content of samples follow from; JSON values."""
        contents = self._dataset.contents if isinstance(self._dataset, KnowsContents) else ()
        return {
            **({"contents": [list(each) for each in contents]} if contents else {}),
            "num_samples": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "global_batch_size": self._order.batch_size * self._order.size,
            "seed": self._order.seed,
            **self._order.describe(),
        }


def _edited(was: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    """What changed in which data file; nothing where there were other files."""
    if len(was) != len(here):
        return []
    found = []
    for (_, old_lines, old_media), (file, lines, media) in zip(was, here, strict=True):
        if lines != old_lines:
            found.append(f"lines of {file} were added, removed or edited")
        elif media != old_media:
            found.append(f"images or videos that {file} names have other sizes than they had")
    return found
