"""Dropout of token rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import paddle.nn.functional as F
from paddle import Tensor, nn


class RowDropout(nn.Layer):
    """Zeroes entries of token rows with probability `p` in training and scales the others up.

    Attributes:
        random: what is drawn inside of: another generator where the rows are a rank's own.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x_TD: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x_TD
        with self.random():
            return F.dropout(x_TD, self.p)
