"""Which samples make up which batch: a pure function of seed, epoch and batch number.

Every process computes the same order, whatever it loads and however many workers it has.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class SampleOrder:
    """The batches of every epoch.

    Attributes:
        num_samples: samples of the dataset.
        batch_size: samples of a batch on one data-parallel rank.
        shuffle: a new random order in every epoch, else file order.
        seed: of the random order.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch on
            every rank.
        rank, size: this data-parallel rank, and their number. Consecutive `batch_size * size`
            samples make a global batch, of which a rank takes every `size`-th sample.
    """

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch size is {self.batch_size}; at least 1 is needed")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"data-parallel rank {self.rank} is outside [0, {self.size})")
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"{self.num_samples} samples do not fill one batch of {self.batch_size} on "
                f"{self.size} data-parallel rank(s); lower the batch size or add data"
            )

    @property
    def batches_per_epoch(self) -> int:
        """The same on every rank."""
        whole, rest = divmod(self.num_samples, self.batch_size * self.size)
        return whole if self.drop_last or not rest else whole + 1

    def batches_in(self, epoch: int) -> int:
        return self.batches_per_epoch

    def describe(self) -> dict[str, int | bool]:
        """What the order follows from beside samples and seed; JSON values."""
        return {"shuffle": self.shuffle, "drop_last": self.drop_last}

    def batch(self, epoch: int, number: int) -> np.ndarray:
        """Sample numbers of one batch of this rank: int64.

        Without `drop_last`, the last batch may be shorter, and empty on some ranks.
        """
        global_size = self.batch_size * self.size
        start = number * global_size
        order = _epoch_order(self.num_samples, self.seed, epoch if self.shuffle else None)
        return order[start : start + global_size][self.rank :: self.size]


# Prefetching looks one epoch ahead at most.
@lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int | None) -> np.ndarray:
    if epoch is None:
        return np.arange(num_samples)
    return np.random.default_rng([seed, epoch]).permutation(num_samples)
