"""Tables of which a batch uses few rows, and which may be larger than the memory of a device.

A table is drawn by parts of `PART_ROWS` rows, each from a generator of its own, so that a rank with
some of the rows gets the values of one device, and draws no parts of others.

Shapes: T token rows, Y rows of the table for each; R rows of the table, D their width.
"""

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn.initializer import Initializer

from paddle_vl.nn.linear import Embedding
from paddle_vl.nn.transfer import host_array

PART_ROWS = 1 << 16


class RowTable(Embedding):
    """Rows of a table `[R, D]` by their numbers, `[T, Y]` int64: `[T, Y, D]`.

    Args:
        first: number of the table's first row that this rank has.
    """

    def __init__(self, num_rows: int, width: int, init_std: float = 0.02, first: int = 0):
        super().__init__(num_rows, width, law=NormalParts(init_std, first))

    def plan(self, numbers_TY: Tensor) -> Any:
        """What the layer takes, of the row numbers of all token rows: on one device these."""
        return numbers_TY

    def beside(self, x: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """`x`, and the rows of a plan, which are used with it: the gradient of `x` goes on when
        that of the table is complete, see `RegionOps.in_turn`."""
        return x, self(plan)


class NormalParts(Initializer):
    """A normal distribution, drawn in float32 for the rows of a table from number `first` on.

    It takes one number from Paddle's global random state, whatever the rows are.
    """

    def __init__(self, std: float, first: int = 0):
        super().__init__()
        self.std, self.first = std, first

    @paddle.no_grad()
    def forward(self, param: Any, block: Any = None) -> Tensor:
        rows, width = param.shape
        seed, end = draw_seed(), self.first + rows
        values = paddle.empty([rows, width], dtype=param.dtype)
        for part in range(self.first // PART_ROWS, -(-end // PART_ROWS)):
            begin = part * PART_ROWS
            drawn = np.random.default_rng([seed, part]).standard_normal(
                [PART_ROWS, width], dtype=np.float32
            )
            low, high = max(begin, self.first), min(begin + PART_ROWS, end)
            own = paddle.to_tensor(drawn[low - begin : high - begin] * np.float32(self.std))
            values[low - self.first : high - self.first] = own.astype(param.dtype)
        values._share_buffer_to(param)
        return param


def draw_seed() -> int:
    """The seed of a table, from Paddle's global random state."""
    return int(host_array(paddle.randint(0, (1 << 31) - 1, [1], dtype="int64"))[0])
