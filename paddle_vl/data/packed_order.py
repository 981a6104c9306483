"""Which samples make up which rows of which batch: a function of lengths, seed and epoch."""

import zlib
from collections import OrderedDict

import numpy as np

from paddle_vl.data.packing import RowBudget, SampleLengths, fill_batches, pack


class PackedOrder:
    """The batches of every epoch; a sample is in exactly one row of an epoch.

    Every process computes the same rows, whatever it loads. The epochs are shuffled, and packed
    anew, so that their numbers of batches may differ by a few.

    Attributes:
        batch_size: rows of a batch on one data-parallel rank.
        rank, size: this data-parallel rank, and their number. Consecutive `batch_size * size` rows
            make a global batch, of which a rank takes every `size`-th row.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        budget: RowBudget,
        batch_size: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
    ):
        """Check the numbers.

        Raises:
            ValueError: a number is out of range, or there are fewer samples than rows of a batch.
        """
        self.lengths, self.budget = lengths, budget
        self.batch_size, self.seed, self.rank, self.size = batch_size, seed, rank, size
        self._numbers = np.flatnonzero(lengths.tokens)
        if batch_size < 1:
            raise ValueError(f"batch size is {batch_size}; at least 1 is needed")
        if not 0 <= rank < size:
            raise ValueError(f"data-parallel rank {rank} is outside [0, {size})")
        if self._numbers.size < batch_size * size:
            raise ValueError(
                f"{self._numbers.size} samples do not fill one batch of {batch_size} packed rows "
                f"on {size} data-parallel rank(s); lower the batch size or add data"
            )
        # Prefetching looks one epoch ahead at most.
        self._epochs: OrderedDict[int, list[np.ndarray]] = OrderedDict()

    def batches_in(self, epoch: int) -> int:
        """The same on every rank."""
        return len(self.rows(epoch)) // (self.batch_size * self.size)

    def batch(self, epoch: int, number: int) -> list[np.ndarray]:
        """Sample numbers of each row of one batch of this rank; int64, a row may have none."""
        global_size = self.batch_size * self.size
        start = number * global_size
        return self.rows(epoch)[start : start + global_size][self.rank :: self.size]

    def rows(self, epoch: int) -> list[np.ndarray]:
        """Sample numbers of all rows of an epoch, whole batches of them."""
        if epoch not in self._epochs:
            rng = np.random.default_rng([self.seed, epoch])
            rows = pack(rng.permutation(self._numbers), self.lengths, self.budget, rng)
            self._epochs[epoch] = fill_batches(rows, self.lengths, self.batch_size * self.size)
            while len(self._epochs) > 3:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def describe(self) -> dict[str, int | None]:
        """What the rows follow from beside the samples; JSON values."""
        sizes = np.stack([self.lengths.tokens, self.lengths.vision])
        return {
            "packing_length": self.budget.tokens,
            "max_vision_tokens_per_row": self.budget.vision_tokens,
            "sample_lengths": zlib.crc32(sizes.astype("<i8").tobytes()),
        }
