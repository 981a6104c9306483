"""Softmax attention on the CPU in query blocks, with a hand-written backward pass.

A block is multiplied only with keys that some of its rows see, and a mask has the size of one
block's scores for one head, so time and memory grow with the visible scores only. Over 350 lines,
to keep both ways to the softmax beside their common backward pass.

Shapes: Z any product of batch and heads, R query rows and S keys of one Z, H head width; G query
heads share a key head and are neighbouring rows.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import (
    MASKED_SCORE,
    PackedSamples,
    causal_attention,
    equal_segments_attention,
)
from paddle_vl.nn.cpu.onednn import contiguous
from paddle_vl.nn.cpu.products import (
    minus_column_times_,
    times_column_,
    times_matrix_,
    times_row_,
)
from paddle_vl.nn.operations import row_sum

QUERY_BLOCK = 128


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
        visible: makes the same as 1 where a row sees a key and 0 elsewhere.
    """

    begin: int
    end: int
    first_key: int
    end_key: int
    bias: Callable[[], Tensor] | None = None
    visible: Callable[[], Tensor] | None = None

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
        visible = partial(_causal_visible, end - begin, num_keys, groups)
        blocks.append(
            Block(
                (first + begin) * groups,
                (first + end) * groups,
                first,
                first + num_keys,
                bias if length > 1 else None,
                visible if length > 1 else None,
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
            visible = _as_factors(bias)
            blocks.append(
                Block(
                    first * groups, end * groups, first, end, lambda b=bias: b, lambda v=visible: v
                )
            )
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


def _packed_bias(run: Sequence[int], groups: int) -> Tensor:
    segment = np.repeat(np.arange(len(run) - 1), np.diff(run))
    place = np.arange(segment.size)
    visible = (segment[:, None] == segment) & (place[:, None] >= place)
    bias = np.where(visible, 0.0, MASKED_SCORE).astype(np.float32)
    return paddle.to_tensor(np.repeat(bias, groups, axis=0))


def _causal_bias(queries: int, keys: int, groups: int) -> Tensor:
    """Causal bias of queries aligned to the last of `keys` keys."""
    past = keys - queries
    reach = _reach(past)
    return _triangle(reach, groups)[: queries * groups, reach - past : reach + queries]


def _causal_visible(queries: int, keys: int, groups: int) -> Tensor:
    """`_as_factors` of `_causal_bias`."""
    past = keys - queries
    reach = _reach(past)
    return _visible_triangle(reach, groups)[: queries * groups, reach - past : reach + queries]


@lru_cache(maxsize=8)
def _visible_triangle(reach: int, groups: int) -> Tensor:
    return _as_factors(_triangle(reach, groups))


def _as_factors(bias: Tensor) -> Tensor:
    """1 where a bias is zero, 0 elsewhere."""
    return (bias == 0.0).astype("float32")


def _reach(past: int) -> int:
    """Past keys of the triangle that a block is cut from: a power of two, so that few are kept."""
    reach = QUERY_BLOCK
    while reach < past:
        reach *= 2
    return reach


@lru_cache(maxsize=8)
def _triangle(reach: int, groups: int) -> Tensor:
    """Causal bias of a full query block with `reach` keys before its own."""
    query_row = np.repeat(np.arange(QUERY_BLOCK), groups) + reach
    hidden = np.arange(reach + QUERY_BLOCK)[None, :] > query_row[:, None]
    return paddle.to_tensor(np.where(hidden, MASKED_SCORE, 0.0).astype(np.float32))


class SoftmaxAttention(PyLayer):
    """`softmax(q @ k^T / sqrt(H) + bias) @ v` by blocks, in the inputs' dtype.

    In float32, where no score can leave the range of the exponential function, it runs over chunks
    of Z, takes exponentials without subtracting a maximum, and keeps the inverses of their sums;
    backward computes the exponentials again. Elsewhere it keeps the probabilities p of Paddle's
    softmax.

    With delta the row sums of grad * out, the gradient of the scores is `p * (grad @ v^T - delta)`,
    as in FlashAttention (Dao et al., https://arxiv.org/abs/2205.14135).

    Takes `[Z, R, H]` queries, `[Z, S, H]` keys and values, the `Parts` of Z, and a bias `[Z, 1, S]`
    of every key or None; returns `[Z, R, H]`.
    """

    @staticmethod
    def forward(ctx, q_ZRH, k_ZSH, v_ZSH, parts, key_bias_Z1S):
        ctx.parts, ctx.scale = parts, q_ZRH.shape[-1] ** -0.5
        ctx.needs = [not x.stop_gradient for x in (q_ZRH, k_ZSH, v_ZSH)]
        q_ZRH = q_ZRH * ctx.scale
        q_ZRH, k_ZSH, v_ZSH = map(contiguous, (q_ZRH, k_ZSH, v_ZSH))
        if exponentials_are_safe(q_ZRH, k_ZSH, v_ZSH):
            factor_Z1S = None if key_bias_Z1S is None else paddle.exp(key_bias_Z1S)
            out, inverse_ZR1 = _exponential_attention(q_ZRH, k_ZSH, v_ZSH, parts, factor_Z1S)
            if out is not None:
                ctx.recomputes, ctx.key_factor = True, factor_Z1S
                ctx.save_for_backward(q_ZRH, k_ZSH, v_ZSH, out, inverse_ZR1)
                return out
        ctx.recomputes = False
        probabilities, outputs = [], []
        for chunk in _chunks(q_ZRH.shape[0], parts, _ALL_BYTES):
            outputs.append([])
            for block in chunk.blocks:
                q, k, v = map(chunk.of, (q_ZRH, k_ZSH, v_ZSH))
                scores = paddle.matmul(block.rows(q), block.keys(k), transpose_y=True)
                if block.bias is not None:
                    scores.add_(chunk.of_mask(block.bias()))
                if key_bias_Z1S is not None:
                    scores.add_(chunk.of(key_bias_Z1S)[:, :, block.first_key : block.end_key])
                probabilities.append(F.softmax(scores))
                outputs[-1].append(paddle.matmul(probabilities[-1], block.keys(v)))
        out = _joined([_joined(of_blocks, axis=1) for of_blocks in outputs], axis=0)
        ctx.save_for_backward(q_ZRH, k_ZSH, v_ZSH, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx, grad):
        q_ZRH, k_ZSH, v_ZSH, out, *kept = ctx.saved_tensor()
        grad = contiguous(grad)
        if ctx.recomputes:
            # The exponentials are computed again without dividing by their sums: the gradient is
            # divided instead.
            grad = times_column_(grad.clone(), kept[0])
        delta_ZR1 = row_sum(grad * out)
        grads_of_chunks, probabilities = [], iter(kept)
        chunk_bytes = _CHUNK_BYTES if ctx.recomputes else _ALL_BYTES
        for chunk in _chunks(q_ZRH.shape[0], ctx.parts, chunk_bytes):

            def powers(block: Block, chunk: "_Chunk" = chunk) -> Tensor:
                if not ctx.recomputes:
                    return next(probabilities)
                factor = None if ctx.key_factor is None else chunk.of(ctx.key_factor)
                return _exponentials(chunk, block, chunk.of(q_ZRH), chunk.of(k_ZSH), factor)

            rows = map(chunk.of, (q_ZRH, k_ZSH, v_ZSH, grad, delta_ZR1))
            grads_of_chunks.append(_chunk_gradients(chunk.blocks, powers, *rows))
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

    def of_mask(self, x: Tensor) -> Tensor:
        """The same of a matrix for each of Z; a common one as it is."""
        return self.of(x) if x.ndim == 3 else x


def _chunks(batch: int, parts: Parts, num_bytes: int) -> Iterator[_Chunk]:
    """Z in chunks, in order.

    Args:
        num_bytes: most bytes of the scores of a block.
    """
    size = batch // len(parts)
    for number, blocks in enumerate(parts):
        largest = max((b.end - b.begin) * (b.end_key - b.first_key) for b in blocks)
        step = max(1, min(size, num_bytes // (4 * max(largest, 1))))
        for begin in range(number * size, (number + 1) * size, step):
            yield _Chunk(begin, min(begin + step, (number + 1) * size), blocks)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else paddle.concat(list(tensors), axis=axis)


def _exponentials(
    chunk: _Chunk, block: Block, q_ZRH: Tensor, k_ZSH: Tensor, factor_Z1S: Tensor | None
) -> Tensor:
    """`exp(q @ k^T)` of a chunk's entries, zero where a row does not see a key.

    Hidden scores are not biased, since an exponential that underflows takes a thousand times as
    long.
    """
    scores = paddle.matmul(block.rows(q_ZRH), block.keys(k_ZSH), transpose_y=True)
    powers = exponential_(scores)
    if block.visible is not None:
        visible = chunk.of_mask(block.visible())
        powers = powers.multiply_(visible) if visible.ndim == 3 else times_matrix_(powers, visible)
    if factor_Z1S is not None:
        powers = times_row_(powers, factor_Z1S[:, :, block.first_key : block.end_key])
    return powers


def _chunk_gradients(
    blocks: Sequence[Block],
    powers: Callable[[Block], Tensor],
    q_ZRH: Tensor,
    k_ZSH: Tensor,
    v_ZSH: Tensor,
    grad: Tensor,
    delta_ZR1: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grads_q, grads_k, grads_v, first_key = [], [], [], None
    for block in blocks:
        p = powers(block)
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
    num_keys = k_ZSH.shape[1] - blocks[-1].first_key
    grads_k[-1], grads_v[-1] = (_pad_keys(parts[-1], num_keys) for parts in (grads_k, grads_v))
    return _joined(grads_q, axis=1), _joined(grads_k, axis=1), _joined(grads_v, axis=1)


def _pad_keys(x_ZSH: Tensor, num_keys: int) -> Tensor:
    batch, keys, width = x_ZSH.shape
    if keys == num_keys:
        return x_ZSH
    return paddle.concat(
        [x_ZSH, paddle.zeros([batch, num_keys - keys, width], x_ZSH.dtype)], axis=1
    )


# Scores in [-40, 40] may differ from the logarithm of their row's sum by 80, hidden ones too; the
# logarithm of the largest float32 is 88.
_LARGEST_SCORE = 40.0
# The exponential of the least visible score, with room for rounding.
_LEAST_SUM = math.exp(-_LARGEST_SCORE - 1.0)
# The largest logarithm of a sum of exponentials times values.
_LARGEST_LOG = 80.0
# Bytes of the scores of a chunk: few enough to stay in the processor's caches.
_CHUNK_BYTES = 8 << 20
_ALL_BYTES = 1 << 62


def exponentials_are_safe(q_ZRH: Tensor, k_ZSH: Tensor, v_ZSH: Tensor) -> bool:
    """Whether exponentials of all scores, and their sums with the values, stay within float32.

    By the inequality of Cauchy and Schwarz no score exceeds `max |q| * max |k|`. False for other
    dtypes, for values that are not finite, and for empty inputs.
    """
    if q_ZRH.dtype != paddle.float32 or 0 in q_ZRH.shape or 0 in k_ZSH.shape:
        return False
    longest_q, longest_k, longest_v = (
        host_float(row_sum(x * x).max()) ** 0.5 for x in (q_ZRH, k_ZSH, v_ZSH)
    )
    score = longest_q * longest_k
    # Comparisons with NaN are false.
    if not (score < _LARGEST_SCORE and longest_v < math.inf):
        return False
    return score + math.log(k_ZSH.shape[1] * max(longest_v, 1.0)) < _LARGEST_LOG


def host_float(x: Tensor) -> float:
    """The value of a float32 scalar in host memory."""
    return ctypes.c_float.from_address(x.data_ptr()).value


def _exponential_attention(
    q_ZRH: Tensor,
    k_ZSH: Tensor,
    v_ZSH: Tensor,
    parts: Parts,
    factor_Z1S: Tensor | None,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Attention without a maximum, and the inverse sums `[Z, R, 1]` of exponentials.

    None if a row sees no key: its sum is zero, where a softmax gives an average.

    Args:
        factor_Z1S: exponentials of the keys' bias.
    """
    outputs, sums = [], []
    for chunk in _chunks(q_ZRH.shape[0], parts, _CHUNK_BYTES):
        q, k, v = map(chunk.of, (q_ZRH, k_ZSH, v_ZSH))
        factor = None if factor_Z1S is None else chunk.of(factor_Z1S)
        of_blocks = []
        for block in chunk.blocks:
            powers = _exponentials(chunk, block, q, k, factor)
            of_blocks.append((paddle.matmul(powers, block.keys(v)), row_sum(powers)))
        for of_chunks, tensors in zip((outputs, sums), zip(*of_blocks, strict=True), strict=True):
            of_chunks.append(_joined(tensors, axis=1))
    out_ZRH, sum_ZR1 = _joined(outputs, axis=0), _joined(sums, axis=0)
    least, most = host_float(sum_ZR1.min()), host_float(sum_ZR1.max())
    if not (least > _LEAST_SUM and most < math.inf):
        return None, None
    inverse_ZR1 = 1.0 / sum_ZR1
    return times_column_(out_ZRH, inverse_ZR1), inverse_ZR1


def exponential_(x: Tensor) -> Tensor:
    """`exp(x)` in place, of a contiguous float32 tensor: by Paddle's own math library where it is
    found, in all threads; Paddle's kernel runs in one."""
    function = _vector_exponential()
    size = math.prod(x.shape)
    if function is None or size > _INT32_MAX:
        return x.exp_()
    function(size, x.data_ptr(), x.data_ptr())
    return x


_INT32_MAX = 2**31 - 1


@lru_cache(maxsize=1)
def _vector_exponential() -> Callable[[int, int, int], None] | None:
    """`vsExp` of Intel's math library, which comes with Paddle's CPU wheel."""
    library = Path(paddle.__file__).parent / "libs" / "libmklml_intel.so"
    try:
        function = ctypes.CDLL(str(library)).vsExp
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function
