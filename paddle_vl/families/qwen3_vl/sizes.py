"""The published sizes of Qwen3-VL by name, with the values of their config.json files.

The Instruct and Thinking models of a size have the same configuration.
"""

from copy import deepcopy
from typing import Any

_TEXT = {
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 5000000,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "initializer_range": 0.02,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SMALL_TOWER = _LARGE_TOWER | {
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
    """The content of config.json of a published size.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub: `Qwen3-VL-8B-Instruct` and
            `Qwen/Qwen3-VL-8B-Thinking` are `qwen3-vl-8b`. The case of letters is ignored.

    Raises:
        ValueError: there is no such size.
    """
    plain = name.lower().removeprefix("qwen/").removesuffix("-instruct").removesuffix("-thinking")
    if plain not in _ROWS:
        raise ValueError(
            f"{name!r} is not a size of Qwen3-VL; use one of {', '.join(SIZE_NAMES)}, or a name of "
            "the hub like Qwen3-VL-8B-Instruct"
        )
    tower, width, mlp_width, layers, heads, key_heads, is_tied, expert_width = _ROWS[plain]
    model_type = "qwen3_vl" if expert_width is None else "qwen3_vl_moe"
    experts = {} if expert_width is None else _EXPERTS | {"moe_intermediate_size": expert_width}
    # Copies, so that callers cannot change the tables.
    return deepcopy(
        {
            "model_type": model_type,
            "tie_word_embeddings": is_tied,
            "image_token_id": 151655,
            "video_token_id": 151656,
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "text_config": {
                **_TEXT,
                **experts,
                "model_type": f"{model_type}_text",
                "tie_word_embeddings": is_tied,
                "hidden_size": width,
                "intermediate_size": mlp_width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": key_heads,
            },
            "vision_config": {**tower, "model_type": model_type, "out_hidden_size": width},
        }
    )
