"""Deepstack: levels of the vision tower added to the first decoder layers' outputs."""

import paddle
from paddle import Tensor, nn


class DeepstackLayer(nn.Layer):
    """One indexed add and nothing else: no mask, no search, no transpose, no host read."""

    def forward(self, x_TD: Tensor, level_MD: Tensor, update_M: Tensor) -> Tensor:
        """Add each visual row of a level to its token row; gradients reach both.

        Args:
            x_TD: this rank's token rows.
            level_MD: this rank's rows of the level, `[M_local, D]`.
            update_M: int64 token row of each of them, in `[0, T)`.
        """
        return paddle.index_add(x_TD, update_M, 0, level_MD)
