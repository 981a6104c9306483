"""Qwen3-VL: the shared vision-language model with the Qwen3 decoder and its deepstack levels.

Source: Qwen3VLForConditionalGeneration of HF transformers, modeling_qwen3_vl.py.
"""

from paddle_vl.families.qwen3_vl import checkpoint_map
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.decoder import LanguageModel
from paddle_vl.families.vlm.model import VLForConditionalGeneration


class Qwen3VLForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen3VLConfig
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel
