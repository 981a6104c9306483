"""Qwen3-VL: the shared vision-language model with the Qwen3 decoder over token rows.

Shapes: B batch, L padded length, T = B * L token rows, batch-major (this rank's shard under
sequence parallelism); D width; N query heads, K key heads, H head width; S cached and new keys.

Source: Qwen3VLTextModel and Qwen3VLForConditionalGeneration of HF transformers,
modeling_qwen3_vl.py.
"""

from typing import Any

from paddle import Tensor, nn

from paddle_vl.families.qwen3_vl import checkpoint_map
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig, Qwen3VLTextConfig
from paddle_vl.families.vlm.cache import KeyValueCache
from paddle_vl.families.vlm.layers import SwiGLUMLP, VLDecoderLayer, VLLanguageModel
from paddle_vl.families.vlm.model import VLForConditionalGeneration
from paddle_vl.families.vlm.moe import SparseMoE
from paddle_vl.nn.attention import PackedSamples, RotaryTables, apply_rotary, causal_attention
from paddle_vl.nn.linear import Columns
from paddle_vl.nn.operations import RMSNorm
from paddle_vl.nn.placement import Placement


class SelfAttention(nn.Layer):
    """Causal grouped-query attention; queries and keys are normalized, then rotated."""

    def __init__(self, config: Qwen3VLTextConfig, placement: Placement):
        super().__init__()
        self.head_dim = config.head_dim
        width, std = config.hidden_size, config.initializer_range
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        query_width, key_width = heads * config.head_dim, key_heads * config.head_dim
        columns = [
            Columns("q_proj", query_width, heads),
            Columns("k_proj", key_width, key_heads),
            Columns("v_proj", key_width, key_heads),
        ]
        self.qkv_proj = placement.layers.projections(width, columns, std)
        self.o_proj = placement.layers.row_linear(query_width, width, std)
        self.q_norm = placement.layers.head_wise(RMSNorm(config.head_dim, config.rms_norm_eps))
        self.k_norm = placement.layers.head_wise(RMSNorm(config.head_dim, config.rms_norm_eps))

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: KeyValueCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        length = tables.cos_TH.shape[1]
        q_BLNH, k_BLKH, v_BLKH = [
            rows.reshape([-1, length, rows.shape[-1] // self.head_dim, self.head_dim])
            for rows in self.qkv_proj(x_TD)
        ]
        q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BLNH, k_BLKH = apply_rotary(q_BLNH, k_BLKH, tables.astype(x_TD.dtype))
        if cache is not None:
            out_BLNH = cache.attend(q_BLNH, k_BLKH, v_BLKH, key_bias)
        else:
            out_BLNH = causal_attention(q_BLNH, k_BLKH, v_BLKH, key_bias, packed)
        return self.o_proj(out_BLNH.reshape([-1, out_BLNH.shape[2] * self.head_dim]))


class LanguageModel(VLLanguageModel):
    """The decoder of Qwen3-VL."""

    def make_layer(self, config: Qwen3VLTextConfig, placement: Placement, number: int) -> nn.Layer:
        experts, mixer = config.experts_of(number), SelfAttention(config, placement)
        mlp = (
            SwiGLUMLP(
                config.hidden_size, config.intermediate_size, config.initializer_range, placement
            )
            if experts is None
            else SparseMoE(experts, placement)
        )
        return VLDecoderLayer(config, placement, "self_attn", mixer, mlp, RMSNorm)


class Qwen3VLForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen3VLConfig
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel
