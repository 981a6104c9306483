"""Where the values of a stored tensor are on the ranks that save it together.

A parameter may be divided over the mp ranks, experts over the ep ranks, and what is updated in a
parameter's place over sharding ranks.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from paddle import Tensor

from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.parameter_table import ParameterTable, joined_shards

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

# Coordinates of the ranks that have a share, as of a `Seat`; None: any.
Place = tuple[int | None, int | None, int | None, int | None]


class Source:
    """A parameter, or a `value` that is sharded like what is updated in its place, on all ranks.

    Attributes:
        dtype: of the values.
        rows: of the full value.
        columns: of each linear of a fused parameter in the full value.
    """

    def __init__(
        self,
        table: ParameterTable,
        parameter: Tensor,
        store: "ParameterStore | None",
        value: Tensor | None = None,
    ):
        self._spec, self._shape = table[parameter], tuple(parameter.shape)
        self._mp, self._ep = table.num_shards(parameter)
        self._spans, self._own = None, parameter.detach
        if store is not None:
            self._spans, self._own, _ = store.spread(parameter, value)
        self.dtype = parameter.dtype if value is None else value.dtype
        self.rows = math.prod(table.full_shape(parameter)[:1])
        self.columns = whole_slices(parameter)

    @property
    def is_local(self) -> bool:
        """Whether each rank has the full value."""
        return self._mp == self._ep == 1 and self._spans is None

    @property
    def is_collective(self) -> bool:
        """Whether ranks of several stages have shares, so that it needs a gather of its own."""
        return self._spec.is_encoder and not self.is_local

    @property
    def divides(self) -> bool:
        """Whether any rows of the full value may be written by themselves."""
        return bool(self._shape) and not (self._spec.split_axis == 0 and len(self._spec.blocks) > 1)

    def flat(self) -> Tensor:
        """The values that this rank has, flat, on the device."""
        return self._own().detach().reshape([-1])

    def shares(self, first: int, last: int) -> Iterator[tuple[Place, int, int]]:
        """Who has rows `first` to `last`, and where in what it has; in the order of `joined`."""
        for ep, mp, begin, end in self._shards(first, last):
            spans = [(0, end)] if self._spans is None else self._spans
            for rank, (start, stop) in enumerate(spans):
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    shard = None if self._spans is None else rank
                    of_matrix = mp if self._mp > 1 else None
                    place: Place = (None, of_matrix, shard, None)
                    if self._ep > 1:
                        # Experts of expert parallelism are sharded over ranks of their own.
                        place = (ep, of_matrix, None, shard)
                    yield place, low - start, high - start

    def joined(self, flat: np.ndarray, first: int, last: int) -> np.ndarray:
        """Rows `first` to `last` of the full value from the values of all shares in order."""
        by_ep, at = dict[int, list[np.ndarray]](), 0
        for ep, _, begin, end in self._shards(first, last):
            shard = flat[at : at + end - begin].reshape([-1, *self._shape[1:]])
            by_ep.setdefault(ep, []).append(shard)
            at += end - begin
        parts = [s[0] if len(s) == 1 else joined_shards(self._spec, s) for s in by_ep.values()]
        full = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return full if self._shape else full.reshape([])

    def _shards(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Numbers (ep, mp) of the shards with these rows, and first value and end of the rows in
        the flat shard."""
        rows, width = math.prod(self._shape[:1]), math.prod(self._shape[1:])
        for ep in range(self._ep):
            for mp in range(self._mp):
                start = (ep * self._mp + mp if self._spec.split_axis == 0 else ep) * rows
                begin, end = (min(max(row - start, 0), rows) for row in (first, last))
                if begin < end:
                    yield ep, mp, begin * width, end * width
