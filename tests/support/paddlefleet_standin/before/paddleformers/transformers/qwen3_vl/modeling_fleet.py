"""STAND-IN. `paddleformers/transformers/qwen3_vl/modeling_fleet.py` of PaddleFormers 1.2.0."""

from paddlefleet.qwen3_vl_text_layer import Qwen3VLTextTransformerLayer

__all__ = ["Qwen3VLTextTransformerLayer"]
