"""Qwen3-VL: the shared vision-language model with the Qwen3 decoder over token rows.

Source: Qwen3VLTextModel and Qwen3VLForConditionalGeneration of HF transformers,
modeling_qwen3_vl.py.
"""

from paddle import nn

from paddle_vl.families.qwen3_vl import checkpoint_map
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig, Qwen3VLTextConfig
from paddle_vl.families.vlm.modeling.layers import VLDecoderLayer, VLLanguageModel, VLSelfAttention
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.nn.placement import Placement


class LanguageModel(VLLanguageModel):
    """The decoder of Qwen3-VL."""

    def make_layer(self, config: Qwen3VLTextConfig, placement: Placement, number: int) -> nn.Layer:
        return VLDecoderLayer(config, placement, number, VLSelfAttention(config, placement))


class Qwen3VLForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen3VLConfig
    model_type = "qwen3_vl"
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel
