"""A rank's shard of the token rows of a batch."""

from typing import Any, NamedTuple

import numpy as np

IGNORE_INDEX = -100
# NumPy array or Paddle tensor.
Array = Any


class RowPart(NamedTuple):
    """Shard of the token rows under sequence parallelism.

    Attributes:
        rank, size: this rank and the number of ranks in the model-parallel group.
        uneven: whether a length that `size` does not divide is cut with a remainder, one row more
            for each of the first ranks, instead of refused.
    """

    rank: int = 0
    size: int = 1
    uneven: bool = False

    def bounds(self, num_rows: int, of: str = "token rows (batch x padded length)"):
        """`[start, stop)` of this shard among `num_rows` rows.

        Args:
            num_rows: their number; with `uneven` also a 0-D tensor, whose bounds are tensors.
            of: what is cut, for the message.

        Raises:
            ValueError: `size` does not divide the rows, or the rank is out of range.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"row part has rank {self.rank}, outside [0, {self.size})")
        if not self.uneven and num_rows % self.size:
            raise ValueError(
                f"{num_rows} {of} do not divide by the model-parallel degree {self.size}: sequence "
                "parallelism needs equal shards; set data.pad_to_multiple_of to a multiple of "
                f"{self.size}, or cut with a remainder (RowPart(..., uneven=True))"
            )
        start = 0
        for rank in range(self.rank):
            start = start + (num_rows + self.size - 1 - rank) // self.size
        return start, start + (num_rows + self.size - 1 - self.rank) // self.size

    def of_rows(self, rows: Array) -> Array:
        """This shard of the first axis. A traced program checks the length when it runs."""
        if self.size == 1:
            return rows
        if not is_known(rows.shape[0]) and not self.uneven:
            return rows.reshape([self.size, -1, *rows.shape[1:]])[self.rank]
        start, stop = self.bounds(_length(rows.shape[0], rows))
        return rows[start:stop]

    def of_numbers(self, numbers_N: np.ndarray, num_rows: int) -> np.ndarray:
        """Those of ascending row numbers that are in this shard, counted from its first row."""
        start, stop = self.bounds(num_rows)
        begin, end = np.searchsorted(numbers_N, [start, stop])
        return numbers_N[begin:end] - start

    def of_columns(self, array_BL: Array) -> Array:
        """This shard of every row of a 2-D array. A traced program checks the width as it runs."""
        if self.size == 1:
            return array_BL
        if not is_known(array_BL.shape[1]) and not self.uneven:
            # Paddle reads 0 as "this dimension stays"; NumPy's shapes are always known.
            return array_BL.reshape([0, self.size, -1])[:, self.rank]
        length = _length(array_BL.shape[1], array_BL[:1])
        start, stop = self.bounds(length, of="tokens of a sample (padded length)")
        return array_BL[:, start:stop]


WHOLE_BATCH = RowPart()


def is_known(size: Any) -> bool:
    """Whether a dimension has a value; in a traced program it may be -1 or a tensor."""
    return isinstance(size, int) and size >= 0


def _length(size: Any, array: Array) -> Any:
    """A dimension; where a traced program does not know it, the array's size as a 0-D tensor."""
    return size if is_known(size) else (array == array).astype("int64").sum()
