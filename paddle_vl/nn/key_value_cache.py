"""Keys and values of a decoder layer during generation.

Shapes: B batch, L new tokens, S cached and new keys, C capacity of buffers, N query heads, K key
heads, H head width; M places of a memory that many prompts share.
"""

from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_vl.nn.attention import (
    CachedKeys,
    PagedKeys,
    RowPool,
    appended_attention,
    cached_attention,
    causal_attention,
    paged_attention,
)
from paddle_vl.nn.dispatch import device_of


class TokenKeys(NamedTuple):
    """Keys and values of a layer for a kernel of one new token of each row.

    Attributes:
        strides: of a row, a key head and a place of the memories, in entries.
        cached: how many keys there are, with the new ones, or where.
    """

    key: Tensor
    value: Tensor
    strides: tuple[int, int, int]
    cached: CachedKeys


class KeyValueCache:
    """Keys and values of one decoder layer: buffers `[B, K, C, H]` that grow in chunks.

    New keys are written in place, so that no step copies the past. In memory heads come before
    positions, as attention on a CPU reads them; on a GPU `[C, B, K, H]`, so that the keys so far
    are one piece. Free positions are zero.

    Args:
        prompt: number of keys that come first, maybe in parts: room for them is made at once.
        most: number of keys that there can be; None if it is not known.

    Attributes:
        length: S, the number of keys so far.
    """

    CHUNK = 64

    def __init__(self, prompt: int = 0, most: int | None = None):
        self.length, self._prompt, self._most = 0, prompt, most
        # As they lie in memory.
        self._key: Any = None
        self._value: Any = None
        self._has_positions_first = False

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        """What the caches of all layers share when `num_new` keys are appended to each."""
        return CachedKeys(self.length + num_new, key_bias_BS)

    def append(self, key_BLKH: Tensor, value_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, with new ones behind the last."""
        begin = self.length
        if begin == 0:
            self._has_positions_first = device_of(key_BLKH) == "gpu"
        self._make_room(key_BLKH.shape, key_BLKH.dtype)
        order = [1, 0, 2, 3] if self._has_positions_first else [0, 2, 1, 3]
        for buffer, new_BLKH in ((self._key, key_BLKH), (self._value, value_BLKH)):
            self._write(buffer, begin, new_BLKH.transpose(order))
        if self._has_positions_first:
            return self._key.transpose([1, 2, 0, 3]), self._value.transpose([1, 2, 0, 3])
        return self._key, self._value

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, cached: CachedKeys
    ) -> Tensor:
        """Attention `[B, L, N, H]` over all keys so far and new ones, which are appended."""
        if q_BLNH.shape[1] == 1 and self.takes_token:
            self._make_room(key_BLKH.shape, key_BLKH.dtype)
            return appended_attention(q_BLNH, key_BLKH, value_BLKH, self._key, self._value, cached)
        buffers = self.append(key_BLKH, value_BLKH)
        if self.length == key_BLKH.shape[1]:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH, cached.key_bias_BS)
        return cached_attention(q_BLNH, *buffers, cached)

    @property
    def takes_token(self) -> bool:
        """Whether there are keys, with heads first."""
        return self.length > 0 and not self._has_positions_first

    def for_token(self, cached: CachedKeys) -> TokenKeys:
        """The buffers, with room for a new token, which is counted."""
        batch, heads, _, width = self._key.shape
        self._make_room([batch, 1, heads, width], self._key.dtype)
        capacity = self._key.shape[2]
        strides = (heads * capacity * width, capacity * width, width)
        return TokenKeys(self._key, self._value, strides, cached)

    def _make_room(self, shape_BLKH: list[int], dtype: paddle.dtype) -> None:
        """Count new keys; buffers that are too small grow."""
        batch, num_new, heads, width = shape_BLKH
        begin, self.length = self.length, self.length + num_new
        is_first = self._has_positions_first
        if begin and self.length <= self._key.shape[0 if is_first else 2]:
            return
        # Room for the keys and an eighth more, so that growing copies each key a few times.
        needed = max(self.length, self._prompt)
        room = needed + max(self.CHUNK, needed // 8)
        room = room if self._most is None else max(needed, min(room, self._most))
        shape = [room, batch, heads, width] if is_first else [batch, heads, room, width]
        grown = [paddle.zeros(shape, dtype=dtype) for _ in range(2)]
        for old, new in zip((self._key, self._value), grown, strict=True):
            if begin:
                past = old._slice(0, begin) if is_first else old[:, :, :begin]
                self._write(new, 0, past)
        self._key, self._value = grown

    def _write(self, buffer: Tensor, begin: int, new: Tensor) -> None:
        if self._has_positions_first:
            paddle.assign(new, buffer._slice(begin, begin + new.shape[0]))
        else:
            buffer[:, :, begin : begin + new.shape[2]] = new


class KeyValuePool(RowPool):
    """Keys and values of one decoder layer, each `[M, K, H]`; rows have places of it."""

    def __init__(self, places: int, heads: int, width: int, dtype: paddle.dtype):
        # Never read before they are written; pages come with their first token.
        self._key, self._value = (paddle.empty([places, heads, width], dtype) for _ in range(2))

    @property
    def takes_token(self) -> bool:
        """Whether the rows that run next have one token each."""
        return self.paged.num_new == 1

    def for_token(self, paged: PagedKeys) -> TokenKeys:
        """See `KeyValueCache.for_token`."""
        _, heads, width = self._key.shape
        return TokenKeys(self._key, self._value, (0, width, heads * width), paged)

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, paged: PagedKeys
    ) -> Tensor:
        """As of `KeyValueCache`: one token of each row, or several of one."""
        self._append(key_BLKH, value_BLKH, paged)
        length = q_BLNH.shape[1]
        if length == 1:
            return paged_attention(q_BLNH.squeeze(1), self._key, self._value, paged).unsqueeze(1)
        if paged.length == length:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH)
        key_BSKH, value_BSKH = (
            paddle.index_select(memory, paged.places).unsqueeze(0)
            for memory in (self._key, self._value)
        )
        return causal_attention(q_BLNH, key_BSKH, value_BSKH)

    def _append(self, key_BLKH: Tensor, value_BLKH: Tensor, paged: PagedKeys) -> None:
        for memory, new_BLKH in ((self._key, key_BLKH), (self._value, value_BLKH)):
            paddle.scatter_(memory, paged.new, new_BLKH.reshape([-1, *memory.shape[1:]]))
