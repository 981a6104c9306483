"""Attention of pi07's programs, whose lengths are not known when they are traced.

It equals `StreamView.attend` wherever a query sees a key. Padding sees none; no token sees it.

Shapes: B batch, L tokens of a stream, S keys, C steps of a chunk, N query heads, K key heads, G
query heads of each, R = G * C, H head width.
"""

import paddle
from paddle import Tensor

from paddle_vl.export.attention import biased_attention, one_block
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.decoder import SuffixView
from paddle_vl.families.pi07.decoder_layers import KeyValue, PrefixKeys, StreamView
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig


class ProgramView(StreamView):
    """A view whose layers share one bias.

    Args:
        view: of the decoder.
    """

    def __init__(self, view: StreamView, config: Gemma3WithExpertConfig):
        super().__init__(
            view.shape, view.rotary, view.mask, view.scale, view.implementation, view.num_rows
        )
        text = config.gemma3_config.text_config
        groups = text.num_attention_heads // text.num_key_value_heads
        self._bias = one_block(view.mask.bias_B1LS.squeeze(1), groups)

    def attend(self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """Attention output `[B, L, N, H]`."""
        # `biased_attention` scales by H^-0.5.
        factor = self.scale * q_BLNH.shape[-1] ** 0.5
        q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
        k_BKSH, v_BKSH = k_BSKH.transpose([0, 2, 1, 3]), v_BSKH.transpose([0, 2, 1, 3])
        return biased_attention(q_BLNH, k_BKSH, v_BKSH, self._bias)


def shared_by_steps(
    own: StreamView, keys_values: list[KeyValue], config: PI07Config
) -> tuple[SuffixView, list[PrefixKeys]]:
    """View and prefix for the Euler steps; what they share is made here, not in every step."""
    key_heads, expert = keys_values[0][0].shape[2], config.vlm_config.gemma_expert_config
    groups = expert.num_attention_heads // expert.num_key_value_heads
    own.prepare([groups * key_heads, key_heads])
    # In full, as Paddle's CPU kernels are slow at broadcasting over a middle dim.
    bias_B1RS = paddle.concat([own.mask.bias_B1LS] * groups, axis=2)
    bias_BKRS = paddle.concat([bias_B1RS] * key_heads, axis=1)
    # With -1 for B, no reshape of a step needs to compute it.
    shape = (-1, config.chunk_size)
    view = StreamView(shape, own.rotary, own.mask, own.scale, own.implementation, own.num_rows)
    prefix = [PrefixKeys(keys_values[i], bias_BKRS, own.scale) for i in range(len(keys_values))]
    return SuffixView(view, None, insulated=False), prefix
