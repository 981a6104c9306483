"""Softmax attention: causal with grouped key heads, and bidirectional within segments.

Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K query heads per
key head, H head width, P packed rows; Z any product of batch and heads, R query rows of one Z.

On a GPU, and in a traced program, both go through Paddle's `scaled_dot_product_attention`. On the
CPU that is a composition several times slower than the one here, which keeps the probabilities,
writes its own backward pass, and for causal attention cuts the queries into blocks so that no
block meets keys it cannot see.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.backend import is_eager_cpu, row_sum

# Below any score, and finite: a row that sees padding only averages it instead of giving NaN.
MASKED_SCORE = -1e30
_QUERY_BLOCK = 128


def causal_attention(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, key_bias_BS: Tensor | None = None
) -> Tensor:
    """Each query sees the keys up to its own position; the last query is aligned to the last key.

    Query head n reads key head n // G. Scores are scaled by H^-0.5, softmax is in float32.

    Args:
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None masks nothing.

    Returns:
        `[B, L, N, H]`. A query that sees no unmasked key gets a finite average of masked ones.
    """
    batch, length, heads, width = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    if not is_eager_cpu(q_BLNH):
        mask = _dense_causal_mask(length, keys, key_bias_BS)
        if mask is not None:
            # The kernels take a mask in the dtype of the queries only.
            mask = mask.astype(q_BLNH.dtype)
        return F.scaled_dot_product_attention(
            q_BLNH, k_BSKH, v_BSKH, attn_mask=mask, is_causal=mask is None
        )
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
    blocks = _causal_blocks(length, keys, groups)
    key_bias_Z1S = None
    if key_bias_BS is not None:
        key_bias_Z1S = key_bias_BS.repeat_interleave(key_heads, axis=0).unsqueeze(1)
    out_ZRH = _SoftmaxAttention.apply(q_ZRH, k_ZSH, v_ZSH, blocks, key_bias_Z1S)
    return (
        out_ZRH.reshape([batch, key_heads, length, groups * width])
        .transpose([0, 2, 1, 3])
        .reshape([batch, length, heads, width])
    )


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
    whole = (_Block(0, length, length, None),)
    out = _SoftmaxAttention.apply(q, k, v, whole, None)
    return (
        out.reshape([count, heads, length, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * length, heads, width])
    )


class _Block(NamedTuple):
    """Query rows `[begin, end)` and the keys `[0, num_keys)` that they can see."""

    begin: int
    end: int
    num_keys: int
    bias: Tensor | None  # [end - begin, num_keys], MASKED_SCORE where a row may not look


@lru_cache(maxsize=64)
def _causal_blocks(length: int, keys: int, groups: int) -> tuple[_Block, ...]:
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        num_keys = keys - length + end
        query_row = np.repeat(np.arange(begin, end), groups) + keys - length
        hidden = np.arange(num_keys)[None, :] > query_row[:, None]
        bias = paddle.to_tensor(np.where(hidden, MASKED_SCORE, 0.0).astype(np.float32))
        blocks.append(_Block(begin * groups, end * groups, num_keys, bias if length > 1 else None))
    return tuple(blocks)


def _dense_causal_mask(length: int, keys: int, key_bias_BS: Tensor | None) -> Tensor | None:
    """`[B, 1, L, S]` additive mask, or None when the kernel's own causal rule says the same."""
    if key_bias_BS is None and length == keys:
        return None
    allowed = paddle.tril(paddle.ones([length, keys]), keys - length)
    mask = ((1.0 - allowed) * MASKED_SCORE).unsqueeze([0, 1])
    return mask if key_bias_BS is None else mask + key_bias_BS.unsqueeze([1, 2])


class _SoftmaxAttention(PyLayer):
    """Probabilities are kept; the score gradient is `p * (grad @ v - delta)`, one product."""

    @staticmethod
    def forward(ctx, q_ZRH, k_ZSH, v_ZSH, blocks, key_bias_Z1S):
        ctx.blocks, ctx.scale = blocks, q_ZRH.shape[-1] ** -0.5
        ctx.needs = [not x.stop_gradient for x in (q_ZRH, k_ZSH, v_ZSH)]
        q_ZRH = q_ZRH * ctx.scale
        probabilities, outputs = [], []
        for block in blocks:
            whole = block.num_keys == k_ZSH.shape[1]
            k_visible = k_ZSH if whole else k_ZSH[:, : block.num_keys]
            v_visible = v_ZSH if whole else v_ZSH[:, : block.num_keys]
            scores = paddle.matmul(_rows(q_ZRH, block), k_visible, transpose_y=True)
            if block.bias is not None:
                scores.add_(block.bias)
            if key_bias_Z1S is not None:
                scores.add_(key_bias_Z1S[:, :, : block.num_keys])
            probability = F.softmax(scores)
            probabilities.append(probability)
            outputs.append(paddle.matmul(probability, v_visible))
        out = outputs[0] if len(outputs) == 1 else paddle.concat(outputs, axis=1)
        ctx.save_for_backward(q_ZRH, k_ZSH, v_ZSH, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx, grad):
        q_ZRH, k_ZSH, v_ZSH, out, *probabilities = ctx.saved_tensor()
        # [grad, -delta] @ [v, 1]^T gives grad @ v^T - delta without a pass over the scores.
        grad_and_delta = paddle.concat([grad, -row_sum(grad * out)], axis=-1)
        v_and_one = paddle.concat([v_ZSH, paddle.ones_like(v_ZSH[:, :, :1])], axis=-1)
        grads_q, grad_k, grad_v = [], None, None
        for block, probability in zip(ctx.blocks, probabilities, strict=True):
            whole = block.num_keys == k_ZSH.shape[1]
            k_visible = k_ZSH if whole else k_ZSH[:, : block.num_keys]
            v_visible = v_and_one if whole else v_and_one[:, : block.num_keys]
            score_grad = paddle.matmul(_rows(grad_and_delta, block), v_visible, transpose_y=True)
            score_grad.multiply_(probability)
            grads_q.append(paddle.matmul(score_grad, k_visible))
            block_k = paddle.matmul(score_grad, _rows(q_ZRH, block), transpose_x=True)
            block_v = paddle.matmul(probability, _rows(grad, block), transpose_x=True)
            # A later block sees more keys: what earlier ones gathered is a prefix of it.
            grad_k = block_k if grad_k is None else block_k + _pad_keys(grad_k, block.num_keys)
            grad_v = block_v if grad_v is None else block_v + _pad_keys(grad_v, block.num_keys)
        grad_q = grads_q[0] if len(grads_q) == 1 else paddle.concat(grads_q, axis=1)
        grads = (grad_q * ctx.scale, grad_k, grad_v)
        # Paddle wants None, and nothing else, for an input that takes no gradient.
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


def _rows(x_ZRH: Tensor, block: _Block) -> Tensor:
    whole = block.begin == 0 and block.end == x_ZRH.shape[1]
    return x_ZRH if whole else x_ZRH[:, block.begin : block.end]


def _pad_keys(x_ZSH: Tensor, num_keys: int) -> Tensor:
    batch, keys, width = x_ZSH.shape
    return paddle.concat(
        [x_ZSH, paddle.zeros([batch, num_keys - keys, width], x_ZSH.dtype)], axis=1
    )
