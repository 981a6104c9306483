"""Causal attention of which each query sees the best blocks of its sample's tokens, and the tokens
behind its last complete block: QSA of Qwen4-Exp.

An indexer has a key per token and some query heads. The blocks of a sample are its tokens in
groups of c, counted from its first one. A block's key is the mean of its tokens' keys, normalized,
then rotated to the position of its first token. A query's score of a complete block is the sum over
index heads of relu(q . k) / sqrt(C). It attends to the best J blocks and to the tail, the tokens
behind the last complete block; among equal scores the lowest block number is taken. The choice is
common to all heads and passes no gradient, so the indexer gets none.

A query that sees at most J * c + c - 1 tokens sees all of them: there attention is dense.

Shapes: T query rows, R key rows, Q queries that choose, N query heads, K key heads, G = N / K, H
head width; I index heads, C their width; X blocks, J chosen of them, c tokens of a block; P = J * c
+ c - 1 tokens of a query; S samples.

Source: Qwen4ExpTextQSAIndexer and Qwen4ExpTextAttention of HF transformers.
"""

from collections.abc import Iterator

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import (
    PackedSamples,
    RotaryTables,
    biased_rows,
    causal_attention,
    rotate_half,
)
from paddle_vl.nn.attention_masks import MASKED_SCORE
from paddle_vl.nn.block_samples import (
    BlockSamples,
    BlockSizes,
    Choosing,
    equal_samples,
    packed_block_samples,
    padded_samples,
)
from paddle_vl.nn.cpu import block_attention as compiled
from paddle_vl.nn.dispatch import Kernel, on_both, operation
from paddle_vl.nn.operations import GemmaRMSNorm, gemma_rms_norm
from paddle_vl.nn.placement import RegionOps
from paddle_vl.nn.residual_streams import Weight

# Bytes of the scores, and of the gathered keys, of a chunk of queries.
_SCORE_BYTES = 16 << 20
_GATHERED_BYTES = 256 << 20


@operation
def block_keys(raw_XcC: Tensor, weight_C: Tensor, epsilon: float, tables: RotaryTables) -> Tensor:
    """Keys of blocks `[X, C]`: the mean over c in float32, cast, `gemma_rms_norm`, rotation.

    Args:
        raw_XcC: keys of the tokens of each block.
        tables: `[X, .]` of the blocks' first tokens.
    """
    size = raw_XcC.shape[1]
    # In this order whatever the number of blocks, so that a block's key is the same in any chunk.
    total = raw_XcC[:, 0].astype("float32")
    for place in range(1, size):
        total = total + raw_XcC[:, place].astype("float32")
    mean_XC = (total / size).astype(raw_XcC.dtype)
    return turned(gemma_rms_norm(mean_XC, weight_C, epsilon), *tables)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of as many first channels as the tables have, in their dtype."""
    first, rest = paddle.split(x, [cos.shape[-1], x.shape[-1] - cos.shape[-1]], axis=-1)
    return paddle.concat([first * cos + rotate_half(first) * sin, rest], axis=-1)


@operation
def chosen_blocks(q_TIC: Tensor, keys_XC: Tensor, samples: BlockSamples) -> Tensor:
    """The best J complete blocks of each query that chooses, ascending: int32 `[Q, J]`, numbers
    within the sample. Among equal scores the lowest number is taken.

    Args:
        q_TIC: normalized and rotated.
        keys_XC: of the blocks of samples that choose, one sample after the other.
    """
    width, found = keys_XC.shape[1], []
    for part in samples.parts:
        for chunk in part.chunks(4 * part.blocks, _SCORE_BYTES):
            # Those that the last of these queries has behind it.
            complete = (chunk.place + chunk.count) // samples.sizes.size
            of_part = keys_XC[part.block : part.block + complete].astype("float32")
            q_QIC = q_TIC[chunk.queries].astype("float32")
            scores_QX = paddle.zeros([chunk.count, complete], "float32")
            for head in range(q_QIC.shape[1]):
                products_QX = paddle.matmul(q_QIC[:, head], of_part, transpose_y=True)
                scores_QX += F.relu_(products_QX)
            found.append(best_blocks(scores_QX / width**0.5, chunk, samples.sizes))
    return paddle.concat(found)


@operation
def best_blocks(scores_QX: Tensor, chunk: Choosing, sizes: BlockSizes) -> Tensor:
    """The J best of the complete blocks of each query, ascending: int32 `[Q, J]`; the lowest ones
    among equal scores, which are not negative."""
    complete_Q1 = (chunk.places() + 1) // sizes.size
    block_X = paddle.arange(scores_QX.shape[1], dtype="int32")
    hidden_QX = paddle.where(block_X < complete_Q1, scores_QX, -1.0)
    order_QX = paddle.argsort(-hidden_QX, axis=-1, stable=True)
    return paddle.sort(order_QX[:, : sizes.chosen], axis=-1).astype("int32")


best_blocks.kernels = [Kernel("cpu", "C", compiled.best_blocks, compiled.fits_scores)]


@operation
def chosen_attention(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, chosen_QJ: Tensor, samples: BlockSamples
) -> Tensor:
    """Attention of the queries that choose to their blocks and tails, `[Q, N, H]` in the dtype of
    the queries; scores are scaled by H^-0.5, the softmax is computed in float32.

    Keys are gathered: a product has P of them for each query, however long its sample.
    """
    out = [_of_chunk(q_TNH, k_RKH, v_RKH, chosen_QJ, c) for c in _gathered_chunks(k_RKH, samples)]
    return paddle.concat(out)


def _gathered_chunks(k_RKH: Tensor, samples: BlockSamples) -> Iterator[tuple[Choosing, int]]:
    _, heads, width = k_RKH.shape
    of_query = samples.sizes.reach * heads * width * k_RKH.element_size()
    for part in samples.parts:
        for chunk in part.chunks(of_query, _GATHERED_BYTES):
            yield chunk, samples.sizes.size


def _of_chunk(
    q_TNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    chosen_QJ: Tensor,
    chunk: tuple[Choosing, int],
) -> Tensor:
    part, size = chunk
    heads, key_heads, width = q_TNH.shape[1], *k_RKH.shape[1:]
    place_Q1 = part.places()
    in_block_c = paddle.arange(size, dtype="int32")
    blocks_QP = (chosen_QJ[part.numbers].unsqueeze(2) * size + in_block_c).flatten(1)
    tail_Qt = (place_Q1 + 1) // size * size + in_block_c[: size - 1]
    seen_QP = paddle.concat([blocks_QP, paddle.minimum(tail_Qt, place_Q1)], axis=1)
    hidden_Qt = (tail_Qt > place_Q1).astype("float32") * MASKED_SCORE
    bias_QP = paddle.concat([paddle.zeros(blocks_QP.shape, "float32"), hidden_Qt], axis=1)
    k_QKPH, v_QKPH = (
        paddle.index_select(x, seen_QP.flatten() + part.key)
        .reshape([part.count, -1, key_heads, width])
        .transpose([0, 2, 1, 3])
        for x in (k_RKH, v_RKH)
    )
    q_QKGH = q_TNH[part.queries].reshape([part.count, key_heads, heads // key_heads, width])
    out_QKGH = biased_rows(q_QKGH * width**-0.5, k_QKPH, v_QKPH, bias_QP.unsqueeze([1, 2]))
    return out_QKGH.reshape([part.count, heads, width])


class GatheredAttention(PyLayer):
    """`chosen_attention` that keeps its inputs and gathers again in the backward pass."""

    @staticmethod
    def forward(ctx, q_TNH, k_RKH, v_RKH, chosen_QJ, samples):
        ctx.save_for_backward(q_TNH, k_RKH, v_RKH, chosen_QJ)
        ctx.samples = samples
        ctx.needs = [not x.stop_gradient for x in (q_TNH, k_RKH, v_RKH)]
        return chosen_attention.plain(q_TNH, k_RKH, v_RKH, chosen_QJ, samples)

    @staticmethod
    def backward(ctx, grad_QNH):
        q_TNH, k_RKH, v_RKH, chosen_QJ = ctx.saved_tensor()
        q, k, v = given = [x.detach() for x in (q_TNH, k_RKH, v_RKH)]
        for x in given:
            x.stop_gradient = False
        grads = [paddle.zeros_like(x) for x in given]
        for chunk in _gathered_chunks(k_RKH, ctx.samples):
            with paddle.enable_grad():
                out = _of_chunk(q, k, v, chosen_QJ, chunk)
            of_chunk = paddle.grad(out, given, grad_QNH[chunk[0].numbers])
            for total, one in zip(grads, of_chunk, strict=True):
                total.add_(one)
        found = [x if need else None for x, need in zip(grads, ctx.needs, strict=True)]
        return *found, None


chosen_attention.kernels = [
    Kernel("cpu", "C", compiled.chosen_attention, compiled.fits_chosen),
    *on_both(GatheredAttention),
]


@operation
def block_attention(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, chosen_QJ: Tensor, samples: BlockSamples
) -> Tensor:
    """Causal attention within samples: dense where a query sees all tokens before it, else
    `chosen_attention`. Rows of no sample are zero.

    Returns:
        `[T, N, H]` in the dtype of the queries.
    """
    of_chosen = chosen_attention(q_TNH, k_RKH, v_RKH, chosen_QJ, samples)
    rows = [*_dense(q_TNH, k_RKH, v_RKH, samples), of_chosen]
    if (order_T := samples.order(q_TNH.shape[0])) is None:
        return paddle.concat(rows)
    nowhere = paddle.zeros([1, *q_TNH.shape[1:]], q_TNH.dtype)
    return paddle.index_select(paddle.concat([*rows, nowhere]), order_T)


def _dense(q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, samples: BlockSamples) -> Iterator[Tensor]:
    if (packed := samples.packed_dense) is None:
        for query, queries, key, keys in samples.dense_S4.tolist():
            k, v = (x[key : key + keys].unsqueeze(0) for x in (k_RKH, v_RKH))
            yield causal_attention(q_TNH[query : query + queries].unsqueeze(0), k, v).squeeze(0)
    elif len(samples.dense_S4):
        row_D, offsets = packed
        q, k, v = (paddle.index_select(x, row_D).unsqueeze(0) for x in (q_TNH, k_RKH, v_RKH))
        yield causal_attention(q, k, v, None, offsets).squeeze(0)


class ChosenKeys:
    """In place of a cache of `self_attention`: attends to the blocks that were chosen."""

    def __init__(self, chosen_QJ: Tensor, samples: BlockSamples):
        self._chosen_QJ, self._samples = chosen_QJ, samples

    def attend(
        self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, key_bias: Tensor | None = None
    ) -> Tensor:
        """Attention `[B, L, N, H]`; the samples know which keys are hidden."""
        q_TNH, k_RKH, v_RKH = (x.reshape([-1, *x.shape[2:]]) for x in (q_BLNH, k_BSKH, v_BSKH))
        return block_attention(q_TNH, k_RKH, v_RKH, self._chosen_QJ, self._samples).reshape(
            q_BLNH.shape
        )


class Indexer(nn.Layer):
    """Index queries and keys of token rows, and the choice of blocks; without gradients.

    Args:
        ops: of the token rows, see `nn.placement`.
        width: of a token row.
        heads, head_width: I, C.
    """

    def __init__(
        self,
        ops: RegionOps,
        width: int,
        heads: int,
        head_width: int,
        sizes: BlockSizes,
        epsilon: float,
        init_std: float,
    ):
        super().__init__()
        self.sizes, self.epsilon, self._ops = sizes, epsilon, ops
        self._heads, self._width = heads, head_width
        # No linear, which could be adapted.
        self.index_qk_proj = Weight([width, (heads + 1) * head_width], init_std)
        self.q_layernorm = GemmaRMSNorm(head_width, epsilon)
        self.k_layernorm = GemmaRMSNorm(head_width, epsilon)
        for parameter in self.parameters():
            parameter.stop_gradient = True

    def samples(
        self, tables: RotaryTables, key_bias_BS: Tensor | None, packed: PackedSamples | None
    ) -> BlockSamples | None:
        """Samples of a batch without a cache; None if all attention is dense."""
        batch, length = tables.cos_TH.shape[:2]
        if length <= self.sizes.reach:
            return None
        if packed is not None:
            samples = packed_block_samples(packed.offsets, self.sizes)
        elif key_bias_BS is not None:
            # By the tables: a recomputed layer gets another bias.
            samples = tables.once(self.sizes, lambda: padded_samples(key_bias_BS, self.sizes))
        else:
            samples = equal_samples(batch, length, self.sizes)
        return samples if samples.parts else None

    @paddle.no_grad()
    def forward(self, x_TD: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """Queries `[T, I, C]`, normalized and rotated, and keys `[T, C]` as projected, of the token
        rows of all ranks."""
        num_rows = tables.cos_TH.shape[0] * tables.cos_TH.shape[1]
        rows = self._ops.leave_rows(paddle.matmul(x_TD, self.index_qk_proj.weight), num_rows)
        q, raw_TC = paddle.split(rows, [self._heads * self._width, self._width], axis=-1)
        normed = self.q_layernorm(q.reshape([num_rows, self._heads, self._width]))
        cos, sin = (x.reshape([num_rows, 1, -1]) for x in tables.astype(x_TD.dtype))
        return turned(normed, cos, sin), raw_TC

    @paddle.no_grad()
    def chosen(self, x_TD: Tensor, tables: RotaryTables, samples: BlockSamples) -> ChosenKeys:
        """The choice of a batch without a cache."""
        q_TIC, raw_TC = self(x_TD, tables)
        members = paddle.index_select(raw_TC, samples.member_rows)
        firsts = (
            paddle.index_select(x.flatten(0, 1), samples.first_rows)
            for x in tables.astype(x_TD.dtype)
        )
        keys_XC = self.keys(members, RotaryTables(*firsts))
        return ChosenKeys(chosen_blocks(q_TIC, keys_XC, samples), samples)

    def keys(self, members: Tensor, tables: RotaryTables) -> Tensor:
        """`block_keys` of the tokens' keys `[X * c, C]`."""
        raw_XcC = members.reshape([-1, self.sizes.size, members.shape[-1]])
        return block_keys(raw_XcC, self.k_layernorm.weight, self.epsilon, tables)
