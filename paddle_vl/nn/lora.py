"""A low-rank adapter beside a linear: `y = base(x) + scaling * dropout(x) A B`.

Shapes: I input and O output features of the linear, r the rank.

Source: Hu et al., LoRA, https://arxiv.org/abs/2106.09685; `scaling` and initial values as in PEFT.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant


@dataclass(frozen=True)
class LowRankSettings:
    """Rank, the factor on the adapter's output, and the dropout of its input in training."""

    r: int
    scaling: float
    dropout: float = 0.0


class LowRank(nn.Layer):
    """The adapter's product, to be added to the linear's; zero until it is trained.

    Args:
        in_features, out_features: this rank's, where the linear is split.
        dtype: of A `[I, r]` and B `[r, O]`, the linear's.
    """

    def __init__(self, in_features: int, out_features: int, settings: LowRankSettings, dtype):
        super().__init__()
        self.settings = settings
        shapes = {"A": [in_features, settings.r], "B": [settings.r, out_features]}
        for name, shape in shapes.items():
            factor = self.create_parameter(shape, dtype=dtype, default_initializer=Constant(0.0))
            self.add_parameter(name, factor)
        # What dropout draws inside of: another generator where the input is a rank's own.
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x: Tensor, columns: slice | None = None) -> Tensor:
        """`[..., I]` to `[..., O]`, or to some of the output columns."""
        if self.training and self.settings.dropout:
            with self.random():
                x = F.dropout(x, self.settings.dropout)
        B = self.B if columns is None else self.B[:, columns]
        return paddle.matmul(paddle.matmul(x, self.A) * self.settings.scaling, B)

    def product(self) -> Tensor:
        """`scaling * A B`, `[I, O]` float32: what merging adds to the linear's weight."""
        factors = (self.A.astype("float32"), self.B.astype("float32"))
        return paddle.matmul(*factors) * self.settings.scaling


def initial_a(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A fresh `A` `[I, r]` float32, uniform within `1 / sqrt(I)`.

    That is PEFT's kaiming_uniform_(a=sqrt(5)): the bound is sqrt(6 / ((1 + a^2) * I)).
    """
    bound = shape[0] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)
