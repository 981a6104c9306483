"""A low-rank adapter (LoRA) of a linear: `y = linear(x) + scaling * dropout(x) A B`.

Shapes: I input and O output features of the linear, r the adapter's rank.

Source: Hu et al., https://arxiv.org/abs/2106.09685; `scaling` and initial values as in PEFT.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Constant

from paddle_vl.nn.operations import dropout


@dataclass(frozen=True)
class LowRankSettings:
    """An adapter's rank r, scaling, and dropout of its input in training."""

    r: int
    scaling: float
    dropout: float = 0.0


class LowRank(nn.Layer):
    """The adapter's output, to be added to the linear's; zero before training.

    Attributes:
        random: makes the context in which dropout draws; it switches the random state where the
            input differs from rank to rank.

    Args:
        in_features, out_features: of this rank's shard, where the linear is split over ranks.
        dtype: of A `[I, r]` and B `[r, O]`; that of the linear.
    """

    def __init__(self, in_features: int, out_features: int, settings: LowRankSettings, dtype):
        super().__init__()
        self.settings = settings
        shapes = {"A": [in_features, settings.r], "B": [settings.r, out_features]}
        for name, shape in shapes.items():
            factor = self.create_parameter(shape, dtype=dtype, default_initializer=Constant(0.0))
            self.add_parameter(name, factor)
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x: Tensor, columns: slice | None = None) -> Tensor:
        """`[..., I]` to `[..., O]`, or to a slice of the output columns."""
        B = self.B if columns is None else self.B[:, columns]
        return self.projected(self.dropped(x), self.A, B)

    def dropped(self, x: Tensor) -> Tensor:
        """The input after dropout."""
        if not (self.training and self.settings.dropout):
            return x
        with self.random():
            return dropout(x, self.settings.dropout)

    def projected(self, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """The output for an input after dropout, with these factors."""
        return paddle.matmul(paddle.matmul(x, A) * self.settings.scaling, B)

    def product(self) -> Tensor:
        """`scaling * A B`, `[I, O]` float32, which merging adds to the linear's weight."""
        factors = (self.A.astype("float32"), self.B.astype("float32"))
        return paddle.matmul(*factors) * self.settings.scaling


def initial_factor(
    rng: np.random.Generator, shape: tuple[int, int], is_a: bool, law: str
) -> np.ndarray:
    """Initial values of `A` `[I, r]` or `B` `[r, O]`, float32.

    Args:
        law: "peft": B zero, A uniform in [-1 / sqrt(I), 1 / sqrt(I)], kaiming_uniform_(a=sqrt(5))
            with its bound sqrt(6 / ((1 + a^2) * I)); "openpi": both N(0, 0.01).
    """
    if law == "openpi":
        return rng.normal(scale=0.01, size=shape).astype(np.float32)
    bound = shape[0] ** -0.5 if is_a else 0.0
    return rng.uniform(-bound, bound, shape).astype(np.float32)
