"""The published sizes of Qwen3-VL by name, as their config.json files have them.

Instruct and Thinking models of a size share one configuration.
"""

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


def _size(
    text: dict[str, Any],
    tower: dict[str, Any],
    *,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int = 8,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    model_type = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    return {
        "model_type": model_type,
        "tie_word_embeddings": tie_word_embeddings,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            **text,
            "model_type": f"{model_type}_text",
            "tie_word_embeddings": tie_word_embeddings,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
        },
        "vision_config": {**tower, "model_type": model_type, "out_hidden_size": hidden_size},
    }


_SIZES = {
    "qwen3-vl-2b": _size(
        _TEXT,
        _SMALL_TOWER,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-vl-4b": _size(
        _TEXT,
        _SMALL_TOWER,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-vl-8b": _size(
        _TEXT,
        _LARGE_TOWER,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
    ),
    "qwen3-vl-32b": _size(
        _TEXT,
        _LARGE_TOWER,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
    "qwen3-vl-30b-a3b": _size(
        _TEXT | _EXPERTS | {"moe_intermediate_size": 768},
        _LARGE_TOWER,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "qwen3-vl-235b-a22b": _size(
        _TEXT | _EXPERTS | {"moe_intermediate_size": 1536},
        _LARGE_TOWER,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
    ),
}
SIZE_NAMES = tuple(_SIZES)


def size_values(name: str) -> dict[str, Any]:
    """Content of the config.json of a published size.

    Args:
        name: one of `SIZE_NAMES`, or the hub's name of such a model: `Qwen3-VL-8B-Instruct` and
            `Qwen/Qwen3-VL-8B-Thinking` are `qwen3-vl-8b`. Upper and lower case are the same.

    Raises:
        ValueError: there is no such size.
    """
    plain = name.lower().removeprefix("qwen/").removesuffix("-instruct").removesuffix("-thinking")
    if plain not in _SIZES:
        raise ValueError(
            f"{name!r} is not a size of Qwen3-VL; there are {', '.join(SIZE_NAMES)}, and the hub's "
            "names, like Qwen3-VL-8B-Instruct"
        )
    values = _SIZES[plain]
    # Nobody can change the table through what it gave.
    return {key: dict(part) if isinstance(part, dict) else part for key, part in values.items()}
