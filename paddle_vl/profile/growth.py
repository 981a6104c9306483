"""Which batch size to try next, from what the sizes so far came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Doubling:
    """Twice the largest size that fits until one does not, then halfway between the two.

    Attributes:
        first, largest: sizes to begin with and to stop at.
        resolution: when the smallest size that does not fit is within this share of the largest
            that does, they are close enough; sizes are never closer than 1.
    """

    first: int = 1
    largest: int = 64
    resolution: float = 0.125

    def __post_init__(self):
        if not 1 <= self.first <= self.largest:
            raise ValueError(
                f"batch sizes from {self.first} to {self.largest}: the first must be at least 1 "
                "and at most the largest"
            )
        if not 0 <= self.resolution < 1:
            raise ValueError(
                f"a resolution of {self.resolution} of the batch size: it must be in [0, 1)"
            )

    def next_size(self, fits: Mapping[int, bool]) -> int | None:
        """The size to try next, None when there is nothing more to learn.

        Args:
            fits: whether each size tried so far had enough memory.
        """
        if not fits:
            return self.first
        low = max((size for size, is_fit in fits.items() if is_fit), default=0)
        too_large = [size for size, is_fit in fits.items() if not is_fit and size > low]
        if not too_large:
            return min(2 * low, self.largest) if low < self.largest else None
        high = min(too_large)
        if high - low <= max(1, int(self.resolution * low)):
            return None
        return (low + high) // 2


@dataclass(frozen=True)
class Steps:
    """Given sizes in ascending order, until one does not fit."""

    sizes: Sequence[int]

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"batch sizes {list(self.sizes)}: give whole numbers from 1 in ascending order"
            )

    def next_size(self, fits: Mapping[int, bool]) -> int | None:
        """See `Doubling.next_size`."""
        if not all(fits.values()):
            return None
        return next((size for size in self.sizes if size not in fits), None)


Growth = Doubling | Steps
