"""Which queries of samples choose blocks of tokens, and where their rows lie; on the host.

See `paddle_vl.nn.block_attention`, whose letters are used here.
"""

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.transfer import device_tensor


class BlockSizes(NamedTuple):
    """
    Attributes:
        size: c, tokens of a block.
        chosen: J, blocks that a query sees.
    """

    size: int
    chosen: int

    @property
    def reach(self) -> int:
        """Most tokens that a query sees, below which it sees all."""
        return self.chosen * self.size + self.size - 1


class Choosing(NamedTuple):
    """Consecutive queries of one sample that choose.

    Attributes:
        number: of the first among all queries that choose.
        count: of them.
        query: row of the first query.
        place: number of tokens before it in its sample.
        key: row of the sample's first key.
        block, blocks: number of the sample's first block, and how many it has.
    """

    number: int
    count: int
    query: int
    place: int
    key: int
    block: int
    blocks: int

    def chunks(self, bytes_of_query: int, most: int) -> Iterator["Choosing"]:
        """Parts whose queries have at most so many bytes, or one."""
        step = max(1, most // max(bytes_of_query, 1))
        for done in range(0, self.count, step):
            yield self._replace(
                number=self.number + done,
                count=min(step, self.count - done),
                query=self.query + done,
                place=self.place + done,
            )

    @property
    def queries(self) -> slice:
        return slice(self.query, self.query + self.count)

    @property
    def numbers(self) -> slice:
        return slice(self.number, self.number + self.count)

    def places(self) -> Tensor:
        """int32 `[count, 1]`: the place of each query in its sample."""
        return paddle.arange(self.place, self.place + self.count, dtype="int32").unsqueeze(1)


class BlockSamples:
    """Where samples lie in rows, and which of their queries choose; on the host, one object for all
    layers of a forward pass.

    Not a tuple, which Paddle would search for tensors.

    Args:
        rows_S4: int64: first query row, number of queries, first key row and number of keys of each
            sample, ascending. The last query is the last key's.

    Attributes:
        num_queries: Q.
        parts: of each sample whose queries choose, those queries.
        dense_S4: the queries that do not, with the keys that they see, as `rows_S4`.
    """

    def __init__(self, rows_S4: np.ndarray, sizes: BlockSizes):
        self.sizes, self.parts, self.num_queries = sizes, list[Choosing](), 0
        self._orders: dict[int, Tensor | None] = {}
        dense, blocks = [], 0
        for query, queries, key, keys in rows_S4.tolist():
            before = keys - queries
            num_dense = min(max(sizes.reach - before, 0), queries)
            if num_dense:
                dense.append((query, num_dense, key, before + num_dense))
            if num_dense < queries:
                count, own = queries - num_dense, keys // sizes.size
                self.parts.append(
                    Choosing(
                        *(self.num_queries, count, query + num_dense, before + num_dense),
                        *(key, blocks, own),
                    )
                )
                self.num_queries, blocks = self.num_queries + count, blocks + own
        self.dense_S4 = np.array(dense, dtype=np.int64).reshape(-1, 4)

    @cached_property
    def member_rows(self) -> Tensor:
        """Key rows of the tokens of all blocks of samples that choose: int64 `[X * c]`."""
        size = self.sizes.size
        rows = [np.arange(part.key, part.key + part.blocks * size) for part in self.parts]
        return device_tensor(np.concatenate(rows))

    @cached_property
    def first_rows(self) -> Tensor:
        """Those of the first tokens: int64 `[X]`."""
        size = self.sizes.size
        rows = [part.key + np.arange(part.blocks) * size for part in self.parts]
        return device_tensor(np.concatenate(rows))

    @cached_property
    def packed_dense(self) -> tuple[Tensor, PackedSamples] | None:
        """The dense queries as rows of packed samples; None if a sample has keys of before."""
        query_S, queries_S, key_S, keys_S = self.dense_S4.T
        if (query_S != key_S).any() or (queries_S != keys_S).any():
            return None
        offsets = np.cumsum([0, *queries_S])
        row_D = np.arange(offsets[-1]) + np.repeat(query_S - offsets[:-1], queries_S)
        return device_tensor(row_D), PackedSamples(offsets, int(offsets[-1]))

    def order(self, num_rows: int) -> Tensor | None:
        """Of each query row its number among dense queries, those that choose, and a last row for
        queries of no sample: int64 `[T]`. None where each row has its own number."""
        if num_rows not in self._orders:
            dense = [np.arange(query, query + count) for query, count, *_ in self.dense_S4.tolist()]
            rows = np.concatenate([*dense, *[np.r_[part.queries] for part in self.parts]])
            order_T = np.full(num_rows, rows.size)
            order_T[rows] = np.arange(rows.size)
            is_same = (order_T == np.arange(num_rows)).all()
            self._orders[num_rows] = None if is_same else device_tensor(order_T)
        return self._orders[num_rows]


@lru_cache(maxsize=16)
def equal_samples(batch: int, length: int, sizes: BlockSizes) -> BlockSamples:
    """Samples of one length without padding."""
    begin = np.arange(batch, dtype=np.int64) * length
    rows = [begin, np.full(batch, length), begin, np.full(batch, length)]
    return BlockSamples(np.stack(rows, axis=1), sizes)


@lru_cache(maxsize=16)
def packed_block_samples(offsets: tuple[int, ...], sizes: BlockSizes) -> BlockSamples:
    """Packed samples."""
    begin, length = np.array(offsets[:-1], dtype=np.int64), np.diff(np.array(offsets))
    return BlockSamples(np.stack([begin, length, begin, length], axis=1), sizes)


def padded_samples(key_bias_BS: Tensor, sizes: BlockSizes) -> BlockSamples:
    """Rows of a batch that are padded on the left; the host reads the bias."""
    hidden_BS = key_bias_BS.numpy() < 0.0
    batch, length = hidden_BS.shape
    start = np.where(hidden_BS.all(axis=1), length, hidden_BS.argmin(axis=1)).astype(np.int64)
    begin = np.arange(batch) * length + start
    rows = [begin, length - start, begin, length - start]
    return BlockSamples(np.stack(rows, axis=1), sizes)
