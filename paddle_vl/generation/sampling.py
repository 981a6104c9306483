"""One token per row from its scores: the highest, or a draw with a generator of the row's own.

Shapes: B batch, V vocabulary.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.generation.config import GenerationConfig


class RowDraws:
    """Uniform numbers in [0, 1), one stream per row, from the seed and the row's number.

    What a row draws depends on no other row, so it answers the same in a larger batch, and one
    that has ended disturbs nothing.
    """

    def __init__(self, seed: int | None, num_rows: int):
        entropy = np.random.SeedSequence(seed).entropy
        self._rows = [np.random.default_rng([entropy, row]) for row in range(num_rows)]

    def next(self) -> Tensor:
        """`[B, 1]` float64."""
        return paddle.to_tensor(np.array([[row.random()] for row in self._rows]))


def draw_tokens(scores_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Inverse of the cumulative distribution softmax(scores): `[B]` int64.

    Args:
        uniform_B1: float64 in [0, 1). A token of probability 0 is never drawn.
    """
    # The CPU's softmax and exp give a token at -inf a tiny probability instead of none.
    is_possible_BV = (scores_BV > -np.inf).astype("float64")
    weight_BV = F.softmax(scores_BV, axis=-1).astype("float64") * is_possible_BV
    reached_BV = weight_BV.cumsum(axis=-1)
    return (reached_BV <= uniform_B1 * reached_BV[:, -1:]).sum(axis=-1)


class TokenChoice:
    """Greedy or sampled tokens, as the configuration says."""

    def __init__(self, config: GenerationConfig, num_rows: int):
        self._draws = RowDraws(config.seed, num_rows) if config.do_sample else None

    def __call__(self, scores_BV: Tensor) -> Tensor:
        """The next token of every row, `[B]` int64."""
        if self._draws is None:
            return scores_BV.argmax(axis=-1)
        return draw_tokens(scores_BV, self._draws.next())
