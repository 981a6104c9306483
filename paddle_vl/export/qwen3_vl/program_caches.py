"""Keys and values in programs, of one decoder layer each; see `LanguageModel.run`.

Shapes: B batch, L new tokens, S keys so far, C capacity of buffers, N query heads, K key heads, H
head width.
"""

from abc import ABC, abstractmethod
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.export.attention import biased_attention


class HeadsFirst(ABC):
    """A cache of a program: keys and values with heads before positions.

    Args:
        bias: of the scores, see `biased_attention`.
    """

    def __init__(self, bias: Any):
        self.bias = bias

    def mask(self, num_new: Any, key_bias: Any) -> Any:
        """The bias of all layers."""
        return self.bias

    def attend(self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, bias: Tensor) -> Tensor:
        """Attention `[B, L, N, H]` over the keys so far and new ones."""
        key_BKLH, value_BKLH = (x.transpose([0, 2, 1, 3]) for x in (key_BLKH, value_BLKH))
        return biased_attention(q_BLNH, *self.append(key_BKLH, value_BKLH), bias)

    @abstractmethod
    def append(self, key_BKLH: Tensor, value_BKLH: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new keys and values; all that are attended to."""


class NewKeys(HeadsFirst):
    """Keeps the keys and values of one pass, `[B, K, L, H]`."""

    def append(self, key_BKLH: Tensor, value_BKLH: Tensor) -> tuple[Tensor, Tensor]:
        self.pair = key_BKLH, value_BKLH
        return self.pair


class Buffers(HeadsFirst):
    """Buffers of fixed capacity, `[B, K, C, H]`; one position is written in place."""

    def __init__(self, bias: Any, key_BKCH: Tensor, value_BKCH: Tensor, place_1: Tensor):
        super().__init__(bias)
        self.key_BKCH, self.value_BKCH, self.place_1 = key_BKCH, value_BKCH, place_1

    def append(self, key_BKLH: Tensor, value_BKLH: Tensor) -> tuple[Tensor, Tensor]:
        begin, end = self.place_1, self.place_1 + 1
        self.key_BKCH[:, :, begin:end] = key_BKLH
        self.value_BKCH[:, :, begin:end] = value_BKLH
        return self.key_BKCH, self.value_BKCH


class Past(NewKeys):
    """The keys and values so far, `[B, K, S, H]`; new ones are appended to copies."""

    def __init__(self, bias: Any, key_BKSH: Tensor, value_BKSH: Tensor):
        super().__init__(bias)
        self.past = key_BKSH, value_BKSH

    def append(self, key_BKLH: Tensor, value_BKLH: Tensor) -> tuple[Tensor, Tensor]:
        self.pair = (
            paddle.concat([self.past[0], key_BKLH], axis=2),
            paddle.concat([self.past[1], value_BKLH], axis=2),
        )
        return self.pair
