"""Keys and values of a decoder layer during generation.

Shapes: B batch, L new tokens, S cached and new keys, C capacity of buffers, N query heads, K key
heads, H head width; M places of a memory that many prompts share.
"""

from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.nn.attention import (
    CachedKeys,
    PagedKeys,
    appended_attention,
    cached_attention,
    causal_attention,
    paged_attention,
)
from paddle_vl.nn.dispatch import device_of


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
        self._make_room(key_BLKH)
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
        if self.length and q_BLNH.shape[1] == 1 and not self._has_positions_first:
            self._make_room(key_BLKH)
            return appended_attention(q_BLNH, key_BLKH, value_BLKH, self._key, self._value, cached)
        buffers = self.append(key_BLKH, value_BLKH)
        if self.length == key_BLKH.shape[1]:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH, cached.key_bias_BS)
        return cached_attention(q_BLNH, *buffers, cached)

    def _make_room(self, new_BLKH: Tensor) -> None:
        """Count new keys; buffers that are too small grow."""
        begin, self.length = self.length, self.length + new_BLKH.shape[1]
        is_first = self._has_positions_first
        if begin and self.length <= self._key.shape[0 if is_first else 2]:
            return
        # Room for the keys and an eighth more, so that growing copies each key a few times.
        needed = max(self.length, self._prompt)
        room = needed + max(self.CHUNK, needed // 8)
        room = room if self._most is None else max(needed, min(room, self._most))
        batch, _, heads, width = new_BLKH.shape
        shape = [room, batch, heads, width] if is_first else [batch, heads, room, width]
        grown = [paddle.zeros(shape, dtype=new_BLKH.dtype) for _ in range(2)]
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


class RowPool:
    """What a decoder layer keeps of many rows that join and leave; see `LanguageModel.run`.

    Attributes:
        paged: where the keys of the rows lie that run next.
    """

    paged: PagedKeys

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> PagedKeys:
        """What the pools of all layers share."""
        return self.paged


class KeyValuePool(RowPool):
    """Keys and values of one decoder layer, each `[M, K, H]`; rows have places of it."""

    def __init__(self, places: int, heads: int, width: int, dtype: paddle.dtype):
        # Never read before they are written; pages come with their first token.
        self._key, self._value = (paddle.empty([places, heads, width], dtype) for _ in range(2))

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, paged: PagedKeys
    ) -> Tensor:
        """As of `KeyValueCache`: one token of each row, or several of one."""
        for memory, new_BLKH in ((self._key, key_BLKH), (self._value, value_BLKH)):
            paddle.scatter_(memory, paged.new, new_BLKH.reshape([-1, *memory.shape[1:]]))
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
