"""STAND-IN. `src/paddlefleet/transformers/qwen3_vl/modeling_fleet.py` at commit 00662fa0."""

from paddlefleet.qwen3_vl_text_layer import Qwen3VLTextTransformerLayer

__all__ = ["Qwen3VLTextTransformerLayer"]
