"""Keys and values of a decoder layer during generation.

Shapes: B batch, L new tokens, S cached and new keys, C capacity of buffers, N query heads, K key
heads, H head width.
"""

import paddle
from paddle import Tensor

from paddle_vl.nn.attention import CachedKeys, cached_attention, causal_attention


class KeyValueCache:
    """Keys and values of one decoder layer: buffers `[B, K, C, H]` that grow in chunks.

    New keys are written in place, so that no step copies the past. Heads come before positions, as
    in attention on the CPU, and free positions are zero.

    Args:
        prompt: number of keys that come first, maybe in parts: room for them is made at once.
        most: number of keys that there can be; None if it is not known.

    Attributes:
        length: S, the number of keys so far.
    """

    CHUNK = 64

    def __init__(self, prompt: int = 0, most: int | None = None):
        self.length, self._prompt, self._most = 0, prompt, most
        self._key_BKCH: Tensor | None = None
        self._value_BKCH: Tensor | None = None

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        """What the caches of all layers share when `num_new` keys are appended to each."""
        return CachedKeys(self.length + num_new, key_bias_BS)

    def append(self, key_BLKH: Tensor, value_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, with new ones behind the last."""
        begin, self.length = self.length, self.length + key_BLKH.shape[1]
        self._key_BKCH = self._written(self._key_BKCH, key_BLKH, begin)
        self._value_BKCH = self._written(self._value_BKCH, value_BLKH, begin)
        return self._key_BKCH, self._value_BKCH

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, cached: CachedKeys
    ) -> Tensor:
        """Attention `[B, L, N, H]` over all keys so far and new ones, which are appended."""
        buffers = self.append(key_BLKH, value_BLKH)
        if self.length == key_BLKH.shape[1]:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH, cached.key_bias_BS)
        return cached_attention(q_BLNH, *buffers, cached)

    def _written(self, buffer_BKCH: Tensor | None, new_BLKH: Tensor, begin: int) -> Tensor:
        batch, _, heads, width = new_BLKH.shape
        if buffer_BKCH is None or self.length > buffer_BKCH.shape[2]:
            # Room for the keys and an eighth more, so that growing copies each key a few times.
            needed = max(self.length, self._prompt)
            room = needed + max(self.CHUNK, needed // 8)
            room = room if self._most is None else max(needed, min(room, self._most))
            shape = [batch, heads, room, width]
            grown = paddle.zeros(shape, dtype=new_BLKH.dtype)
            if buffer_BKCH is not None:
                grown[:, :, :begin] = buffer_BKCH[:, :, :begin]
            buffer_BKCH = grown
        buffer_BKCH[:, :, begin : self.length] = new_BLKH.transpose([0, 2, 1, 3])
        return buffer_BKCH
