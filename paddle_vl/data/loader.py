"""Batches in a reproducible order, prefetched by worker processes; resumable at any batch.

Over 350 lines, to keep the order of samples, the job of a worker and the loader together.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import PackedOrder, RowBudget, SampleLengths, check_ranks
from paddle_vl.data.prefetch import PendingBatch, PrefetchingLoader, describe_wait, refuse_changes
from paddle_vl.data.worker_pool import (
    MAX_BAD_IN_A_ROW,
    Collator,
    DrawsByEpoch,
    HasContents,
    LoadedBatch,
    Sample,
    SampleSource,
    WorkerPool,
    note_sample,
)
from paddle_vl.files.checked_values import Count, checked, read_section
from paddle_vl.files.text_file import shown


@checked
class _Position:
    """A state, see `PrefetchLoader.state_dict`."""

    epoch: Count
    batches_consumed: Count
    skipped: dict[str, Count]
    stream: dict[str, Any]


@dataclass(frozen=True)
class SampleOrder:
    """The batches of every epoch as a pure function of seed, epoch and batch number.

    Attributes:
        num_samples: samples of the dataset.
        batch_size: samples per batch and data-parallel rank.
        shuffle: a new random order in every epoch; otherwise file order.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch.
        rank, size: data-parallel rank and world size. `batch_size * size` consecutive samples make
            a global batch, of which a rank takes every `size`-th sample.
    """

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.batch_size, self.rank, self.size)
        if self.batches_in(0) == 0:
            raise ValueError(
                f"{self.num_samples} samples do not fill one batch of {self.batch_size} on "
                f"{self.size} data-parallel rank(s); lower the batch size or add data"
            )

    def batches_in(self, epoch: int) -> int:
        """Batches of an epoch, the same on every rank."""
        full, rest = divmod(self.num_samples, self.batch_size * self.size)
        return full if self.drop_last or not rest else full + 1

    def describe(self) -> dict[str, int | bool]:
        """Settings that the order depends on, besides samples and seed; JSON values."""
        return {"shuffle": self.shuffle, "drop_last": self.drop_last}

    def batch(self, epoch: int, number: int) -> np.ndarray:
        """Sample numbers of one batch of this rank: int64.

        Without `drop_last` the last batch may be shorter, and empty on some ranks.
        """
        global_size = self.batch_size * self.size
        start = number * global_size
        order = _epoch_order(self.num_samples, self.seed, epoch if self.shuffle else None)
        return order[start : start + global_size][self.rank :: self.size]


# Prefetching reads at most one epoch ahead.
@lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int | None) -> np.ndarray:
    if epoch is None:
        return np.arange(num_samples)
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


class Packing(NamedTuple):
    """Settings of packed rows: lengths of all samples, and the limits of a row."""

    lengths: SampleLengths
    budget: RowBudget


def load_batch(
    dataset: SampleSource,
    collator: Collator,
    rows: Sequence[np.ndarray],
    row_tokens: int | None,
    replace_bad: bool,
    epoch: int,
) -> LoadedBatch:
    """Load and collate samples.

    Args:
        rows: int64 number of the sample of each row; for packed rows the numbers of several.
        row_tokens: most tokens of a packed row; None for rows of one sample.
        replace_bad: where the dataset skips bad samples, take the next good sample in file order
            instead, so that the batch keeps its size; otherwise leave it out.
        epoch: selects the random draws of a `DrawsByEpoch` dataset.

    Raises:
        BadSampleError: a bad sample where `on_bad_sample` is "fail", or too many in a row.
        RuntimeError: a packed row is longer than when its samples were measured.
    """
    if isinstance(dataset, DrawsByEpoch):
        dataset = dataset.in_epoch(epoch)
    skipped: Counter[str] = Counter()
    loaded: list[Any]
    if row_tokens is None:
        loaded = _good_samples(dataset, np.asarray(rows), replace_bad, skipped)
    else:
        loaded = [_good_samples(dataset, numbers, replace_bad, skipped) for numbers in rows]
        lengths = [sum(len(sample["input_ids"]) for sample in samples) for samples in loaded]
        if max(lengths) > row_tokens:
            longest = int(np.argmax(lengths))
            raise RuntimeError(
                f"samples {rows[longest].tolist()} were measured to fit a row of {row_tokens} "
                f"tokens and have {lengths[longest]}: images or videos changed under the same "
                "name; delete the .lengths-*.npz file beside the data"
            )
    note_sample(None)
    return LoadedBatch(collator(loaded) if loaded else None, skipped)


def _good_samples(
    dataset: SampleSource, numbers: np.ndarray, replace_bad: bool, skipped: Counter[str]
) -> list[Sample]:
    """The samples of these numbers without the bad ones, which are counted, see `load_batch`."""
    samples = []
    for number in numbers.tolist():
        attempts = min(len(dataset), MAX_BAD_IN_A_ROW) if replace_bad else 1
        for step in range(attempts):
            tried = (number + step) % len(dataset)
            note_sample(tried)
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
    return samples


class PrefetchLoader(PrefetchingLoader[LoadedBatch]):
    """An iterator over batches. Their order depends on neither workers nor prefetching.

        with PrefetchLoader(dataset, collator, batch_size=8, shuffle=True, seed=1, drop_last=True,
                            num_workers=2) as loader:
            for batch in loader: ...

    Training: `shuffle=True, drop_last=True` without `num_epochs` gives an endless stream of batches
    of equal size. Evaluation: `shuffle=False, drop_last=False, num_epochs=1` gives every sample
    once; the next `iter` starts again.

    Packed rows: with `packing` and a `PackedCollator` a batch has `batch_size` rows of several
    samples, every sample once per epoch. They need `shuffle=True, drop_last=False`.

    Bad samples: where the dataset skips them, `drop_last=True` replaces each by the next good
    sample in file order, so that every rank keeps its number of batches; `drop_last=False` leaves
    them out, so that no sample counts twice.

    Attributes:
        epoch: epoch of the next batch.
        batches_consumed: batches of that epoch already returned.
    """

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
        """Set up; worker processes start at the first batch.

        Args:
            batch_size: samples per batch and data-parallel rank.
            num_epochs: passes over the data; None for an endless stream.
            num_workers: worker processes; 0 prepares batches in this process.
            prefetch_batches: batches requested ahead of use; at least one per worker.
            rank, size: data-parallel rank and world size.
            packing: None for one sample per row.

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
        super().__init__(num_workers, rank, size)
        self._dataset, self._collator, self._drop_last = dataset, collator, drop_last
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
        self._max_pending = max(prefetch_batches, num_workers)
        self._skipped: Counter[str] = Counter()
        self._move_to(0, 0)

    def __len__(self) -> int:
        """Batches of the current epoch, the same on every rank."""
        return self._order.batches_in(self.epoch)

    def batches_in(self, num_epochs: float) -> float:
        """Batches of the first `num_epochs` epochs, which may be a fraction."""
        full = int(num_epochs)
        batches = sum(map(self._order.batches_in, range(full)))
        fraction = num_epochs - full
        return batches + fraction * self._order.batches_in(full) if fraction else batches

    def __next__(self) -> dict[str, Any]:
        """The next batch.

        Raises:
            BadSampleError: a bad sample where `on_bad_sample` is "fail", as `file:line: reason`.
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
        """Skipped samples by kind of fault, when opening and since; counted anew in every epoch."""
        return dict(self._dataset.skipped + self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last returned batch; JSON values, the same on every rank."""
        return {
            "epoch": self.epoch,
            "batches_consumed": self.batches_consumed,
            "skipped": dict(self._skipped),
            "stream": self._stream(),
        }

    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        # Older states have no hashes of file contents; they are compared by positions of lines.
        position = read_section(_Position, state, "data")
        was, here = dict(position.stream), self._stream()
        contents = here.pop("contents", [])
        edited = _edited(was.pop("contents", []), contents)
        if (
            "contents" not in position.stream
            and isinstance(self._dataset, HasContents)
            and contents
        ):
            here["fingerprint"] = self._dataset.positions_fingerprint
        elif edited:
            # The edited files explain why the fingerprints differ.
            del here["fingerprint"]
            was.pop("fingerprint", None)
        differing = edited + [
            f"{name} was {was.get(name)} and is {here.get(name)}"
            for name in dict.fromkeys([*here, *was])
            if was.get(name) != here.get(name)
        ]
        refuse_changes(differing, "samples")
        self._check_position(position, batches)
        self._skipped = Counter(position.skipped)
        self._move_to(position.epoch, position.batches_consumed)

    def _check_position(self, position: "_Position", batches: int | None) -> None:
        epoch, consumed = position.epoch, position.batches_consumed
        if batches is not None and epoch > batches:
            raise ValueError(f"data: epoch is {epoch}, after {batches} batches")
        in_epoch = self._order.batches_in(epoch)
        if consumed >= in_epoch:
            raise ValueError(
                f"data: batches_consumed is {consumed}; epoch {epoch} has {in_epoch} batches"
            )
        # Batches without a good sample, of packed rows, are not counted.
        counts = isinstance(self._order, SampleOrder) and self._drop_last
        if counts and batches is not None and epoch * in_epoch + consumed != batches:
            raise ValueError(
                f"data: epoch is {epoch} and batches_consumed is {consumed}, of {in_epoch} in each "
                f"epoch; the run had used {batches} batches"
            )

    def waiting_for(self) -> str:
        batch, pools = self._awaited, self._pools
        if batch is None:
            return "no batch was requested"
        workers = pools[0].progress() if pools and batch.job is not None else None
        rank = self.rank if self.size > 1 else None
        return describe_wait(batch, self._dataset, workers, rank)

    def close(self) -> None:
        super().close()
        self._move_to(self.epoch, self.batches_consumed)

    def _advance(self) -> dict[str, Any] | None:
        """Consume one batch; None if all of its samples were skipped."""
        loaded = self._from_workers() if self._num_workers else self._load_inline()
        self._request_ahead()
        self._skipped.update(loaded.skipped)
        self._has_batch = self._has_batch or loaded.batch is not None
        self.batches_consumed += 1
        if self.batches_consumed == len(self):
            if not self._has_batch and self.rank == 0:
                raise ValueError(
                    f"every sample of epoch {self.epoch} is bad: {self.skipped}; see "
                    "data.on_bad_sample: fail for the first reason"
                )
            self.epoch, self.batches_consumed, self._has_batch = self.epoch + 1, 0, False
        return loaded.batch

    def _load_inline(self) -> LoadedBatch:
        samples, arguments = self._job(self.epoch, self.batches_consumed)
        self._awaited = PendingBatch(self.epoch, self.batches_consumed, samples)
        return load_batch(self._dataset, self._collator, *arguments)

    def _job(self, epoch: int, number: int) -> tuple[list[int], tuple]:
        """Samples of a batch, and the further arguments of `load_batch`."""
        rows = self._order.batch(epoch, number)
        samples = np.hstack([*rows, []]).astype(np.int64).tolist()
        row_tokens = self._order.budget.tokens if isinstance(self._order, PackedOrder) else None
        return samples, (rows, row_tokens, self._drop_last, epoch)

    def _name_of_next(self) -> str:
        return f"batch {self.batches_consumed} of epoch {self.epoch}"

    def _request(self) -> None:
        if not self._pools:
            self._pools = [WorkerPool(self._dataset, self._collator, self._num_workers)]
        (pool,) = self._pools
        while len(self._pending) < self._max_pending:
            epoch, number = self._requested
            if self._num_epochs is not None and epoch >= self._num_epochs:
                return
            job_number = pool.num_jobs
            samples, arguments = self._job(epoch, number)
            batch = PendingBatch(epoch, number, samples, job_number)
            self._pending.append((batch, pool.submit(load_batch, *arguments)))
            is_last = number + 1 == self._order.batches_in(epoch)
            self._requested = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _move_to(self, epoch: int, batches_consumed: int) -> None:
        self._drop_pending()
        self.epoch, self.batches_consumed = epoch, batches_consumed
        self._requested = (epoch, batches_consumed)
        self._has_batch = batches_consumed > 0

    def _stream(self) -> dict[str, Any]:
        """Everything that determines order and content of samples; JSON values."""
        contents = self._dataset.contents if isinstance(self._dataset, HasContents) else ()
        return {
            **({"contents": [list(each) for each in contents]} if contents else {}),
            "num_samples": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "global_batch_size": self._order.batch_size * self._order.size,
            "seed": self._order.seed,
            **self._order.describe(),
        }


def _edited(was: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    """Changes per data file; none if the number of files differs.

    Raises:
        ValueError: `was` lists no files.
    """
    if not isinstance(was, list) or not all(isinstance(e, list) and len(e) == 3 for e in was):
        raise ValueError(f"data: stream: contents is {shown(was)}; it must list data files")
    if len(was) != len(here):
        return []
    found = []
    for (_, old_lines, old_media), (file, lines, media) in zip(was, here, strict=True):
        if lines != old_lines:
            found.append(f"lines of {file} were added, removed or edited")
        elif media != old_media:
            found.append(f"images or videos that {file} names have other sizes than they had")
    return found
