"""The published sizes of PaddleOCR-VL by name: one, whatever the version."""

from typing import Any

from paddle_vl.families.vlm.modeling.config import size_name

SIZE_NAMES = tuple(
    f"paddleocr-vl{version}{size}"
    for version in ("", "-1.0", "-1.5", "-1.6")
    for size in ("", "-0.9b")
)


def size_values(name: str) -> dict[str, Any]:
    """What config.json of a published size has that differs between models.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub, see `size_name`.

    Raises:
        ValueError: there is no such size.
    """
    size_name(name, SIZE_NAMES, "PaddleOCR-VL", "PaddleOCR-VL-1.5", "paddlepaddle")
    return {
        "model_type": "paddleocr_vl",
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": {
            "mrope_section": [16, 24, 24],
            "rope_type": "default",
            "type": "default",
        },
        "image_token_id": 100295,
        "video_token_id": 101307,
        "vision_start_token_id": 101305,
        "vision_end_token_id": 101306,
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
    }
