"""The learned tokens of a micro-batch by the answer that they are of.

Shapes: N learned tokens of this rank, S answers.
"""

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

# A share of a sum that changes no float32.
_NOTHING = 1e-9


class Rows:
    """Which answer each token is of.

    Args:
        numbers_N: of the answers, int64.
        is_target_N: bool; False of a token that stands for none.
        lengths_S: learned tokens of each answer, over all ranks that have some.
        positions_N: int64, of the tokens in this rank's rows, one row after the other.
        total: the sum over these ranks.
        place: number of this rank, and of these ranks.
    """

    def __init__(
        self,
        numbers_N: Tensor,
        is_target_N: Tensor,
        lengths_S: Tensor,
        positions_N: Tensor,
        total: Callable[[Tensor], Tensor] = lambda x: x,
        place: tuple[int, int] = (0, 1),
    ):
        own_NS = numbers_N.unsqueeze(1) == paddle.arange(lengths_S.shape[0])
        self._is_of_NS: Any = (own_NS & is_target_N.unsqueeze(1)).astype("float32")
        self.total, self.lengths, self.is_target = total, lengths_S, is_target_N
        self._numbers_N, self._positions_N = numbers_N, positions_N
        self._place = place

    def sum(self, x_N: Tensor) -> Tensor:
        """`[S]`: sums over the tokens of each answer, in the same order on every device."""
        return self.total((x_N.unsqueeze(1) * self._is_of_NS).sum(axis=0))

    def largest(self, x: Tensor) -> Tensor:
        """The maximum of a scalar over the ranks."""
        rank, size = self._place
        shares = [paddle.zeros_like(x)] * size
        shares[rank] = x
        return self.total(paddle.stack(shares)).max()

    def mean(self, x_N: Tensor) -> Tensor:
        """`[S]`: means over the tokens of each answer; 0 of one without any."""
        return self.sum(x_N) / self.lengths.clip(min=1.0)

    def discounted(self, x_N: Tensor, factor: float) -> Tensor:
        """`[N]`: from each token to the end of its answer the sum of values, each times `factor` to
        the power of its distance, in tokens that are learned or not. For answers that are whole on
        this rank."""
        numbers_N, positions_N, count = self._numbers_N, self._positions_N, len(self.lengths)
        is_own_NS = numbers_N.unsqueeze(1) == paddle.arange(count)
        positions_NS = positions_N.unsqueeze(1).expand([-1, count])
        first_S = paddle.where(is_own_NS, positions_NS, positions_N.max()).min(axis=0)
        columns_N = positions_N - paddle.gather(first_S, numbers_N)
        width, step = int(columns_N.max()) + 1, 1
        cells_N = numbers_N * width + columns_N
        zeros = paddle.zeros([count * width], x_N.dtype)
        sums_SC = paddle.scatter(zeros, cells_N, x_N).reshape([count, width])
        # With each round twice as many tokens are summed up, until the rest counts for nothing.
        while step < width and factor > _NOTHING:
            later_SC = paddle.concat(
                [sums_SC[:, step:], paddle.zeros_like(sums_SC[:, :step])], axis=1
            )
            sums_SC, step, factor = sums_SC + factor * later_SC, 2 * step, factor * factor
        return paddle.gather(sums_SC.flatten(), cells_N)

    def spread(self, x_S: Tensor) -> Tensor:
        """`[N]`: to each token the value of its answer. Its gradient is of this rank's tokens."""
        return (self._is_of_NS * x_S).sum(axis=1)
