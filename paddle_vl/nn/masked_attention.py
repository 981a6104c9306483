"""Softmax attention under any mask, with grouped key heads.

Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K query heads per
key head, H head width.
"""

from functools import cached_property

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.nn.backend import is_eager_cpu
from paddle_vl.nn.softmax_blocks import Block, SoftmaxAttention

# Finite, so that a query without a key averages all of them; any score vanishes beside it.
_MASKED_SCORE = -2.3819763e38


class AttentionMask:
    """Which keys each query sees: made once for all layers of a pass.

    Not a tuple: Paddle would look for tensors in it.

    Args:
        visible_BLS: bool.
    """

    def __init__(self, visible_BLS: Tensor):
        self.visible_BLS = visible_BLS
        self._biases: dict[int, Tensor] = {}

    @cached_property
    def has_key_BL11(self) -> Tensor:
        """float32, 1 where a query sees any key."""
        return self.visible_BLS.any(axis=-1).astype("float32").unsqueeze([-1, -1])

    @cached_property
    def all_see(self) -> bool:
        """Whether every query sees a key. A host read: for the CPU only."""
        return bool(self.visible_BLS.any(axis=-1).all())

    @cached_property
    def bias_B1LS(self) -> Tensor:
        """float32, 0 or the masked score, to be added to scores."""
        hidden = paddle.logical_not(self.visible_BLS).astype("float32")
        return (hidden * _MASKED_SCORE).unsqueeze(1)

    def bias(self, heads: int) -> Tensor:
        """`[B, heads, L, S]`: Paddle's CPU kernels are slow at broadcasting over a middle dim."""
        if heads not in self._biases:
            self._biases[heads] = paddle.concat([self.bias_B1LS] * heads, axis=1)
        return self._biases[heads]


def masked_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str = "eager",
) -> Tensor:
    """Each query sees the keys that the mask says; query head n reads key head n // G.

    Args:
        scale: of the scores.
        implementation: `eager` has float32 scores and gives a query without a key the average of
            all values; `sdpa` gives it zero, and leaves the dtype of scores to the kernel. Neither
            passes a gradient from such a query to queries and keys.

    Returns:
        `[B, L, N, H]`.

    Raises:
        ValueError: another implementation.
    """
    if implementation not in ("eager", "sdpa"):
        raise ValueError(f"attention implementation is {implementation!r}; 'eager' or 'sdpa'")
    by_hand = is_eager_cpu(q_BLNH)
    if by_hand:
        out_BLNH = _on_cpu(q_BLNH, k_BSKH, v_BSKH, mask, scale)
    elif implementation == "eager":
        out_BLNH = _composed(q_BLNH, k_BSKH, v_BSKH, mask, scale)
    else:
        # The kernel scales by H^-0.5, and takes a mask in the dtype of the queries only.
        factor = scale * q_BLNH.shape[-1] ** 0.5
        q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
        bias = mask.bias_B1LS.astype(q_BLNH.dtype)
        out_BLNH = F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, attn_mask=bias)
    if implementation == "sdpa" and not (by_hand and mask.all_see):
        out_BLNH = out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)
    return out_BLNH


def _on_cpu(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: AttentionMask, scale: float
) -> Tensor:
    batch, length, heads, width = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    factor = scale * width**0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    if not mask.all_see:
        # Scores of a query without a key are all equal anyway: this cuts their gradient.
        q_BLNH = q_BLNH * mask.has_key_BL11.astype(q_BLNH.dtype)
    # The query heads of a key head become rows of one product, so keys are never repeated.
    rows = length * heads // key_heads
    q_ZRH = q_BLNH.transpose([0, 2, 1, 3]).reshape([batch * key_heads, rows, width])
    k_ZSH, v_ZSH = (
        x.transpose([0, 2, 1, 3]).reshape([batch * key_heads, keys, width])
        for x in (k_BSKH, v_BSKH)
    )
    bias_ZRS = mask.bias(heads).reshape([batch * key_heads, rows, keys])
    whole = (Block(0, rows, 0, keys, lambda: bias_ZRS),)
    out_ZRH = SoftmaxAttention.apply(q_ZRH, k_ZSH, v_ZSH, whole, None)
    return out_ZRH.reshape([batch, heads, length, width]).transpose([0, 2, 1, 3])


def _composed(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: AttentionMask, scale: float
) -> Tensor:
    groups = q_BLNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (
        x if groups == 1 else x.repeat_interleave(groups, axis=2) for x in (k_BSKH, v_BSKH)
    )
    q_BNLH, k_BNSH = (x.transpose([0, 2, 1, 3]).astype("float32") for x in (q_BLNH, k_BSNH))
    scores = paddle.matmul(q_BNLH, k_BNSH, transpose_y=True) * scale
    masked = paddle.full([], _MASKED_SCORE, dtype="float32")
    scores = paddle.where(mask.visible_BLS.unsqueeze(1), scores, masked)
    probability = F.softmax(scores).astype(v_BSNH.dtype)
    return paddle.matmul(probability, v_BSNH.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3])
