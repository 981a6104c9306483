"""Softmax attention on the CPU in query blocks, with a hand-written backward pass.

A block is multiplied only with keys that some of its rows see, and a mask has the size of one
block's scores for one head, so time and memory grow with the visible scores only.

Shapes: Z any product of batch and heads, R query rows and S keys of one Z, H head width; G query
heads share a key head and are neighbouring rows.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import (
    MASKED_SCORE,
    AttentionMask,
    PackedSamples,
    causal_attention,
    eager_or_sdpa_attention,
    equal_segments_attention,
)
from paddle_vl.nn.operations import row_sum

_QUERY_BLOCK = 128


@causal_attention.register("cpu")
def _causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    batch, length, heads, _ = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    groups = heads // key_heads
    if packed is not None:
        # Offsets count over all batch rows, so the batch becomes one long row.
        q, k, v = (x.reshape([1, batch * length, *x.shape[2:]]) for x in (q_BLNH, k_BSKH, v_BSKH))
        out = _attention_in_blocks(q, k, v, packed_blocks(packed.offsets, groups))
        return out.reshape(q_BLNH.shape)
    key_bias_Z1S = None
    if key_bias_BS is not None:
        key_bias_Z1S = key_bias_BS.repeat_interleave(key_heads, axis=0).unsqueeze(1)
    blocks = causal_blocks(length, keys, groups)
    return _attention_in_blocks(q_BLNH, k_BSKH, v_BSKH, blocks, key_bias_Z1S)


def _attention_in_blocks(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    blocks: "tuple[Block, ...]",
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


@equal_segments_attention.register("cpu")
def _equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    _, heads, width = q_PNH.shape
    q, k, v = (
        x.reshape([count, length, heads, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * heads, length, width])
        for x in (q_PNH, k_PNH, v_PNH)
    )
    out = SoftmaxAttention.apply(q, k, v, (Block(0, length, 0, length),), None)
    return (
        out.reshape([count, heads, length, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * length, heads, width])
    )


@eager_or_sdpa_attention.register("cpu")
def _eager_or_sdpa_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str,
) -> Tensor:
    batch, length, heads, width = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    factor = scale * width**0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    if not mask.all_see:
        # The scores of a query without a key are equal anyway; this stops their gradient.
        q_BLNH = q_BLNH * mask.has_key_BL11.astype(q_BLNH.dtype)
    # The query heads of a key head become rows of one product, so keys are never repeated.
    rows = length * heads // key_heads
    q_ZRH = q_BLNH.transpose([0, 2, 1, 3]).reshape([batch * key_heads, rows, width])
    k_ZSH, v_ZSH = (
        x.transpose([0, 2, 1, 3]).reshape([batch * key_heads, keys, width])
        for x in (k_BSKH, v_BSKH)
    )
    bias_ZRS = mask.bias(heads).reshape([batch * key_heads, rows, keys])
    block = Block(0, rows, 0, keys, lambda: bias_ZRS)
    out_ZRH = SoftmaxAttention.apply(q_ZRH, k_ZSH, v_ZSH, (block,), None)
    out_BLNH = out_ZRH.reshape([batch, heads, length, width]).transpose([0, 2, 1, 3])
    if implementation == "sdpa" and not mask.all_see:
        out_BLNH = out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)
    return out_BLNH


class Block(NamedTuple):
    """Query rows `[begin, end)` and the keys `[first_key, end_key)` that they see.

    Blocks are in order: a block's keys begin where those of the block before it begin, or end.

    Attributes:
        bias: makes `[end - begin, end_key - first_key]` float32, `MASKED_SCORE` where a row does
            not see a key and 0 elsewhere; None if all rows see all of these keys.
    """

    begin: int
    end: int
    first_key: int
    end_key: int
    bias: Callable[[], Tensor] | None = None

    def rows(self, x_ZRH: Tensor) -> Tensor:
        """The block's rows of a tensor with one row per query."""
        takes_all = self.begin == 0 and self.end == x_ZRH.shape[1]
        return x_ZRH if takes_all else x_ZRH[:, self.begin : self.end]

    def keys(self, x_ZSH: Tensor) -> Tensor:
        """The block's rows of keys or values."""
        takes_all = self.first_key == 0 and self.end_key == x_ZSH.shape[1]
        return x_ZSH if takes_all else x_ZSH[:, self.first_key : self.end_key]


@lru_cache(maxsize=64)
def causal_blocks(length: int, keys: int, groups: int, first: int = 0) -> tuple[Block, ...]:
    """Blocks of causal attention; the last of `length` queries is aligned to the last of `keys`.

    Args:
        groups: query heads per key head, each a row of its own.
        first: number of queries, and of keys, before these.
    """
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        num_keys = keys - length + end
        bias = partial(_causal_bias, end - begin, num_keys, groups)
        blocks.append(
            Block(
                (first + begin) * groups,
                (first + end) * groups,
                first,
                first + num_keys,
                bias if length > 1 else None,
            )
        )
    return tuple(blocks)


@lru_cache(maxsize=16)
def packed_blocks(offsets: tuple[int, ...], groups: int) -> tuple[Block, ...]:
    """Blocks of causal attention within each segment, from row `offsets[i]` to `offsets[i + 1]`.

    Short neighbouring segments share a block, so that products do not become too small.
    """
    blocks: list[Block] = []
    for run in _runs(offsets):
        first, end = run[0], run[-1]
        if len(run) == 2:
            blocks += causal_blocks(end - first, end - first, groups, first)
        else:
            bias = _packed_bias(run, groups)
            blocks.append(Block(first * groups, end * groups, first, end, lambda b=bias: b))
    return tuple(blocks)


def _runs(offsets: Sequence[int]) -> list[list[int]]:
    """Offsets grouped by block: short neighbouring segments together, others alone."""
    runs: list[list[int]] = []
    for begin, end in pairwise(offsets):
        if runs and end - runs[-1][0] <= _QUERY_BLOCK:
            runs[-1].append(end)
        else:
            runs.append([begin, end])
    return runs


def _packed_bias(run: Sequence[int], groups: int) -> Tensor:
    segment = np.repeat(np.arange(len(run) - 1), np.diff(run))
    place = np.arange(segment.size)
    visible = (segment[:, None] == segment) & (place[:, None] >= place)
    bias = np.where(visible, 0.0, MASKED_SCORE).astype(np.float32)
    return paddle.to_tensor(np.repeat(bias, groups, axis=0))


def _causal_bias(queries: int, keys: int, groups: int) -> Tensor:
    """Causal bias of queries aligned to the last of `keys` keys."""
    past = keys - queries
    reach = _QUERY_BLOCK
    while reach < past:
        reach *= 2
    return _triangle(reach, groups)[: queries * groups, reach - past : reach + queries]


@lru_cache(maxsize=8)
def _triangle(reach: int, groups: int) -> Tensor:
    """Causal bias of a full query block with `reach` keys before its own."""
    query_row = np.repeat(np.arange(_QUERY_BLOCK), groups) + reach
    hidden = np.arange(reach + _QUERY_BLOCK)[None, :] > query_row[:, None]
    return paddle.to_tensor(np.where(hidden, MASKED_SCORE, 0.0).astype(np.float32))


class SoftmaxAttention(PyLayer):
    """`softmax(q @ k^T / sqrt(H) + bias) @ v` by blocks, in the inputs' dtype.

    Keeps the probabilities p. With delta the row sums of grad * out, the gradient of the scores is
    `p * (grad @ v^T - delta)`, as in FlashAttention (Dao et al., https://arxiv.org/abs/2205.14135).

    Takes `[Z, R, H]` queries, `[Z, S, H]` keys and values, `Block`s that cover all keys, and a bias
    `[Z, 1, S]` of every key or None; returns `[Z, R, H]`.
    """

    @staticmethod
    def forward(ctx, q_ZRH, k_ZSH, v_ZSH, blocks, key_bias_Z1S):
        ctx.blocks, ctx.scale = blocks, q_ZRH.shape[-1] ** -0.5
        ctx.needs = [not x.stop_gradient for x in (q_ZRH, k_ZSH, v_ZSH)]
        q_ZRH = q_ZRH * ctx.scale
        probabilities, outputs = [], []
        for block in blocks:
            scores = paddle.matmul(block.rows(q_ZRH), block.keys(k_ZSH), transpose_y=True)
            if block.bias is not None:
                scores.add_(block.bias())
            if key_bias_Z1S is not None:
                scores.add_(key_bias_Z1S[:, :, block.first_key : block.end_key])
            probability = F.softmax(scores)
            probabilities.append(probability)
            outputs.append(paddle.matmul(probability, block.keys(v_ZSH)))
        out = outputs[0] if len(outputs) == 1 else paddle.concat(outputs, axis=1)
        ctx.save_for_backward(q_ZRH, k_ZSH, v_ZSH, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx, grad):
        q_ZRH, k_ZSH, v_ZSH, out, *probabilities = ctx.saved_tensor()
        # [grad, -delta] @ [v, 1]^T gives grad @ v^T - delta without a pass over the scores.
        grad_and_delta = paddle.concat([grad, -row_sum(grad * out)], axis=-1)
        v_and_one = paddle.concat([v_ZSH, paddle.ones_like(v_ZSH[:, :, :1])], axis=-1)
        grads_q, grads_k, grads_v, first_key = [], [], [], None
        for block, probability in zip(ctx.blocks, probabilities, strict=True):
            score_grad = paddle.matmul(
                block.rows(grad_and_delta), block.keys(v_and_one), transpose_y=True
            )
            score_grad.multiply_(probability)
            grads_q.append(paddle.matmul(score_grad, block.keys(k_ZSH)))
            block_k = paddle.matmul(score_grad, block.rows(q_ZRH), transpose_x=True)
            block_v = paddle.matmul(probability, block.rows(grad), transpose_x=True)
            if block.first_key == first_key:
                # A later block sees more keys: the sum of the earlier blocks is a prefix of them.
                num_keys = block.end_key - first_key
                block_k = block_k + _pad_keys(grads_k.pop(), num_keys)
                block_v = block_v + _pad_keys(grads_v.pop(), num_keys)
            first_key = block.first_key
            grads_k.append(block_k)
            grads_v.append(block_v)
        grad_q, grad_k, grad_v = (
            parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)
            for parts in (grads_q, grads_k, grads_v)
        )
        grads = (grad_q * ctx.scale, grad_k, grad_v)
        # Paddle requires None for an input without gradient.
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


def _pad_keys(x_ZSH: Tensor, num_keys: int) -> Tensor:
    batch, keys, width = x_ZSH.shape
    return paddle.concat(
        [x_ZSH, paddle.zeros([batch, num_keys - keys, width], x_ZSH.dtype)], axis=1
    )
