"""The published sizes of Qwen3-VL by name.

The Instruct and Thinking models of a size have the same configuration.
"""

from typing import Any

from paddle_vl.families.vlm.modeling.config import size_name

_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
# Tower, hidden size, MLP width, layers, query heads, key heads, tied head, expert width.
_ROWS = {
    "qwen3-vl-2b": (_SMALL_TOWER, 2048, 6144, 28, 16, 8, True, None),
    "qwen3-vl-4b": (_SMALL_TOWER, 2560, 9728, 36, 32, 8, True, None),
    "qwen3-vl-8b": (_LARGE_TOWER, 4096, 12288, 36, 32, 8, False, None),
    "qwen3-vl-32b": (_LARGE_TOWER, 5120, 25600, 64, 64, 8, False, None),
    "qwen3-vl-30b-a3b": (_LARGE_TOWER, 2048, 6144, 48, 32, 4, False, 768),
    "qwen3-vl-235b-a22b": (_LARGE_TOWER, 4096, 12288, 94, 64, 4, False, 1536),
}
SIZE_NAMES = tuple(_ROWS)


def size_values(name: str) -> dict[str, Any]:
    """What config.json of a published size has besides the defaults of the configuration classes.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub, see `size_name`.

    Raises:
        ValueError: there is no such size.
    """
    row = _ROWS[size_name(name, SIZE_NAMES, "Qwen3-VL", "Qwen3-VL-8B-Instruct")]
    tower, width, mlp_width, layers, heads, key_heads, is_tied, expert_width = row
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_width}
    return {
        "model_type": "qwen3_vl_moe" if expert_width else "qwen3_vl",
        "tie_word_embeddings": is_tied,
        "text_config": {
            **(experts if expert_width else {}),
            "tie_word_embeddings": is_tied,
            "max_position_embeddings": 262144,
            "rope_theta": 5000000.0,
            "hidden_size": width,
            "intermediate_size": mlp_width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
        },
        "vision_config": {**tower, "out_hidden_size": width},
    }
