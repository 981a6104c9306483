"""Attention over cached keys and values in buffers of fixed capacity, and in programs.

Keys and values have heads first, so that one position is written in place.

Shapes: B batch, L new tokens, S keys so far, C capacity of the buffers, N query heads, K key heads,
G = N / K query heads per key head, H head width.
"""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.nn.attention import MASKED_SCORE, causal_attention
from paddle_vl.nn.operations import operation


class CachedKeys:
    """How many positions of the buffers hold keys, and which of them are hidden; one object for
    all layers of a forward pass.

    Not a tuple, which Paddle would search for tensors.

    Args:
        length: S, the new tokens' keys among them.
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None hides nothing.
    """

    def __init__(self, length: int, key_bias_BS: Tensor | None = None):
        self.length, self.key_bias_BS = length, key_bias_BS
        self._biases: dict[tuple[int, ...], Tensor] = {}

    def bias(self, batch: int, key_heads: int, groups: int, capacity: int) -> Tensor:
        """Bias `[B, K, G, C]` of a single query over whole buffers; it hides free positions too.

        Of full shape: Paddle's CPU kernels are slow at broadcasting over middle dims.
        """
        shape = (batch, key_heads, groups, capacity)
        if shape not in self._biases:
            hidden_BC = np.zeros((batch, capacity), dtype=np.float32)
            hidden_BC[:, self.length :] = MASKED_SCORE
            bias_BC = paddle.to_tensor(hidden_BC)
            if self.key_bias_BS is not None:
                bias_BC[:, : self.length] = self.key_bias_BS
            self._biases[shape] = bias_BC.reshape([batch, 1, 1, capacity]).tile(
                [1, key_heads, groups, 1]
            )
        return self._biases[shape]


@operation
def cached_attention(
    q_BLNH: Tensor, key_BKCH: Tensor, value_BKCH: Tensor, cached: CachedKeys
) -> Tensor:
    """`causal_attention` over the first S positions of buffers; the last query is the last key's.

    Returns:
        `[B, L, N, H]` in the dtype of the queries.
    """
    key_BSKH, value_BSKH = (
        buffer[:, :, : cached.length].transpose([0, 2, 1, 3]) for buffer in (key_BKCH, value_BKCH)
    )
    return causal_attention(q_BLNH, key_BSKH, value_BSKH, cached.key_bias_BS)


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
        return _biased_rows(q_BKGH, k_BKSH, v_BKSH, bias).reshape([-1, 1, heads, width])
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
            blocks.append(_biased_rows(q_BKRH[:, k, begin:end], keys, values, bias.biases[i]))
        out_heads.append(paddle.concat(blocks, axis=1))
    out_BKLX = paddle.stack(out_heads, axis=1).reshape([0, key_heads, -1, groups * width])
    return out_BKLX.transpose([0, 2, 1, 3]).reshape([0, 0, heads, width])


def _biased_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = paddle.matmul(q, k, transpose_y=True).astype("float32") + bias
    return paddle.matmul(F.softmax(scores).astype(v.dtype), v)
