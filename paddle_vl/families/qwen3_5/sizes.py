"""The published sizes of Qwen3.5, 3.6 and 3.8 by name, with the values of their config.json."""

from copy import deepcopy
from typing import Any

_TEXT = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_TOWER = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "initializer_range": 0.02,
    "deepstack_visual_indexes": [],
}


def _tower(width: int, depth: int, inner: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "depth": depth, "intermediate_size": inner, "num_heads": heads}
    return _TOWER | sizes


def _experts(count: int, chosen: int, inner: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }


_SMALL, _MIDDLE = _tower(768, 12, 3072, 12), _tower(1024, 24, 4096, 16)
_LARGE = _tower(1152, 27, 4304, 16)
# Tower, hidden size, layers, query heads, key heads, value heads of a delta rule, tied head, and
# the width of the MLP or the experts.
_ROWS: dict[str, tuple[dict, int, int, int, int, int, bool, int | dict]] = {
    "qwen3.5-0.8b": (_SMALL, 1024, 24, 8, 2, 16, True, 3584),
    "qwen3.5-2b": (_MIDDLE, 2048, 24, 8, 2, 16, True, 6144),
    "qwen3.5-4b": (_MIDDLE, 2560, 32, 16, 4, 32, True, 9216),
    "qwen3.5-9b": (_LARGE, 4096, 32, 16, 4, 32, False, 12288),
    "qwen3.5-27b": (_LARGE, 5120, 64, 24, 4, 48, False, 17408),
    "qwen3.5-35b-a3b": (_LARGE, 2048, 40, 16, 2, 32, False, _experts(256, 8, 512)),
    "qwen3.5-122b-a10b": (_LARGE, 3072, 48, 32, 2, 64, False, _experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": (_LARGE, 4096, 60, 32, 2, 64, False, _experts(512, 10, 1024)),
}
# Later generations of the same sizes; other weights and chat templates.
_SAME = {
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
}
SIZE_NAMES = (*_ROWS, *_SAME)


def size_values(name: str) -> dict[str, Any]:
    """The content of config.json of a published size.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub: `Qwen/Qwen3.5-4B` and
            `Qwen3.5-4B-Base` are `qwen3.5-4b`. The case of letters is ignored.

    Raises:
        ValueError: there is no such size.
    """
    plain = name.lower().removeprefix("qwen/").removesuffix("-base").removesuffix("-instruct")
    plain = _SAME.get(plain, plain)
    if plain not in _ROWS:
        raise ValueError(
            f"{name!r} is not a size of Qwen3.5; use one of {', '.join(SIZE_NAMES)}, or a name of "
            "the hub like Qwen3.5-4B"
        )
    tower, width, layers, heads, key_heads, value_heads, is_tied, mlp = _ROWS[plain]
    model_type = "qwen3_5" if isinstance(mlp, int) else "qwen3_5_moe"
    # Copies, so that callers cannot change the tables.
    return deepcopy(
        {
            "model_type": model_type,
            "tie_word_embeddings": is_tied,
            "image_token_id": 248056,
            "video_token_id": 248057,
            "vision_start_token_id": 248053,
            "vision_end_token_id": 248054,
            "text_config": {
                **_TEXT,
                **({"intermediate_size": mlp} if isinstance(mlp, int) else mlp),
                "model_type": f"{model_type}_text",
                "tie_word_embeddings": is_tied,
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": key_heads,
                "linear_num_value_heads": value_heads,
            },
            "vision_config": {**tower, "model_type": model_type, "out_hidden_size": width},
        }
    )
