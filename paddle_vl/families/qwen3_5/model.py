"""Qwen3.5: the shared vision-language model with a decoder of gated DeltaNet layers and, mostly
every fourth, gated attention.

Source: Qwen3_5TextModel of HF transformers, modeling_qwen3_5.py and modeling_qwen3_5_moe.py.
"""

from typing import Any

from paddle import nn

from paddle_vl.families.qwen3_5 import checkpoint_map
from paddle_vl.families.qwen3_5.config import Qwen3_5Config, Qwen3_5TextConfig
from paddle_vl.families.vlm.modeling.delta_layers import GatedDeltaNet, SharedExpertMoE
from paddle_vl.families.vlm.modeling.layers import VLDecoderLayer, VLLanguageModel, VLSelfAttention
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.nn.attention import RowPool
from paddle_vl.nn.delta_rule import DeltaCache, DeltaPool
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.nn.operations import GemmaRMSNorm
from paddle_vl.nn.placement import Placement


class LanguageModel(VLLanguageModel):
    """The decoder of Qwen3.5."""

    norm_class = GemmaRMSNorm

    def make_layer(self, config: Qwen3_5TextConfig, placement: Placement, number: int) -> nn.Layer:
        if config.is_full(number):
            name = "self_attn"
            mixer = VLSelfAttention(config, placement, GemmaRMSNorm, is_gated=True)
        else:
            name, mixer = "linear_attn", GatedDeltaNet(config, placement)
        return VLDecoderLayer(config, placement, number, mixer, name, GemmaRMSNorm, SharedExpertMoE)


class Qwen3_5ForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen3_5Config
    model_type = "qwen3_5"
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel

    def new_caches(self, prompt: int, most: int | None) -> list[Any]:
        text = self.config.text_config
        return [
            KeyValueCache(prompt, most) if text.is_full(i) else DeltaCache()
            for i in range(text.num_hidden_layers)
        ]

    def new_pool(self, number: int, places: int, num_rows: int) -> RowPool:
        is_full = self.config.text_config.is_full(number)
        return super().new_pool(number, places, num_rows) if is_full else DeltaPool(num_rows)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """HF's name of a model whose layers have experts; the configuration says whether they do."""
