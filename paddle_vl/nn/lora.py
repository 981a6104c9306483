"""A low-rank adapter (LoRA) of a linear: `y = linear(x) + scaling * dropout(x) A B`.

DoRA multiplies the columns of the adapted weight by `scales = magnitude / norm`, with a trained
magnitude and the norm of each column of `weight + scaling * A B`, through which no gradient flows:
`y = linear(x) + (scales - 1) * (dropout(x) weight) + scales * scaling * dropout(x) A B`.

Shapes: I input and O output features of the linear, r the adapter's rank.

Source: Hu et al., https://arxiv.org/abs/2106.09685; Liu et al., https://arxiv.org/abs/2402.09353;
`scaling`, initial values and dropout as in PEFT.
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
    """An adapter's rank r, scaling, dropout of its input in training, and whether it is DoRA."""

    r: int
    scaling: float
    dropout: float = 0.0
    is_dora: bool = False


class LowRank(nn.Layer):
    """The adapter's output, to be added to the linear's; zero before training.

    Attributes:
        random: makes the context in which dropout draws; it switches the random state where the
            input differs from rank to rank.
        over_ranks: sums over the ranks that the input features are divided over.
        magnitude: of DoRA; None without.

    Args:
        in_features, out_features: of this rank's shard, where the linear is split over ranks.
        dtype: of A `[I, r]`, B `[r, O]` and magnitude `[O]`; that of the linear.
    """

    def __init__(self, in_features: int, out_features: int, settings: LowRankSettings, dtype):
        super().__init__()
        self.settings = settings
        self.magnitude: Tensor | None = None
        shapes = {"A": [in_features, settings.r], "B": [settings.r, out_features]}
        if settings.is_dora:
            shapes["magnitude"] = [out_features]
        for name, shape in shapes.items():
            factor = self.create_parameter(shape, dtype=dtype, default_initializer=Constant(0.0))
            setattr(self, name, factor)
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext
        self.over_ranks: Callable[[Tensor], Tensor] = _itself

    def forward(self, x: Tensor, columns: slice | None = None) -> Tensor:
        """`[..., I]` to `[..., O]`, or to a slice of the output columns."""
        return self.expanded(paddle.matmul(self.dropped(x), self.A), columns)

    @property
    def drops(self) -> bool:
        """Whether there is dropout now."""
        return self.training and self.settings.dropout > 0

    def dropped(self, x: Tensor) -> Tensor:
        """The input after dropout."""
        if not self.drops:
            return x
        with self.random():
            return dropout(x, self.settings.dropout)

    def expanded(self, inner: Tensor, columns: slice | None = None) -> Tensor:
        """The output, or a slice of its columns, for `[..., r]` rows times `A`."""
        B = self.B if columns is None else self.B[:, columns]
        return paddle.matmul(inner * self.settings.scaling, B)

    def product(self) -> Tensor:
        """`scaling * A B`, `[I, O]` float32, which merging adds to the linear's weight."""
        factors = (self.A.astype("float32"), self.B.astype("float32"))
        return paddle.matmul(*factors) * self.settings.scaling

    def norms(self, weight: Tensor) -> Tensor:
        """`[O]` float32: norms of the columns of a weight `[I, O]`, over all ranks' rows."""
        return self.over_ranks(weight.astype("float32").square().sum(axis=0)).sqrt()

    def scales(self, weight: Tensor) -> Tensor:
        """`[O]`: the magnitude over the norms of `weight + product()`, constants in backward.

        Norms are rounded as the magnitude is, so that a fresh adapter changes nothing.
        """
        assert self.magnitude is not None, "a linear without DoRA asks for no scales"
        with paddle.no_grad():
            norms = self.norms(weight.astype("float32") + self.product())
            norms = norms.astype(self.magnitude.dtype)
        return self.magnitude / norms

    @paddle.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """`[I, O]` float32: a weight with the adapter in it."""
        whole = weight.astype("float32") + self.product()
        if self.magnitude is None:
            return whole
        return whole * (self.magnitude.astype("float32") / self.norms(whole))


def _itself(x: Tensor) -> Tensor:
    return x


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
