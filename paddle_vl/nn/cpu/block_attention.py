"""Attention to chosen blocks, and their choice, by compiled kernels (`block_attention.c`).

Shapes: as in `paddle_vl.nn.block_attention`.
"""

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.block_samples import BlockSamples, BlockSizes, Choosing
from paddle_vl.nn.cpu.kernels import (
    contiguous,
    empty,
    is_dense,
    library,
    num_threads,
)

# Keys whose scores are computed at a time; queries between two additions to the gradients of keys.
_TOKENS, _CHUNK = 4, 64


class _ChosenAttention(PyLayer):
    """Keeps the result and a number per query and head, and computes the probabilities again in
    backward."""

    @staticmethod
    def forward(ctx, q_TNH, k_RKH, v_RKH, chosen_QJ, samples):
        (_, heads, width), key_heads = q_TNH.shape, k_RKH.shape[1]
        ctx.needs = [not x.stop_gradient for x in (q_TNH, k_RKH, v_RKH)]
        parts = np.array([part[:5] for part in samples.parts], dtype=np.int64)
        out_QNH = empty([samples.num_queries, heads, width])
        logsums_QN = empty(out_QNH.shape[:2])
        step = -(-samples.sizes.reach // _TOKENS) * _TOKENS
        of_query = heads // key_heads * step
        sizes = (len(parts), heads, key_heads, width, samples.sizes.chosen, samples.sizes.size)
        ctx.kept, ctx.room = (parts, *sizes, width**-0.5), (of_query, step)
        room = empty([num_threads() * of_query])
        given = (q_TNH, k_RKH, v_RKH, chosen_QJ)
        library().chosen_attention_forward(*given, out_QNH, logsums_QN, *ctx.kept, room, step)
        # Detached: kept itself, an output without a backward pass would never be freed.
        ctx.save_for_backward(*given, out_QNH.detach(), logsums_QN)
        return out_QNH

    @staticmethod
    def backward(ctx, grad_QNH):
        kept, (of_query, step) = ctx.saved_tensor(), ctx.room
        parts, chosen, size = ctx.kept[0], *ctx.kept[5:7]
        # Queries that do not choose, and keys that none sees, get zeros.
        grads = [paddle.zeros(x.shape, "float32") for x in kept[:3]]
        chunk = min(max(_CHUNK, 4 * num_threads()), int(parts[:, 1].max()))
        longest = int((parts[:, 1] + parts[:, 3]).max()) // size
        library().chosen_attention_backward(
            *(*kept, contiguous(grad_QNH), *grads, *ctx.kept, chunk),
            *(empty([2 * chunk * of_query]), step),
            *(np.empty(n, dtype=np.int32) for n in (longest + 3, chunk * (chosen + 1))),
        )
        found = [x if need else None for x, need in zip(grads, ctx.needs, strict=True)]
        return *found, None


def fits_chosen(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, chosen_QJ: Tensor, samples: BlockSamples
) -> bool:
    """Whether `chosen_attention` takes these."""
    is_choice = chosen_QJ.dtype == paddle.int32 and chosen_QJ.is_contiguous()
    is_grouped = k_RKH.shape == v_RKH.shape and q_TNH.shape[1] % k_RKH.shape[1] == 0
    return is_choice and is_grouped and is_dense(q_TNH, k_RKH, v_RKH)


def chosen_attention(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, chosen_QJ: Tensor, samples: BlockSamples
) -> Tensor:
    """`nn.block_attention.chosen_attention`, which reads the keys where they lie."""
    return _ChosenAttention.apply(q_TNH, k_RKH, v_RKH, chosen_QJ, samples)


def fits_scores(scores_QX: Tensor, chunk: Choosing, sizes: BlockSizes) -> bool:
    """Whether `best_blocks` takes these: every query has J blocks behind it."""
    fewest = min((chunk.place + 1) // sizes.size, scores_QX.shape[1])
    return sizes.chosen <= fewest and is_dense(scores_QX)


def best_blocks(scores_QX: Tensor, chunk: Choosing, sizes: BlockSizes) -> Tensor:
    """`nn.block_attention.best_blocks`, which finds the last of the best by its bits."""
    best_QJ = paddle.empty([chunk.count, sizes.chosen], "int32")
    library().best_blocks(
        scores_QX, *scores_QX.shape, chunk.place, sizes.size, sizes.chosen, best_QJ
    )
    return best_QJ
