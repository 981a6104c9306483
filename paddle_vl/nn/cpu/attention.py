"""Softmax attention on the CPU in query blocks, with a hand-written backward pass.

A block is multiplied only with keys that some of its rows see, and a mask has the size of one
block's scores for one head, so time and memory grow with the visible scores only. A block runs over
chunks of heads whose scores stay in the processor's caches; the backward pass computes their
probabilities again.

Shapes: B batch, L queries and S keys of a batch entry, N query heads, K key heads, H head width; Z
any product of batch and key heads, R query rows of one Z: G query heads share a key head and are
neighbouring rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import PackedSamples, with_averages
from paddle_vl.nn.attention_masks import MASKED_SCORE, AttentionMask
from paddle_vl.nn.cpu.kernels import (
    contiguous,
    minus_column_times_,
    plus_,
    softmax_,
)
from paddle_vl.nn.operations import row_sum

QUERY_BLOCK = 128
# Bytes of the scores of a chunk: few enough to stay in the processor's caches.
_CHUNK_BYTES = 8 << 20


def causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """`nn.attention.causal_attention`."""
    batch, length, heads, _ = q_BLNH.shape
    keys, key_heads = k_BSKH.shape[1], k_BSKH.shape[2]
    groups = heads // key_heads
    if packed is not None:
        # Offsets count over all batch rows, so the batch becomes one long row.
        q, k, v = (x.reshape([1, batch * length, *x.shape[2:]]) for x in (q_BLNH, k_BSKH, v_BSKH))
        out = attention_in_blocks(q, k, v, (packed_blocks(packed.offsets, groups),))
        return out.reshape(q_BLNH.shape)
    key_bias_Z1S = None
    if key_bias_BS is not None:
        key_bias_Z1S = key_bias_BS.repeat_interleave(key_heads, axis=0).unsqueeze(1)
    blocks = causal_blocks(length, keys, groups)
    return attention_in_blocks(q_BLNH, k_BSKH, v_BSKH, (blocks,), key_bias_Z1S)


def attention_in_blocks(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    parts: "Parts",
    key_bias_Z1S: Tensor | None = None,
) -> Tensor:
    """Attention `[B, L, N, H]` with scores scaled by H^-0.5.

    Args:
        parts: of Z = B * K; rows of a block are its queries, each with its G heads.
        key_bias_Z1S: added to every score of a key.
    """
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
    out_ZRH = SoftmaxAttention.apply(q_ZRH, k_ZSH, v_ZSH, parts, key_bias_Z1S)
    return (
        out_ZRH.reshape([batch, key_heads, length, groups * width])
        .transpose([0, 2, 1, 3])
        .reshape([batch, length, heads, width])
    )


def equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    """`nn.attention.equal_segments_attention`."""
    _, heads, width = q_PNH.shape
    q, k, v = (
        x.reshape([count, length, heads, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * heads, length, width])
        for x in (q_PNH, k_PNH, v_PNH)
    )
    out = SoftmaxAttention.apply(q, k, v, ((Block(0, length, 0, length),),), None)
    return (
        out.reshape([count, heads, length, width])
        .transpose([0, 2, 1, 3])
        .reshape([count * length, heads, width])
    )


class Block(NamedTuple):
    """Query rows `[begin, end)` and the keys `[first_key, end_key)` that they see.

    Blocks are in order: a block's keys begin where those of the block before it begin, or end.

    Attributes:
        bias: makes `[end - begin, end_key - first_key]` float32, or one such matrix for each of Z,
            `MASKED_SCORE` where a row does not see a key and 0 elsewhere; None if all rows see all
            of these keys.
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


# Blocks of each of equal parts of Z, for instance of a batch entry that has a mask of its own.
Parts = Sequence[Sequence[Block]]


@lru_cache(maxsize=64)
def causal_blocks(length: int, keys: int, groups: int, first: int = 0) -> tuple[Block, ...]:
    """Blocks of causal attention; the last of `length` queries is aligned to the last of `keys`.

    Args:
        groups: query heads per key head, each a row of its own.
        first: number of queries, and of keys, before these.
    """
    blocks = []
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
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
            segment = np.repeat(np.arange(len(run) - 1), np.diff(run))
            place = np.arange(segment.size)
            visible = (segment[:, None] == segment) & (place[:, None] >= place)
            hidden = np.where(visible, 0.0, MASKED_SCORE).astype(np.float32)
            bias = paddle.to_tensor(np.repeat(hidden, groups, axis=0))
            blocks.append(Block(first * groups, end * groups, first, end, lambda bias=bias: bias))
    return tuple(blocks)


def _runs(offsets: Sequence[int]) -> list[list[int]]:
    """Offsets grouped by block: short neighbouring segments together, others alone."""
    runs: list[list[int]] = []
    for begin, end in pairwise(offsets):
        if runs and end - runs[-1][0] <= QUERY_BLOCK:
            runs[-1].append(end)
        else:
            runs.append([begin, end])
    return runs


def _causal_bias(queries: int, keys: int, groups: int) -> Tensor:
    """Causal bias of queries aligned to the last of `keys` keys."""
    # Past keys of the triangle that it is cut from: a power of two, so that few are kept.
    past, reach = keys - queries, QUERY_BLOCK
    while reach < past:
        reach *= 2
    return _triangle(reach, groups)[: queries * groups, reach - past : reach + queries]


@lru_cache(maxsize=8)
def _triangle(reach: int, groups: int) -> Tensor:
    """Causal bias of a full query block with `reach` keys before its own."""
    query_row = np.repeat(np.arange(QUERY_BLOCK), groups) + reach
    hidden = np.arange(reach + QUERY_BLOCK)[None, :] > query_row[:, None]
    return paddle.to_tensor(np.where(hidden, MASKED_SCORE, 0.0).astype(np.float32))


class SoftmaxAttention(PyLayer):
    """`softmax(q @ k^T / sqrt(H) + bias) @ v` by chunks and blocks, in the inputs' dtype.

    Keeps its inputs and its output. With delta the row sums of grad * out, the gradient of the
    scores is `p * (grad @ v^T - delta)`, p the probabilities, as in FlashAttention (Dao et al.,
    https://arxiv.org/abs/2205.14135).

    Takes `[Z, R, H]` queries, `[Z, S, H]` keys and values, the `Parts` of Z, and a bias `[Z, 1, S]`
    of every key or None; returns `[Z, R, H]`.
    """

    @staticmethod
    def forward(ctx, q_ZRH, k_ZSH, v_ZSH, parts, key_bias_Z1S):
        ctx.parts, ctx.scale, ctx.key_bias = parts, q_ZRH.shape[-1] ** -0.5, key_bias_Z1S
        ctx.needs = [not x.stop_gradient for x in (q_ZRH, k_ZSH, v_ZSH)]
        q_ZRH, k_ZSH, v_ZSH = (contiguous(x) for x in (q_ZRH * ctx.scale, k_ZSH, v_ZSH))
        outputs = []
        for chunk in _chunks(q_ZRH.shape[0], parts):
            q, k, v = map(chunk.of, (q_ZRH, k_ZSH, v_ZSH))
            of_blocks = [
                paddle.matmul(_probabilities(chunk, block, q, k, key_bias_Z1S), block.keys(v))
                for block in chunk.blocks
            ]
            outputs.append(_joined(of_blocks, axis=1))
        out_ZRH = _joined(outputs, axis=0)
        # Detached: kept itself, an output without a backward pass would never be freed.
        ctx.save_for_backward(q_ZRH, k_ZSH, v_ZSH, out_ZRH.detach())
        return out_ZRH

    @staticmethod
    def backward(ctx, grad):
        *kept, out_ZRH = ctx.saved_tensor()
        grad = contiguous(grad)
        delta_ZR1 = row_sum(grad * out_ZRH)
        grads_of_chunks = [
            _chunk_gradients(chunk, ctx.key_bias, *map(chunk.of, (*kept, grad, delta_ZR1)))
            for chunk in _chunks(grad.shape[0], ctx.parts)
        ]
        grad_q, grad_k, grad_v = (
            _joined(parts, axis=0) for parts in zip(*grads_of_chunks, strict=True)
        )
        grads = (grad_q.scale_(ctx.scale), grad_k, grad_v)
        # Paddle requires None for an input without gradient.
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


class _Chunk(NamedTuple):
    """Consecutive entries `[begin, end)` of Z, of one part."""

    begin: int
    end: int
    blocks: Sequence[Block]

    def of(self, x_Z: Tensor) -> Tensor:
        """The chunk's entries of a contiguous tensor; a view."""
        takes_all = self.begin == 0 and self.end == x_Z.shape[0]
        return x_Z if takes_all else x_Z._slice(self.begin, self.end)


def _chunks(batch: int, parts: Parts) -> Iterator[_Chunk]:
    """Z in chunks, in order."""
    size = batch // len(parts)
    for number, blocks in enumerate(parts):
        largest = max((b.end - b.begin) * (b.end_key - b.first_key) for b in blocks)
        step = max(1, min(size, _CHUNK_BYTES // (4 * max(largest, 1))))
        for begin in range(number * size, (number + 1) * size, step):
            yield _Chunk(begin, min(begin + step, (number + 1) * size), blocks)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else paddle.concat(list(tensors), axis=axis)


def _probabilities(
    chunk: _Chunk, block: Block, q_ZRH: Tensor, k_ZSH: Tensor, key_bias_Z1S: Tensor | None
) -> Tensor:
    """Of a chunk's entries: one row per query, over the block's keys."""
    scores = paddle.matmul(block.rows(q_ZRH), block.keys(k_ZSH), transpose_y=True)
    if block.bias is not None:
        bias = block.bias()
        scores = scores.add_(chunk.of(bias)) if bias.ndim == 3 else plus_(scores, bias)
    if key_bias_Z1S is not None:
        of_keys = chunk.of(key_bias_Z1S)[:, :, block.first_key : block.end_key]
        scores = plus_(scores, of_keys)
    return softmax_(scores)


def _chunk_gradients(
    chunk: _Chunk,
    key_bias_Z1S: Tensor | None,
    q_ZRH: Tensor,
    k_ZSH: Tensor,
    v_ZSH: Tensor,
    grad: Tensor,
    delta_ZR1: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grads_q, grads_k, grads_v, first_key = [], [], [], None
    for block in chunk.blocks:
        p = _probabilities(chunk, block, q_ZRH, k_ZSH, key_bias_Z1S)
        score_grad = paddle.matmul(block.rows(grad), block.keys(v_ZSH), transpose_y=True)
        minus_column_times_(score_grad, contiguous(block.rows(delta_ZR1)), p)
        grads_q.append(paddle.matmul(score_grad, block.keys(k_ZSH)))
        block_k = paddle.matmul(score_grad, block.rows(q_ZRH), transpose_x=True)
        block_v = paddle.matmul(p, block.rows(grad), transpose_x=True)
        if block.first_key == first_key:
            # A later block sees more keys: the sum of the earlier blocks is a prefix of them.
            num_keys = block.end_key - block.first_key
            block_k = block_k + _pad_keys(grads_k.pop(), num_keys)
            block_v = block_v + _pad_keys(grads_v.pop(), num_keys)
        first_key = block.first_key
        grads_k.append(block_k)
        grads_v.append(block_v)
    # No query sees the keys behind the last block's.
    num_keys = k_ZSH.shape[1] - chunk.blocks[-1].first_key
    grads_k[-1], grads_v[-1] = (_pad_keys(parts[-1], num_keys) for parts in (grads_k, grads_v))
    return _joined(grads_q, axis=1), _joined(grads_k, axis=1), _joined(grads_v, axis=1)


def _pad_keys(x_ZSH: Tensor, num_keys: int) -> Tensor:
    batch, keys, width = x_ZSH.shape
    if keys == num_keys:
        return x_ZSH
    return paddle.concat(
        [x_ZSH, paddle.zeros([batch, num_keys - keys, width], x_ZSH.dtype)], axis=1
    )


def masked_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str = "eager",
) -> Tensor:
    """`nn.attention.masked_attention`."""
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    key_heads = k_BSKH.shape[2]
    parts = mask_parts(mask, q_BLNH.shape[2] // key_heads, key_heads)
    out_BLNH = attention_in_blocks(q_BLNH, k_BSKH, v_BSKH, parts)
    if sees(mask).all_see:
        return out_BLNH
    out_BLNH = out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)
    return out_BLNH if implementation == "sdpa" else with_averages(out_BLNH, v_BSKH, mask)


class Sees(NamedTuple):
    """What a mask lets queries see, on the host.

    Attributes:
        visible: `[B, L, S]` bool.
        ends: `[B, L]` int32, the last key that each query sees plus one; 0 if it sees none.
        all_see: whether every query sees a key.
    """

    visible: np.ndarray
    ends: np.ndarray
    all_see: bool


# Made once of a mask that serves several layers.
_seen: WeakKeyDictionary[AttentionMask, Sees] = WeakKeyDictionary()
_parts: WeakKeyDictionary[AttentionMask, dict[tuple[int, int], Parts]] = WeakKeyDictionary()


def sees(mask: AttentionMask) -> Sees:
    """See `Sees`; reads the mask once."""
    if mask not in _seen:
        visible_BLS = np.ascontiguousarray(mask.visible_BLS.numpy())
        keys = visible_BLS.shape[-1]
        ends_BL = keys - visible_BLS[:, :, ::-1].argmax(axis=-1)
        ends_BL[~visible_BLS.any(axis=-1)] = 0
        _seen[mask] = Sees(visible_BLS, ends_BL.astype(np.int32), bool(ends_BL.all()))
    return _seen[mask]


def mask_parts(mask: AttentionMask, groups: int, key_heads: int) -> Parts:
    """Blocks of attention under a mask; a query without a key sees all keys of its block.

    A batch entry is a part, so that its mask is common to its heads. Few queries are one block of
    one part, with a matrix for each of Z.
    """
    made, key = _parts.setdefault(mask, {}), (groups, key_heads)
    if key not in made:
        visible_BLS, ends_BL, _ = sees(mask)
        if visible_BLS.shape[1] <= QUERY_BLOCK:
            num_keys = max(int(ends_BL.max()), 1)
            seen_BLS = visible_BLS[:, :, :num_keys] | (ends_BL == 0)[:, :, None]
            seen_ZRS = seen_BLS.repeat(groups, axis=1).repeat(key_heads, axis=0)
            made[key] = ((_masked_block(0, num_keys, seen_ZRS),),)
        else:
            entries = zip(visible_BLS, ends_BL, strict=True)
            made[key] = tuple(_masked_blocks(*entry, groups) for entry in entries)
    return made[key]


def _masked_blocks(visible_LS: np.ndarray, ends_L: np.ndarray, groups: int) -> tuple[Block, ...]:
    blocks, num_keys = [], 1
    for begin in range(0, ends_L.size, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        num_keys = max(num_keys, int(ends_L[rows].max()))
        seen_LS = visible_LS[rows, :num_keys] | (ends_L[rows] == 0)[:, None]
        blocks.append(_masked_block(begin * groups, num_keys, seen_LS.repeat(groups, axis=0)))
    return tuple(blocks)


def _masked_block(begin: int, num_keys: int, seen_RS: np.ndarray) -> Block:
    end = begin + seen_RS.shape[-2]
    if seen_RS.all():
        return Block(begin, end, 0, num_keys)
    bias = np.where(seen_RS, np.float32(0.0), np.float32(MASKED_SCORE))
    bias_RS = paddle.to_tensor(bias, place=paddle.CPUPlace())
    return Block(begin, end, 0, num_keys, lambda: bias_RS)
