"""One array behind several tensors of a checkpoint."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np


class SharedArray:
    """An array whose parts are asked for one after the other: made for the first, dropped behind
    the last.

    Making it may be collective: ranks that ask for the same parts in the same order make it
    together.
    """

    def __init__(self, make: Callable[[], np.ndarray], columns: Sequence[slice]):
        """
        Args:
            columns: of its parts, each asked for once.
        """
        self._make, self._columns = make, list(columns)
        self._array: np.ndarray | None = None
        self._num_left = 0

    def parts(self) -> list[Callable[[], np.ndarray]]:
        """What gives each part, a view of the array."""
        return [partial(self._part, columns) for columns in self._columns]

    def _part(self, columns: slice) -> np.ndarray:
        if self._array is None:
            self._array, self._num_left = self._make(), len(self._columns)
        array = self._array
        self._num_left -= 1
        if self._num_left == 0:
            self._array = None
        return array[:, columns]
