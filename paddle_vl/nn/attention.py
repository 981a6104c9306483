"""Softmax attention: causal with grouped key heads, and bidirectional within segments.

Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K query heads per
key head, H head width, P packed rows.

On a GPU, and in a traced program, both go through Paddle's `scaled_dot_product_attention`, or for
packed samples its FlashMask kernel. On the CPU those are a composition several times slower than
`paddle_vl.nn.softmax_blocks`, or missing.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.batch.positions import key_ends
from paddle_vl.nn.backend import is_eager_cpu
from paddle_vl.nn.softmax_blocks import (
    MASKED_SCORE,
    Block,
    SoftmaxAttention,
    causal_blocks,
    packed_blocks,
)

__all__ = ["MASKED_SCORE", "PackedSamples", "causal_attention", "segment_attention"]


class PackedSamples:
    """Where the samples in the rows of a batch begin; one for all layers of a step.

    Not a tuple: Paddle would look for tensors in it.

    Args:
        cu_seqlens: see `paddle_vl.batch.positions`; on the host.
        length: padded length of a row.
    """

    def __init__(self, cu_seqlens: np.ndarray, length: int):
        self.offsets = tuple(cu_seqlens.tolist())
        self._key_ends_BL = key_ends(cu_seqlens, length)

    @cached_property
    def key_ends_B1L1(self) -> Tensor:
        """int32: the query of its row from which on each key is not seen."""
        return paddle.to_tensor(self._key_ends_BL[:, None, :, None])

    def dense_mask(self) -> Tensor:
        """`[B, 1, L, L]` float32 additive mask."""
        place = np.arange(self._key_ends_BL.shape[1])
        visible = place[:, None] < self._key_ends_BL[:, None, None, :]
        visible &= place[:, None] >= place
        return paddle.to_tensor(np.where(visible, 0.0, MASKED_SCORE).astype(np.float32))


def causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """Each query sees the keys up to its own position; the last query is aligned to the last key.

    Query head n reads key head n // G. Scores are scaled by H^-0.5, softmax is in float32.

    Args:
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None masks nothing.
        packed: samples that share rows, of which each sees itself only; then S is L, and there is
            no `key_bias_BS`: padding is a segment of its own.

    Returns:
        `[B, L, N, H]`. A query that sees no unmasked key gets a finite average of masked ones.
    """
    batch, length, heads, _ = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    if not is_eager_cpu(q_BLNH):
        if packed is not None:
            return _packed_by_kernel(q_BLNH, k_BSKH, v_BSKH, packed)
        if key_bias_BS is None and length == keys:
            return _by_kernel(q_BLNH, k_BSKH, v_BSKH, is_causal=True)
        mask = _dense_causal_mask(batch, length, keys, key_bias_BS)
        return _by_kernel(q_BLNH, k_BSKH, v_BSKH, mask)
    groups = heads // key_heads
    if packed is not None:
        # Segments are counted over all rows of the batch: one row of them.
        whole = [x.reshape([1, batch * length, *x.shape[2:]]) for x in (q_BLNH, k_BSKH, v_BSKH)]
        out = _by_blocks(*whole, packed_blocks(packed.offsets, groups))
        return out.reshape(q_BLNH.shape)
    key_bias_Z1S = None
    if key_bias_BS is not None:
        key_bias_Z1S = key_bias_BS.repeat_interleave(key_heads, axis=0).unsqueeze(1)
    blocks = causal_blocks(length, keys, groups)
    return _by_blocks(q_BLNH, k_BSKH, v_BSKH, blocks, key_bias_Z1S)


def _by_blocks(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    blocks: tuple[Block, ...],
    key_bias_Z1S: Tensor | None = None,
) -> Tensor:
    batch, length, heads, width = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    groups = heads // key_heads
    # The G query heads of a key head become rows of one product, so keys are never repeated.
    q_ZRH = (
        q_BLNH.reshape([batch, length, key_heads, groups * width])
        .transpose([0, 2, 1, 3])
        .reshape([batch * key_heads, length * groups, width])
    )
    k_ZSH, v_ZSH = (
        x.transpose([0, 2, 1, 3]).reshape([batch * key_heads, keys, width])
        for x in (k_BSKH, v_BSKH)
    )
    out_ZRH = SoftmaxAttention.apply(q_ZRH, k_ZSH, v_ZSH, blocks, key_bias_Z1S)
    return (
        out_ZRH.reshape([batch, key_heads, length, groups * width])
        .transpose([0, 2, 1, 3])
        .reshape([batch, length, heads, width])
    )


def _by_kernel(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if mask is not None:
        # The kernels take a mask in the dtype of the queries only.
        mask = mask.astype(q_BLNH.dtype)
    return F.scaled_dot_product_attention(
        q_BLNH, k_BSKH, v_BSKH, attn_mask=mask, is_causal=is_causal
    )


def _packed_by_kernel(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, packed: PackedSamples
) -> Tensor:
    # FlashMask has no kernel for float32, and none for the CPU: this call has not run here.
    if q_BLNH.dtype in (paddle.bfloat16, paddle.float16):
        return F.flashmask_attention(q_BLNH, k_BLKH, v_BLKH, packed.key_ends_B1L1, causal=True)
    return _by_kernel(q_BLNH, k_BLKH, v_BLKH, packed.dense_mask())


def segment_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Sequence[tuple[int, int]]
) -> Tensor:
    """Rows see the rows of their own segment, all of them.

    Args:
        segments: (count, length) of runs of equal consecutive segments, on the host; the sum of
            count * length is P. Each run is one batched product.

    Returns:
        `[P, N, H]`.
    """
    if len(segments) == 1:
        return _equal_segments(q_PNH, k_PNH, v_PNH, *segments[0])
    sizes = [count * length for count, length in segments]
    q_runs, k_runs, v_runs = (paddle.split(x, sizes, axis=0) for x in (q_PNH, k_PNH, v_PNH))
    return paddle.concat(
        [
            _equal_segments(q_runs[i], k_runs[i], v_runs[i], *segment)
            for i, segment in enumerate(segments)
        ],
        axis=0,
    )


def _equal_segments(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int) -> Tensor:
    _, heads, width = q_PNH.shape
    split = [count, length, heads, width]
    if not is_eager_cpu(q_PNH):
        out = F.scaled_dot_product_attention(*(x.reshape(split) for x in (q_PNH, k_PNH, v_PNH)))
        return out.reshape([-1, heads, width])
    q, k, v = (
        x.reshape(split).transpose([0, 2, 1, 3]).reshape([count * heads, length, width])
        for x in (q_PNH, k_PNH, v_PNH)
    )
    whole = (Block(0, length, 0, length),)
    out = SoftmaxAttention.apply(q, k, v, whole, None)
    return (
        out.reshape([count, heads, length, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * length, heads, width])
    )


def _dense_causal_mask(
    batch: int, length: int, keys: int, key_bias_BS: Tensor | None
) -> Tensor | None:
    """`[B, 1, L, S]` additive mask, as flash attention wants it: it repeats none over the batch.

    None where every query sees every key: there is one, the last.
    """
    if length == 1:
        return None if key_bias_BS is None else key_bias_BS.unsqueeze([1, 2])
    allowed = paddle.tril(paddle.ones([length, keys]), keys - length)
    mask = ((1.0 - allowed) * MASKED_SCORE).unsqueeze([0, 1])
    if key_bias_BS is None:
        return mask.expand([batch, 1, length, keys])
    return mask + key_bias_BS.unsqueeze([1, 2])
