"""Attention of pi07's programs, whose lengths are not known when they are traced.

It equals `StreamView.attend` wherever a query sees a key. Padding sees none; no token sees it.

Shapes: B batch, L tokens of a stream, n new ones, S keys, C steps of a chunk, N query heads, K key
heads, G query heads of each, R = G * C, H head width.
"""

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.export.attention import biased_attention, one_block
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.decoder import KeyValue, StreamView, SuffixView
from paddle_vl.families.pi07.engine_config import Gemma3TextConfig


class ProgramView(StreamView):
    """A view whose layers share rotary tables and one bias, made outside of any loop.

    Args:
        view: of the decoder.
        place_1: int64, where the first new token is written into buffers, the keys and values of a
            fixed capacity; None to append to copies.
    """

    def __init__(self, view: StreamView, text: Gemma3TextConfig, place_1: Tensor | None = None):
        super().__init__(view.shape, view.rotary, view.mask, view.scale, view.implementation)
        self.num_rows, self._place_1 = view.num_rows, place_1
        heads, key_heads = text.num_attention_heads, text.num_key_value_heads
        for tables in view.rotary.values():
            tables.prepare([heads, key_heads])
        self._bias = one_block(view.mask.bias_B1LS.squeeze(1), heads // key_heads)

    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, past: Any
    ) -> tuple[Tensor, KeyValue]:
        """Attention output `[B, L, N, H]`, and all keys and values or the buffers in full."""
        k_BSKH, v_BSKH = k_BLKH, v_BLKH
        if self._place_1 is not None:
            k_BSKH, v_BSKH = past
            begin, end = self._place_1, self._place_1 + k_BLKH.shape[1]
            k_BSKH[:, begin:end] = k_BLKH
            v_BSKH[:, begin:end] = v_BLKH
        elif past is not None:
            k_BSKH = paddle.concat([past[0], k_BLKH], axis=1)
            v_BSKH = paddle.concat([past[1], v_BLKH], axis=1)
        # `biased_attention` scales by H^-0.5.
        factor = self.scale * q_BLNH.shape[-1] ** 0.5
        q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
        k_BKSH, v_BKSH = k_BSKH.transpose([0, 2, 1, 3]), v_BSKH.transpose([0, 2, 1, 3])
        return biased_attention(q_BLNH, k_BKSH, v_BKSH, self._bias), (k_BSKH, v_BSKH)


class PrefixKeys:
    """Keys and values of a prefix, laid out once for the suffixes of all Euler steps.

    Each query of a suffix must see a key.

    Args:
        prefix: keys and values `[B, L, K, H]`.
        bias_BKRS: float32, added to the scores.
        scale: factor of the scores.
    """

    def __init__(self, prefix: KeyValue, bias_BKRS: Tensor, scale: float):
        key_BLKH, value_BLKH = prefix
        self.key_BKHL = key_BLKH.transpose([0, 2, 3, 1])
        self.value_BKLH = value_BLKH.transpose([0, 2, 1, 3])
        self.bias_BKRS, self.scale = bias_BKRS, scale

    def attend(self, q_BCNH: Tensor, k_BCKH: Tensor, v_BCKH: Tensor) -> Tensor:
        """Attention output `[B, C, N, H]` of a suffix over the prefix and itself."""
        steps, heads, width = q_BCNH.shape[1:]
        key_heads = k_BCKH.shape[2]
        # The G query heads of a key head become R = G * C rows of one product.
        q_BNCH = (q_BCNH * self.scale).transpose([0, 2, 1, 3])
        q_BKRH = q_BNCH.reshape([-1, key_heads, heads // key_heads * steps, width])
        k_BKHC, v_BKCH = k_BCKH.transpose([0, 2, 3, 1]), v_BCKH.transpose([0, 2, 1, 3])
        scores_BKRS = paddle.concat(
            [paddle.matmul(q_BKRH, self.key_BKHL), paddle.matmul(q_BKRH, k_BKHC)], axis=-1
        )
        weights_BKRS = F.softmax(scores_BKRS.astype("float32") + self.bias_BKRS)
        weights_BKRS = weights_BKRS.astype(v_BKCH.dtype)
        out_BKRH = paddle.matmul(weights_BKRS[..., :-steps], self.value_BKLH)
        out_BKRH = out_BKRH + paddle.matmul(weights_BKRS[..., -steps:], v_BKCH)
        return out_BKRH.reshape([-1, heads, steps, width]).transpose([0, 2, 1, 3])


class StepView(StreamView):
    """The suffix's own view in an Euler step; `past` is `PrefixKeys`."""

    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, past: Any
    ) -> tuple[Tensor, KeyValue]:
        return past.attend(q_BLNH, k_BLKH, v_BLKH), (k_BLKH, v_BLKH)


class StepSuffixView(SuffixView):
    """A suffix that sees all of a prefix, given as `PrefixKeys`."""

    def read(self, prefix: Any) -> Any:
        return prefix


def shared_by_steps(
    own: StreamView, keys_values: list[KeyValue], config: PI07Config
) -> tuple[SuffixView, list[Any]]:
    """View and `PrefixKeys` of all Euler steps; what they share is made here, once."""
    key_heads, expert = keys_values[0][0].shape[2], config.vlm_config.gemma_expert_config
    groups = expert.num_attention_heads // expert.num_key_value_heads
    for tables in own.rotary.values():
        tables.prepare([groups * key_heads, key_heads])
    # In full, as Paddle's CPU kernels are slow at broadcasting over a middle dim.
    bias_B1RS = paddle.concat([own.mask.bias_B1LS] * groups, axis=2)
    bias_BKRS = paddle.concat([bias_B1RS] * key_heads, axis=1)
    # With -1 for B, no reshape of a step needs to compute it.
    shape = (-1, config.chunk_size)
    view = StepView(shape, own.rotary, own.mask, own.scale, own.implementation)
    view.num_rows = own.num_rows
    prefix = [PrefixKeys(keys_values[i], bias_BKRS, own.scale) for i in range(len(keys_values))]
    return StepSuffixView(view, None, insulated=False), prefix
