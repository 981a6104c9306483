"""The captioner's configuration, decoder and checkpoint map.

Its layers are parallel: attention and MLP read the same normalized rows, and both are added.

Shapes: B batch, L padded length, T = B * L token rows (this rank's shard of them under sequence
parallelism), D width, N query heads, K key heads, H head width.
"""

import sys
from dataclasses import asdict, field
from typing import Any

from paddle import Tensor, nn

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same
from paddle_vl.families.vlm.modeling.config import (
    EMBEDDING_KEY,
    HEAD_KEY,
    DenseText,
    VisionConfig,
    VLConfig,
    tie_settings,
)
from paddle_vl.families.vlm.modeling.layers import VLLanguageModel
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.files.stored_settings import Listed, checked, read_section
from paddle_vl.nn.attention import RotaryTables, apply_rotary, causal_attention
from paddle_vl.nn.linear import Columns
from paddle_vl.nn.operations import RMSNorm, swiglu
from paddle_vl.nn.placement import Placement


@checked
class DecoderConfig(DenseText):
    """Sizes of the decoder."""

    vocab_size: int
    hidden_size: int = 16
    intermediate_size: int = 24
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 8
    rope_theta: float = 10000.0
    mrope_section: Listed[list[int]] = field(default_factory=lambda: [2, 1, 1])
    initializer_range: float = 0.1
    rms_norm_eps: float = 1e-6


@checked
class CaptionerConfig(VLConfig):
    """`config.json` with `model_type: captioner`."""

    text_config: DecoderConfig = field(default_factory=lambda: DecoderConfig(vocab_size=300))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CaptionerConfig":
        values = dict(values)
        values.pop("model_type", None)
        text, vision = dict(values.pop("text_config", {})), dict(values.pop("vision_config", {}))
        return cls(
            **tie_settings(values, text),
            **values,
            text_config=read_section(DecoderConfig, text, "text_config"),
            vision_config=read_section(VisionConfig, vision, "vision_config"),
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["tie_flags_agree"]
        values["text_config"]["tie_word_embeddings"] = self.tie_word_embeddings
        return {"model_type": "captioner", **values}


class ParallelLayer(nn.Layer):
    """`x + attention(norm(x)) + mlp(norm(x))`."""

    has_experts = False

    def __init__(self, config: DecoderConfig, placement: Placement):
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        columns = [
            Columns("q_proj", query_width, config.num_attention_heads),
            Columns("k_proj", key_width, config.num_key_value_heads),
            Columns("v_proj", key_width, config.num_key_value_heads),
        ]
        self.qkv_proj = placement.layers.projections(width, columns, std)
        self.o_proj = placement.layers.row_linear(query_width, width, std)
        columns = [Columns("gate_proj", inner), Columns("up_proj", inner)]
        self.gate_up_proj = placement.layers.projections(width, columns, std, splits=False)
        self.down_proj = placement.layers.row_linear(inner, width, std)
        self.norm = placement.layers.row_wise(RMSNorm(width, config.rms_norm_eps))

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: Any = None,
        packed: Any = None,
        rows: Any = None,
    ) -> Tensor:
        rows_TD, length = self.norm(x_TD), tables.cos_TH.shape[1]
        q, k, v = (
            columns.reshape([-1, length, columns.shape[-1] // self.head_dim, self.head_dim])
            for columns in self.qkv_proj(rows_TD)
        )
        q, k = apply_rotary(q, k, tables.astype(x_TD.dtype))
        if cache is None:
            out_BLNH = causal_attention(q, k, v, key_bias, packed)
        else:
            out_BLNH = cache.attend(q, k, v, key_bias)
        x_TD = x_TD + self.o_proj(out_BLNH.reshape([-1, out_BLNH.shape[2] * self.head_dim]))
        return x_TD + self.down_proj(swiglu(*self.gate_up_proj(rows_TD)))


class Decoder(VLLanguageModel):
    def make_layer(self, config: DecoderConfig, placement: Placement, number: int) -> nn.Layer:
        return ParallelLayer(config, placement)


def checkpoint_rules(config: CaptionerConfig) -> tuple[Rule, ...]:
    """Keys of the tower as HF's, of the decoder as its parameters."""
    vision, text = config.vision_config, "language_model"
    kernel = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    return (
        Rule(
            "visual.patch_embed.weight", "model.visual.patch_embed.proj.weight", PatchKernel(kernel)
        ),
        Rule("visual.patch_embed.bias", "model.visual.patch_embed.proj.bias", Same()),
        Rule("visual.pos_embed.weight", "model.visual.pos_embed.weight", Same()),
        Rule("visual.*", "model.visual.*", LinearWeights()),
        Rule(f"{text}.embedding.embed_tokens.weight", EMBEDDING_KEY, Same()),
        Rule(f"{text}.*", f"model.{text}.*", LinearWeights()),
        Rule(HEAD_KEY, EMBEDDING_KEY if config.tie_word_embeddings else HEAD_KEY, Same()),
    )


def tensors_as_here(stored: dict, config: CaptionerConfig) -> dict:
    """A checkpoint's tensors as they are."""
    return stored


class Captioner(VLForConditionalGeneration):
    config_class = CaptionerConfig
    checkpoint_map = sys.modules[__name__]
    decoder_class = Decoder
