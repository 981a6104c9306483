"""Attention of programs, whose sizes are not known when they are traced.

Keys and values of a cache have heads first. Shapes: B batch, L new tokens, S keys so far, N query
heads, K key heads, G = N / K query heads per key head, H head width, P packed rows.
"""

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.nn.attention import biased_rows


class PaddedSegments:
    """`Segments` as tensors, for programs that do not know their number or lengths.

    Shapes: S segments, each padded to the longest length L.

    Args:
        rows_SL: int64 packed row at each place; any row at padding.
        bias_SL: float32, 0 at rows and `MASKED_SCORE` at padding.
        place_P: int64 place of each packed row among the S * L.
    """

    def __init__(self, rows_SL: Tensor, bias_SL: Tensor, place_P: Tensor):
        self.rows_SL, self.bias_SL, self.place_P = rows_SL, bias_SL, place_P

    def attend(self, q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor) -> Tensor:
        """See `Segments.attend`."""
        _, heads, width = q_PNH.shape

        def padded(x_PNH: Tensor) -> Tensor:
            x_SLNH = paddle.gather_nd(x_PNH, self.rows_SL.unsqueeze(-1))
            return x_SLNH.transpose([0, 2, 1, 3])

        q_SNLH, k_SNLH, v_SNLH = padded(q_PNH * width**-0.5), padded(k_PNH), padded(v_PNH)
        # One more channel: adding the bias to the scores would broadcast over queries, slowly.
        bias_SNL1 = paddle.zeros_like(k_SNLH[..., :1]) + self.bias_SL.unsqueeze(1).unsqueeze(-1)
        k_SNLH = paddle.concat([k_SNLH, bias_SNL1.astype(k_SNLH.dtype)], axis=-1)
        q_SNLH = paddle.concat([q_SNLH, paddle.ones_like(q_SNLH[..., :1])], axis=-1)
        scores = paddle.matmul(q_SNLH, k_SNLH, transpose_y=True)
        out_SNLH = paddle.matmul(F.softmax(scores.astype("float32")).astype(v_SNLH.dtype), v_SNLH)
        out_QC = out_SNLH.transpose([0, 2, 1, 3]).reshape([-1, heads * width])
        return paddle.index_select(out_QC, self.place_P).reshape([-1, heads, width])


class QueryBlocks:
    """The bias of prompts in a program, by blocks of queries; one object for all layers.

    Not a tuple, which Paddle would search for tensors. See `query_blocks`.

    Args:
        rows: first and end row of each block, a row for each query and query head of a key head;
            None for the first and last one.
        ends: number of keys that a block sees; None for all.
        biases: float32 `[B, rows of a block, keys of a block]`.
    """

    def __init__(self, rows: list[tuple[Any, Any]], ends: list[Any], biases: list[Tensor]):
        self.rows, self.ends, self.biases = rows, ends, biases


def query_blocks(bias_BLL: Tensor, groups: int, number: int = 4) -> QueryBlocks:
    """Blocks of queries, each multiplied with the keys up to its last query only.

    Args:
        bias_BLL: float32 added to the scores, 0 or `MASKED_SCORE`; it hides later keys.
        groups: query heads per key head.
        number: of blocks; some are empty if there are fewer queries.
    """
    length, bias_BRL = bias_BLL.shape[1], _per_query_head(bias_BLL, groups)
    rows, ends, biases = [], [], []
    for i in range(number):
        begin, end = length * i // number, length * (i + 1) // number
        rows.append((begin * groups, end * groups))
        ends.append(end)
        biases.append(bias_BRL[:, begin * groups : end * groups, :end])
    return QueryBlocks(rows, ends, biases)


def one_block(bias_BLS: Tensor, groups: int) -> QueryBlocks:
    """`query_blocks` for queries that may see keys behind them: all queries with all keys.

    It reads no size, so it may be called where a traced program does not know any.
    """
    return QueryBlocks([(None, None)], [None], [_per_query_head(bias_BLS, groups)])


def _per_query_head(bias_BLS: Tensor, groups: int) -> Tensor:
    return paddle.stack([bias_BLS] * groups, axis=2).flatten(1, 2)


def biased_attention(
    q_BLNH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, bias: Tensor | QueryBlocks
) -> Tensor:
    """Attention under an additive float32 bias, over keys and values with heads first.

    Scores are scaled by H^-0.5 and computed in float32.

    Args:
        bias: of a single query `[B, K, G, S]`; of the queries of prompts `QueryBlocks`.

    Returns:
        `[B, L, N, H]` in the dtype of the queries.
    """
    heads, width = q_BLNH.shape[2:]
    key_heads = k_BKSH.shape[1]
    groups = heads // key_heads
    q_BLNH = q_BLNH * width**-0.5
    if not isinstance(bias, QueryBlocks):
        q_BKGH = q_BLNH.reshape([-1, key_heads, groups, width])
        return biased_rows(q_BKGH, k_BKSH, v_BKSH, bias).reshape([-1, 1, heads, width])
    # The G query heads of a key head become rows of one product, so keys are never repeated.
    q_BKLX = q_BLNH.reshape([0, 0, key_heads, groups * width]).transpose([0, 2, 1, 3])
    q_BKRH = q_BKLX.reshape([0, key_heads, -1, width])
    out_heads = []
    # One key head at a time: Paddle's CPU kernels are slow at broadcasting a bias over heads, and
    # the scores of all heads together take K times the memory.
    for k in range(key_heads):
        blocks = []
        for i in range(len(bias.ends)):
            begin, end = bias.rows[i]
            keys, values = (x[:, k, : bias.ends[i]] for x in (k_BKSH, v_BKSH))
            blocks.append(biased_rows(q_BKRH[:, k, begin:end], keys, values, bias.biases[i]))
        out_heads.append(paddle.concat(blocks, axis=1))
    out_BKLX = paddle.stack(out_heads, axis=1).reshape([0, key_heads, -1, groups * width])
    return out_BKLX.transpose([0, 2, 1, 3]).reshape([0, 0, heads, width])
