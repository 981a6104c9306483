"""Masks of attention: which keys each query sees, and the structure that kernels use of it.

Shapes: B batch, L queries, S keys, V videos, F frames.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import paddle
from paddle import Tensor

# Below any score, yet finite: a query that sees only padding gets an average instead of NaN.
MASKED_SCORE = -1e30


class AttentionMask:
    """Which keys each query sees; one object for all layers of a forward pass.

    Subclasses know a structure that kernels use in place of the dense mask, which is made only if
    it is needed. Not a tuple, which Paddle would search for tensors.

    Args:
        visible_BLS: bool, or a function that makes it.

    Attributes:
        some_see_nothing: False if every query is known to see a key.
        keys_are_queries: whether `row_intervals` are of as many rows as keys.
    """

    some_see_nothing = True
    keys_are_queries = True

    def __init__(self, visible_BLS: Tensor | Callable[[], Tensor]):
        self._visible = visible_BLS
        self._narrow_biases: dict[str, Tensor] = {}

    @cached_property
    def visible_BLS(self) -> Tensor:
        """bool."""
        return self._visible() if callable(self._visible) else self._visible

    @cached_property
    def has_key_BL11(self) -> Tensor:
        """float32, 1 where a query sees any key."""
        return self.visible_BLS.any(axis=-1).astype("float32").unsqueeze([2, 3])

    @cached_property
    def bias_B1LS(self) -> Tensor:
        """float32 to be added to scores, 0 or `MASKED_SCORE`: a query that sees no key weighs all
        keys equally. (Flash attention multiplies a mask by the root of H; the lowest float32, which
        the originals use, would become infinite.)"""
        return self._bias_of(self.visible_BLS)

    def bias_in(self, dtype: Any) -> Tensor:
        """`bias_B1LS` in another dtype."""
        return self._narrow("all", lambda: self.bias_B1LS, dtype)

    def row_bias_in(self, dtype: Any) -> Tensor:
        """`bias_in`, or `[B, 1, 1, S]` if all queries see the same keys."""
        return self.bias_in(dtype)

    def of_queries(self, queries: slice) -> "AttentionMask":
        """The mask of some of the queries over all keys."""
        return AttentionMask(lambda: self.visible_BLS[:, queries])

    def within(
        self, window: int, query_positions_BL: Tensor, key_positions_BS: Tensor
    ) -> "AttentionMask":
        """The mask without keys that are `window` or more positions before a query."""

        def visible() -> Tensor:
            behind_BLS = query_positions_BL.unsqueeze(2) - key_positions_BS.unsqueeze(1)
            return paddle.logical_and(self.visible_BLS, behind_BLS < window)

        return AttentionMask(visible)

    def _narrow(self, kind: str, make: Callable[[], Tensor], dtype: Any) -> Tensor:
        key = f"{kind} {dtype}"
        if key not in self._narrow_biases:
            self._narrow_biases[key] = make().astype(dtype)
        return self._narrow_biases[key]

    def row_intervals(self) -> Tensor | None:
        """The mask as FlashMask takes it: int32 `[B, 1, S, 2]` first and end row, `(first, end)` of
        each key, of which rows `[end, first)` see the key. None for a mask of another kind.

        Rows that see no key may see some here: their output is to be replaced.
        """
        return None

    @staticmethod
    def _bias_of(visible_BLS: Tensor) -> Tensor:
        return (paddle.logical_not(visible_BLS).astype("float32") * MASKED_SCORE).unsqueeze(1)


class BlockMask(AttentionMask):
    """Tokens see their own block and earlier ones; padding neither sees nor is seen.

    Mark 1 begins a block, 0 continues it. Marks 0 0 0 | 1 0 | 1 | 1 are a block of three, a block
    of two and two causal tokens:

        1 1 1 0 0 0 0
        1 1 1 0 0 0 0
        1 1 1 0 0 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 1 0
        1 1 1 1 1 1 1

    Args:
        pad_BL: bool, True for real tokens.
        marks_BL: bool or int.
    """

    def __init__(self, pad_BL: Tensor, marks_BL: Tensor):
        super().__init__(self._dense)
        self._pad_BL, self._marks_BL = pad_BL, marks_BL

    @cached_property
    def has_key_BL11(self) -> Tensor:
        # A real token sees itself.
        return self._pad_BL.astype("float32").unsqueeze([-1, -1])

    def row_intervals(self) -> Tensor:
        return self._intervals_B1L2

    def of_queries(self, queries: slice) -> AttentionMask:
        mask = AttentionMask(lambda: self._dense(queries))
        mask.has_key_BL11 = self.has_key_BL11[:, queries]
        return mask

    @cached_property
    def _intervals_B1L2(self) -> Tensor:
        """All rows from the first of its block see a key. That of padding is seen by none: its
        interval ends where it begins, at its own row, so that both of FlashMask's triangles are
        masked whole."""
        place_L = paddle.arange(self._pad_BL.shape[1], dtype="int32")
        begins_BL = self._marks_BL.astype("int32") * place_L
        first_BL = paddle.cummax(begins_BL, axis=1)[0]
        end_BL = paddle.full_like(begins_BL, self._pad_BL.shape[1])
        both = (paddle.where(self._pad_BL, x, place_L.expand(x.shape)) for x in (end_BL, first_BL))
        return paddle.stack(list(both), axis=-1).unsqueeze(1)

    def _dense(self, queries: slice = slice(None)) -> Tensor:
        """A query sees the keys whose block is not above its own. That of padding is above all
        others as a key, and below them as a query."""
        block_BL = paddle.cumsum(self._marks_BL.astype("int32"), axis=1)
        above_BL = paddle.full_like(block_BL, 2**31 - 1)
        key_BL = paddle.where(self._pad_BL, block_BL, above_BL)
        query_BL = paddle.where(self._pad_BL, block_BL, paddle.full_like(block_BL, -1))
        query_BL = query_BL if queries == slice(None) else query_BL[:, queries]
        return key_BL.unsqueeze(1) <= query_BL.unsqueeze(2)


class KeyMask(AttentionMask):
    """All queries see the same keys, and every query sees one.

    Args:
        seen_BS: bool, the keys that are seen.
        num_queries: L.
    """

    some_see_nothing = False

    def __init__(self, seen_BS: Tensor, num_queries: int):
        super().__init__(lambda: seen_BS.unsqueeze(1).expand([-1, num_queries, -1]))
        self._seen_BS = seen_BS

    def row_bias_in(self, dtype: Any) -> Tensor:
        return self._narrow("row", lambda: self._bias_of(self._seen_BS.unsqueeze(1)), dtype)


class SliceMask(AttentionMask):
    """Each key is seen by one run of queries, and every query sees a key: rows of packed samples,
    of which this rank has some as queries, and the keys of all in another order.

    Args:
        rows_B1S2: int32 `row_intervals`.
        num_queries: L.
        orders_2S: where attention is for all rows, in their order, `RowSlice.orders`.

    Attributes:
        orders: the two, `[S]` each.
    """

    some_see_nothing = False
    keys_are_queries = False

    def __init__(self, rows_B1S2: Tensor, num_queries: int, orders_2S: Tensor | None = None):
        super().__init__(self._dense)
        self._rows_B1S2, self._num_queries = rows_B1S2, num_queries
        self.orders: Sequence[Tensor] = () if orders_2S is None else orders_2S.unbind(0)

    def row_intervals(self) -> Tensor:
        return self._rows_B1S2

    def _dense(self) -> Tensor:
        ends_B1S, first_B1S = (self._rows_B1S2[..., n] for n in range(2))
        place_L1 = paddle.arange(self._num_queries, dtype="int32").unsqueeze(1)
        return paddle.logical_and(place_L1 < ends_B1S, place_L1 >= first_B1S)


class HistoryMask(AttentionMask):
    """Each frame of a video sees the real frames up to its own. B = videos * copies: consecutive
    entries of a batch, such as the patches of a video, have one mask. L = S frames.

    Args:
        real_VF: bool of V videos.
        copies: entries of each video.
    """

    def __init__(self, real_VF: Tensor, copies: int):
        super().__init__(self._dense)
        self._real_VF, self.copies = real_VF, copies

    @cached_property
    def row_ends_V1R1(self) -> Tensor:
        """int32: the entries of a video as one row of R = copies * F frames, in which each entry is
        a causal document; for each key the first later row that does not see it, its own if it is
        not real."""
        frames = self._real_VF.shape[1]
        place_R = paddle.arange(self.copies * frames, dtype="int32")
        end_R = (place_R // frames + 1) * frames
        real_VR = paddle.tile(self._real_VF, [1, self.copies])
        end_VR, place_VR = end_R.expand(real_VR.shape), place_R.expand(real_VR.shape)
        ends_VR = paddle.where(real_VR, end_VR, place_VR)
        return ends_VR.unsqueeze([1, 3])

    def _dense(self) -> Tensor:
        order_VF = paddle.cumsum(paddle.ones_like(self._real_VF, dtype="int64"), axis=1)
        causal_VFF = order_VF.unsqueeze(2) >= order_VF.unsqueeze(1)
        visible_V1FF = paddle.logical_and(self._real_VF.unsqueeze(1), causal_VFF).unsqueeze(1)
        return visible_V1FF.expand([-1, self.copies, -1, -1]).flatten(0, 1)
