"""Softmax attention on the CPU: query blocks against the keys they can see, with its own backward.

No block meets keys that none of its rows can see, and no mask is larger than a block's scores for
one head: the work and the memory of long rows are those of the scores that count.

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

from paddle_vl.nn.backend import row_sum

# Below any score, and finite: a row that sees padding only averages it instead of giving NaN.
MASKED_SCORE = -1e30
_QUERY_BLOCK = 128


class Block(NamedTuple):
    """Query rows `[begin, end)` and the keys `[first_key, end_key)` that they can see.

    Blocks are in order: one begins with the key of the block before it, or where its keys end.
    """

    begin: int
    end: int
    first_key: int
    end_key: int
    # [end - begin, end_key - first_key], MASKED_SCORE where a row may not look.
    bias: Callable[[], Tensor] | None = None

    def rows(self, x_ZRH: Tensor) -> Tensor:
        whole = self.begin == 0 and self.end == x_ZRH.shape[1]
        return x_ZRH if whole else x_ZRH[:, self.begin : self.end]

    def keys(self, x_ZSH: Tensor) -> Tensor:
        whole = self.first_key == 0 and self.end_key == x_ZSH.shape[1]
        return x_ZSH if whole else x_ZSH[:, self.first_key : self.end_key]


@lru_cache(maxsize=64)
def causal_blocks(length: int, keys: int, groups: int, first: int = 0) -> tuple[Block, ...]:
    """Each of `length` queries sees the keys up to its own, the last query's being the last one.

    Args:
        groups: rows of each query.
        first: queries and keys before these, which see each other and nothing here.
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
    """Causal attention within each of the segments that begin at these rows; the last is the end.

    Short neighbours share a block, so that many small samples do not become many small products.
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
    """Offsets of neighbours that fit a block together, of others alone."""
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
    """The last `queries` of `keys` keys are the queries' own."""
    past = keys - queries
    reach = _QUERY_BLOCK
    while reach < past:
        reach *= 2
    return _triangle(reach, groups)[: queries * groups, reach - past : reach + queries]


@lru_cache(maxsize=8)
def _triangle(reach: int, groups: int) -> Tensor:
    """Of a whole block of queries, with `reach` keys before its own."""
    query_row = np.repeat(np.arange(_QUERY_BLOCK), groups) + reach
    hidden = np.arange(reach + _QUERY_BLOCK)[None, :] > query_row[:, None]
    return paddle.to_tensor(np.where(hidden, MASKED_SCORE, 0.0).astype(np.float32))


class SoftmaxAttention(PyLayer):
    """Probabilities are kept; the score gradient is `p * (grad @ v - delta)`, one product.

    Takes `[Z, R, H]` queries, `[Z, S, H]` keys and values, their `Block`s, whose keys are all keys,
    and a bias `[Z, 1, S]` of every key or None; returns `[Z, R, H]`.
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
                # A later block sees more keys: what earlier ones gathered is a prefix of it.
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
        # Paddle wants None, and nothing else, for an input that takes no gradient.
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


def _pad_keys(x_ZSH: Tensor, num_keys: int) -> Tensor:
    batch, keys, width = x_ZSH.shape
    return paddle.concat(
        [x_ZSH, paddle.zeros([batch, num_keys - keys, width], x_ZSH.dtype)], axis=1
    )
