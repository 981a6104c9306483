"""The losses of both policies, as the sums and counts of every sample and as the original's means.

Shapes: B batch, C steps of a chunk, A action values, L slots of tokens, V their vocabulary.
"""

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor


class LossTerms(NamedTuple):
    """A loss with its parts.

    Attributes:
        mean: scalar, what the original trains on.
        sums, counts: float32 `[B]`, over what counts in each sample.
    """

    mean: Tensor
    sums: Tensor
    counts: Tensor


def flow_loss(target_BCA: Tensor, velocity_BCA: Tensor, counts_BCA: Tensor) -> LossTerms:
    """Mean squared error of the velocity over what counts (bool), 0 where nothing does."""
    counts_BCA = counts_BCA.astype("float32")
    squares = (target_BCA - velocity_BCA).square() * counts_BCA
    mean = squares.sum() / (counts_BCA.sum() + 1e-8)
    return LossTerms(mean, squares.sum(axis=[1, 2]), counts_BCA.sum(axis=[1, 2]))


def flow_counts(
    is_delayed_BC: Tensor,
    num_values: int,
    is_pad_BC: Tensor | None = None,
    real_dim_B: Tensor | None = None,
) -> Tensor:
    """`[B, C, A]` bool: steps that are neither given in advance nor padding, values in use.

    Args:
        real_dim_B: how many values of an action each sample's robot has; None for all.
    """
    counts_BC = paddle.logical_not(is_delayed_BC)
    if is_pad_BC is not None:
        counts_BC = paddle.logical_and(counts_BC, paddle.logical_not(is_pad_BC))
    counts_BCA = counts_BC.unsqueeze(-1).expand([*counts_BC.shape, num_values])
    if real_dim_B is None:
        return counts_BCA
    in_use = paddle.arange(num_values) < real_dim_B.astype("int64").unsqueeze([1, 2])
    return paddle.logical_and(counts_BCA, in_use)


def token_slot_loss(logits_BLV: Tensor, tokens_BL: Tensor, masks_BL: Tensor) -> LossTerms:
    """Cross entropy of tokens in float32; the mean is over all slots, padding too."""
    batch, length, vocab = logits_BLV.shape
    masks_BL = masks_BL.astype("float32")
    losses = F.cross_entropy(
        logits_BLV.reshape([-1, vocab]).astype("float32"),
        tokens_BL.reshape([-1]),
        reduction="none",
    )
    losses_BL = losses.reshape([batch, length]) * masks_BL
    return LossTerms(losses_BL.mean(), losses_BL.sum(axis=1), masks_BL.sum(axis=1))
