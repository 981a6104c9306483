"""Who sees whom: blocks of tokens, and positions that skip padding.

Shapes: B batch, L prefix tokens, C suffix tokens. Masks of tokens are True for real ones.

A token that begins a block has mark 1, one that joins the block before it 0. Tokens see all of
their own block and of earlier ones. Marks 0 0 0 | 1 0 | 1 | 1 are three tokens that see each other,
two that see these and each other, and two causal ones:

    1 1 1 0 0 0 0
    1 1 1 0 0 0 0
    1 1 1 0 0 0 0
    1 1 1 1 1 0 0
    1 1 1 1 1 0 0
    1 1 1 1 1 1 0
    1 1 1 1 1 1 1
"""

import paddle
from paddle import Tensor


def block_mask(pad_masks_BL: Tensor, att_masks_BL: Tensor) -> Tensor:
    """Which tokens each token sees: `[B, L, L]` bool, nothing to or from padding.

    Args:
        att_masks_BL: marks, bool or int.
    """
    block_BL = paddle.cumsum(att_masks_BL.astype("int64"), axis=1)
    earlier = block_BL.unsqueeze(1) <= block_BL.unsqueeze(2)
    real = paddle.logical_and(pad_masks_BL.unsqueeze(1), pad_masks_BL.unsqueeze(2))
    return paddle.logical_and(earlier, real)


def suffix_mask(prefix_pad_BL: Tensor, pad_masks_BC: Tensor, att_masks_BC: Tensor) -> Tensor:
    """`[B, C, L + C]` bool: a suffix sees all real tokens of the prefix, and itself by blocks."""
    cross = paddle.logical_and(prefix_pad_BL.unsqueeze(1), pad_masks_BC.unsqueeze(2))
    return paddle.concat([cross, block_mask(pad_masks_BC, att_masks_BC)], axis=2)


def prefix_positions(pad_masks_BL: Tensor) -> Tensor:
    """int64 `[B, L]`: real tokens count up from 0; padding has the position before it, or -1."""
    return paddle.cumsum(pad_masks_BL.astype("int64"), axis=1) - 1


def suffix_positions(prefix_pad_BL: Tensor, num_tokens: int) -> Tensor:
    """int64 `[B, C]`: on from the number of real tokens in the prefix."""
    first_B1 = prefix_pad_BL.astype("int64").sum(axis=1, keepdim=True)
    return first_B1 + paddle.arange(num_tokens, dtype="int64")
