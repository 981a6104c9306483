"""Activations, dropout of token rows, slices, and the cross entropy of tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

IGNORE_INDEX = -100
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate=True),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a configuration's `hidden_act` names.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; this package has {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, in one kernel; without `up` both are halves of `gate`'s last dim.

    Source: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202.
    """
    return F.swiglu(gate, up)


def slice_axis(x: Tensor, begin: int, end: int, axis: int = 0) -> Tensor:
    """`x[begin:end]` along an axis, as an operation of the graph even where it takes all of `x`.

    Paddle leaves `x[:n]` out of the graph where it takes everything. Autograd would then visit the
    layers in another order than on a rank that takes less, and collectives would not match.
    """
    return paddle.slice(x, [axis], [begin], [end])


class RowDropout(nn.Layer):
    """In training, zeroes entries of token rows with probability `p` and scales the others by
    `1 / (1 - p)`.

    Attributes:
        random: opens a context to draw in: that of another random state, where the rows differ from
            rank to rank.
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


def next_token_targets(labels_BL: Tensor) -> Tensor:
    """Labels shifted left by one, so that row i holds what row i predicts: `[B * L]` int64.

    The last position of every row of the batch predicts nothing and gets `IGNORE_INDEX`.
    """
    ignored = paddle.full([labels_BL.shape[0], 1], IGNORE_INDEX, dtype=labels_BL.dtype)
    return paddle.concat([labels_BL[:, 1:], ignored], axis=1).reshape([-1])


def token_loss(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the rows whose target is not `IGNORE_INDEX`, and their number.

    Logits are cast to float32 first: a bfloat16 sum over the vocabulary is too coarse. A sum and a
    count, not a mean: the caller divides by the count of the whole global batch. (Paddle's own mean
    divides by all rows, ignored ones too, when the ignored index is negative, in 3.3.1.)

    Returns:
        Two float32 scalars, sum and count.
    """
    total = F.cross_entropy(
        logits_TV.astype("float32"), targets_T, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    count = (targets_T != IGNORE_INDEX).astype("float32").sum()
    return total, count
