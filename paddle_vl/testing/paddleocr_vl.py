"""A tiny PaddleOCR-VL, for the batches of `paddle_vl.testing.qwen3_vl` without videos."""

from typing import Any

from paddle_vl.families.paddleocr_vl.config import PaddleOCRVLConfig
from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from paddle_vl.nn.placement import Placement
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, VISION_END, VISION_START, unlike_neutral


def tiny_paddleocr_vl_config(**changes: Any) -> PaddleOCRVLConfig:
    """Three decoder layers of width 16 with heads of width 8, a vocabulary of 64.

    8 query heads share 2 key heads, so that mp_degree 1, 2, 4 and 8 run.

    Args:
        changes: settings at the top of the hub's config.json.
    """
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 18, "patch_size": 4, "spatial_merge_size": 2,
    }  # fmt: skip
    values = {
        "model_type": "paddleocr_vl", "vocab_size": 64, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]},
        "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
        "vision_config": vision,
    }  # fmt: skip
    return PaddleOCRVLConfig.from_dict(values | changes)


def tiny_paddleocr_vl(
    placement: Placement | None = None, seed: int = 0, **changes: Any
) -> PaddleOCRVLForConditionalGeneration:
    """A tiny model in which no parameter has a neutral value, such as a norm's 1 or a bias's 0.

    Equal seeds give equal full parameters under every placement.

    Args:
        changes: see `tiny_paddleocr_vl_config`.
    """
    config = tiny_paddleocr_vl_config(**changes)
    return unlike_neutral(PaddleOCRVLForConditionalGeneration, config, placement, seed)
