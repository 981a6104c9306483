"""The published sizes of Qwen3.5, 3.6 and 3.8 by name."""

from typing import Any

from paddle_vl.families.vlm.modeling.config import size_name

_TOWER = ("hidden_size", "depth", "intermediate_size", "num_heads")
_SMALL, _MIDDLE, _LARGE = (768, 12, 3072, 12), (1024, 24, 4096, 16), (1152, 27, 4304, 16)
# Tower, hidden size, layers, query heads, key heads, value heads of a delta rule, tied head, and
# the width of the MLP; or the number of experts, those of a token, and their width.
_ROWS: dict[str, tuple[tuple[int, ...], int, int, int, int, int, bool, tuple[int, ...]]] = {
    "qwen3.5-0.8b": (_SMALL, 1024, 24, 8, 2, 16, True, (3584,)),
    "qwen3.5-2b": (_MIDDLE, 2048, 24, 8, 2, 16, True, (6144,)),
    "qwen3.5-4b": (_MIDDLE, 2560, 32, 16, 4, 32, True, (9216,)),
    "qwen3.5-9b": (_LARGE, 4096, 32, 16, 4, 32, False, (12288,)),
    "qwen3.5-27b": (_LARGE, 5120, 64, 24, 4, 48, False, (17408,)),
    "qwen3.5-35b-a3b": (_LARGE, 2048, 40, 16, 2, 32, False, (256, 8, 512)),
    "qwen3.5-122b-a10b": (_LARGE, 3072, 48, 32, 2, 64, False, (256, 8, 1024)),
    "qwen3.5-397b-a17b": (_LARGE, 4096, 60, 32, 2, 64, False, (512, 10, 1024)),
    # On the hub it is a decoder alone; the tower is that of the other large ones.
    "qwen3.8-2.4t-a95b": (_LARGE, 8192, 92, 64, 4, 128, False, (512, 10, 2048)),
}
# Later generations of the same sizes; other weights and chat templates.
_SAME = {
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwen3.8-27b": "qwen3.5-27b",
}
SIZE_NAMES = (*_ROWS, *_SAME)
_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def size_values(name: str) -> dict[str, Any]:
    """What config.json of a published size has besides the defaults of the configuration classes.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub, see `size_name`.

    Raises:
        ValueError: there is no such size.
    """
    plain = size_name(name, SIZE_NAMES, "Qwen3.5", "Qwen3.5-4B")
    tower, width, layers, heads, key_heads, value_heads, is_tied, mlp = _ROWS[
        _SAME.get(plain, plain)
    ]
    is_dense = len(mlp) == 1
    inner: dict[str, Any] = {"intermediate_size": mlp[0]}
    if not is_dense:
        # The expert of all tokens is as wide as the others.
        inner = dict(zip(_EXPERTS, (*mlp, mlp[-1]), strict=True))
    vision = dict(zip(_TOWER, tower, strict=True))
    return {
        "model_type": "qwen3_5" if is_dense else "qwen3_5_moe",
        "tie_word_embeddings": is_tied,
        "text_config": {
            **inner,
            "tie_word_embeddings": is_tied,
            "rope_theta": 10000000.0,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "linear_num_value_heads": value_heads,
        },
        "vision_config": vision | {"out_hidden_size": width},
    }
