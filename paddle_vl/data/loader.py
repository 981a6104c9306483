"""Batches in a reproducible order, prefetched by worker processes; resumable at any batch."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget, SampleLengths, check_ranks, fill_batches, pack
from paddle_vl.data.prefetch import LoadedBatch, NoBatchError, PendingBatch, PrefetchingLoader
from paddle_vl.data.samples import Collator, Sample, SampleSource
from paddle_vl.data.worker_pool import MAX_BAD_IN_A_ROW, note_sample
from paddle_vl.files.stored_settings import Count, checked, read_section
from paddle_vl.files.text_file import shown


@checked
class _Position:
    """A state, see `PrefetchLoader.state_dict`."""

    epoch: Count
    batches_consumed: Count
    skipped: dict[str, Count]
    stream: dict[str, Any]


class SampleOrder:
    """The batches of every epoch as a pure function of seed, epoch and batch number.

    Attributes:
        batch_size: rows (of one sample) per batch and data-parallel rank.
        rank, size: data-parallel rank and world size. `batch_size * size` consecutive rows make a
            global batch, of which a rank takes every `size`-th.
        row_tokens: most tokens of a packed row; None for rows of one sample.
    """

    row_tokens: int | None = None
    _row_kind = ""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int = 0,
        size: int = 1,
    ):
        """
        Args:
            num_samples: samples of the dataset.
            shuffle: a new random order in every epoch; otherwise file order.
            drop_last: leave out the rows at the end of an epoch that do not fill a global batch.

        Raises:
            ValueError: a number is out of range, or there are too few samples for a batch.
        """
        check_ranks(batch_size, rank, size)
        self.batch_size, self.seed, self.rank, self.size = batch_size, seed, rank, size
        self._num_samples, self._shuffle, self._drop_last = num_samples, shuffle, drop_last
        # Prefetching reads at most one epoch ahead.
        self.rows = lru_cache(maxsize=3)(self._rows)
        if num_samples < (batch_size * size if drop_last else 1):
            raise ValueError(
                f"{num_samples} samples do not fill one batch of {batch_size}{self._row_kind} on "
                f"{size} data-parallel rank(s); lower the batch size or add data"
            )

    def batches_in(self, epoch: int) -> int:
        """Batches of an epoch, the same on every rank."""
        full, rest = divmod(self._num_rows(epoch), self.batch_size * self.size)
        return full if self._drop_last or not rest else full + 1

    def batch(self, epoch: int, number: int) -> Sequence[Any]:
        """Sample number, or of packed rows the numbers (int64), of each row of one batch of this
        rank.

        Without `drop_last` the last batch may be shorter, and empty on some ranks. A packed row may
        be empty.
        """
        global_size = self.batch_size * self.size
        start = number * global_size
        rows = self.rows(epoch if self._shuffle else 0)
        return rows[start : start + global_size][self.rank :: self.size]

    def describe(self) -> dict[str, Any]:
        """Settings that the order depends on, besides samples and seed; JSON values."""
        return {"shuffle": self._shuffle, "drop_last": self._drop_last}

    def _num_rows(self, epoch: int) -> int:
        return self._num_samples

    def _rows(self, epoch: int) -> Any:
        """Sample numbers of all rows of an epoch, on all ranks."""
        if not self._shuffle:
            return np.arange(self._num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self._num_samples)


class PackedOrder(SampleOrder):
    """The batches of packed rows of every epoch, the same rows on every rank.

    Each epoch is shuffled and packed anew, so that the number of batches may differ by a few.
    """

    _row_kind = " packed rows"

    def __init__(
        self,
        lengths: SampleLengths,
        budget: RowBudget,
        batch_size: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
    ):
        """
        Raises:
            ValueError: a number is out of range, or there are fewer samples than rows in a batch.
        """
        self.lengths, self.budget, self.row_tokens = lengths, budget, budget.tokens
        self._numbers = np.flatnonzero(lengths.tokens)
        super().__init__(
            len(self._numbers), batch_size, shuffle=True, seed=seed, drop_last=True, rank=rank,
            size=size,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        sizes = np.stack([self.lengths.tokens, self.lengths.vision])
        return {
            "packing_length": self.budget.tokens,
            "max_vision_tokens_per_row": self.budget.vision_tokens,
            "sample_lengths": zlib.crc32(sizes.astype("<i8").tobytes()),
        }

    def _num_rows(self, epoch: int) -> int:
        return len(self.rows(epoch))

    def _rows(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        rows = pack(rng.permutation(self._numbers), self.lengths, self.budget, rng)
        return fill_batches(rows, self.lengths, self.batch_size * self.size)


class Packing(NamedTuple):
    """Settings of packed rows: lengths of all samples, and the limits of a row."""

    lengths: SampleLengths
    budget: RowBudget


def load_batch(
    dataset: SampleSource,
    collator: Collator,
    rows: Sequence[Any],
    row_tokens: int | None,
    epoch: int,
    seed: int | None,
) -> LoadedBatch:
    """Load and collate samples.

    Args:
        rows: int64 number of the sample of each row; for packed rows the numbers of several.
        row_tokens: most tokens of a packed row; None for rows of one sample.
        epoch: selects the random draws, also those of a dataset that has `in_epoch`.
        seed: where the dataset skips bad samples, draw others from all of them in their places, so
            that the batch keeps its size; None to leave them out.

    Raises:
        BadSampleError: a bad sample where `on_bad_sample` is "fail", or no good one was drawn.
        RuntimeError: a packed row is longer than when its samples were measured.
    """
    if in_epoch := getattr(dataset, "in_epoch", None):
        dataset = in_epoch(epoch)
    skipped: Counter[str] = Counter()
    draws = None if seed is None else (seed, epoch)
    loaded: list[Any]
    if row_tokens is None:
        loaded = _good_samples(dataset, np.asarray(rows), draws, skipped)
    else:
        loaded = [_good_samples(dataset, numbers, draws, skipped) for numbers in rows]
        lengths = [sum(map(num_tokens, samples)) for samples in loaded]
        if max(lengths) > row_tokens:
            longest = int(np.argmax(lengths))
            raise RuntimeError(
                f"samples {rows[longest].tolist()} were measured to fit a row of {row_tokens} "
                f"tokens and have {lengths[longest]}: images or videos changed under the same "
                "name; delete the .lengths-*.npz file beside the data"
            )
    note_sample(None)
    return LoadedBatch(collator(loaded) if loaded else None, dict(skipped))


def num_tokens(sample: Sample) -> int:
    """Tokens of a sample; of a pair of answers those of both."""
    return sum(len(value) for key, value in sample.items() if key.endswith("input_ids"))


def _good_samples(
    dataset: SampleSource,
    numbers: np.ndarray,
    draws: tuple[int, int] | None,
    skipped: Counter[str],
) -> list[Sample]:
    """The samples of these numbers without the bad ones, which are counted, see `load_batch`."""
    samples = []
    for number in numbers.tolist():
        for tried in _tries(number, len(dataset), draws):
            note_sample(tried)
            try:
                samples.append(dataset[tried])
                break
            except BadSampleError as error:
                if dataset.on_bad_sample == "fail":
                    raise
                # A bad one that was drawn is counted at its own place.
                if tried == number:
                    skipped[error.kind] += 1
                last_error = error
        else:
            if draws is not None:
                raise BadSampleError(
                    last_error.kind,
                    f"{min(len(dataset), MAX_BAD_IN_A_ROW)} samples of all are bad, so none was "
                    f"found in place of one; the last is: {last_error.reason}",
                    last_error.place,
                )
    return samples


def _tries(number: int, num_samples: int, draws: tuple[int, int] | None) -> Iterator[int]:
    """A sample, and those to try in its place: the same on any ranks, and different ones for each,
    so that no good sample stands for all of a run of bad ones."""
    yield number
    if draws is not None:
        rng = np.random.default_rng([*draws, number])
        most = min(num_samples, MAX_BAD_IN_A_ROW)
        others = rng.choice(num_samples, most, replace=False)
        yield from others[others != number].tolist()


class PrefetchLoader(PrefetchingLoader):
    """An iterator over batches. Their order depends on neither workers nor prefetching.

        with PrefetchLoader(dataset, collator, batch_size=8, shuffle=True, seed=1, drop_last=True,
                            num_workers=2) as loader:
            for batch in loader: ...

    Training: `shuffle=True, drop_last=True` without `num_epochs` gives an endless stream of batches
    of equal size. Evaluation: `shuffle=False, drop_last=False, num_epochs=1` gives every sample
    once; the next `iter` starts again.

    Packed rows: with `packing` and a `PackedCollator` a batch has `batch_size` rows of several
    samples, every sample once per epoch. They need `shuffle=True, drop_last=False`.

    Bad samples: where the dataset skips them, `drop_last=True` draws another of all samples in the
    place of each, so that every rank keeps its number of batches; `drop_last=False` leaves them
    out, so that no sample counts twice.

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
        ahead = max(prefetch_batches, num_workers)
        super().__init__(load_batch, dataset, collator, num_workers, ahead, rank, size)
        self._dataset, self._drop_last, self._num_epochs = dataset, drop_last, num_epochs
        if packing is None:
            self._order = SampleOrder(
                len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
                rank=rank, size=size,
            )  # fmt: skip
        elif shuffle and not drop_last:
            self._order = PackedOrder(*packing, batch_size, seed, rank, size)
        else:
            raise ValueError("packed rows are shuffled and leave no sample out")
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

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            BadSampleError: a bad sample where `on_bad_sample` is "fail", as `file:line: reason`.
            RuntimeError: a worker process died.
            ValueError: every sample of an epoch was bad.
        """
        while self._num_epochs is None or self.epoch < self._num_epochs:
            loaded = self._loaded()
            self._skipped.update(loaded.more)
            self._has_batch = self._has_batch or loaded.batch is not None
            self.batches_consumed += 1
            if self.batches_consumed == len(self):
                if not self._has_batch and self.rank == 0:
                    raise ValueError(
                        f"every sample of epoch {self.epoch} is bad: {self.skipped}; see "
                        "data.on_bad_sample: fail for the first reason"
                    )
                self.epoch, self.batches_consumed, self._has_batch = self.epoch + 1, 0, False
            self._request_ahead()
            # None if all of its samples were skipped.
            if loaded.batch is not None:
                return loaded.batch
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
        position = read_section(_Position, state, "data")
        was, here = dict(position.stream), self._stream()
        contents = here.pop("contents", [])
        before = was.pop("contents", [])
        problems = _edited(before, contents)
        is_partial = any(not media for _, _, media in (*before, *contents))
        if contents and "contents" not in position.stream:
            # Older states have no hashes of file contents; positions of lines are compared.
            positions = getattr(self._dataset, "positions_fingerprint", here["fingerprint"])
            here["fingerprint"] = positions
        elif problems or is_partial:
            # The edited files explain why the fingerprints differ, as do files of which one start
            # has looked at all images and the other has not.
            del here["fingerprint"]
            was.pop("fingerprint", None)
        problems += [
            f"{name} was {was.get(name)} and is {here.get(name)}"
            for name in dict.fromkeys([*here, *was])
            if was.get(name) != here.get(name)
        ]
        self._refuse_changes(problems)
        epoch, consumed = position.epoch, position.batches_consumed
        if batches is not None and epoch > batches:
            raise ValueError(f"data: epoch is {epoch}, after {batches} batches")
        in_epoch = self._order.batches_in(epoch)
        if consumed >= in_epoch:
            raise ValueError(
                f"data: batches_consumed is {consumed}; epoch {epoch} has {in_epoch} batches"
            )
        # Where samples may be left out, batches without a good one are not counted.
        if self._drop_last and batches is not None and epoch * in_epoch + consumed != batches:
            raise ValueError(
                f"data: epoch is {epoch} and batches_consumed is {consumed}, of {in_epoch} in each "
                f"epoch; the run had used {batches} batches"
            )
        self._skipped = Counter(position.skipped)
        self._move_to(epoch, consumed)

    def _move_to(self, epoch: int, batches_consumed: int) -> None:
        self._drop_pending()
        self.epoch, self.batches_consumed = epoch, batches_consumed
        self._has_batch = batches_consumed > 0

    def _job(self, ahead: int) -> tuple[PendingBatch, tuple[Any, ...]]:
        epoch, number = self.epoch, self.batches_consumed + ahead
        while number >= (in_epoch := self._order.batches_in(epoch)):
            epoch, number = epoch + 1, number - in_epoch
        if self._num_epochs is not None and epoch >= self._num_epochs:
            raise NoBatchError
        rows = self._order.batch(epoch, number)
        seed = self._order.seed if self._drop_last else None
        arguments = rows, self._order.row_tokens, epoch, seed
        return PendingBatch(f"batch {number} of epoch {epoch}"), arguments

    def _place(self, sample: int) -> str:
        place = getattr(self._dataset, "place", "sample {}".format)
        return place(sample)

    def _stream(self) -> dict[str, Any]:
        """Everything that determines order and content of samples; JSON values."""
        contents = getattr(self._dataset, "contents", ())
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
        elif media and old_media and media != old_media:
            found.append(f"images or videos that {file} names have other sizes than they had")
    return found
