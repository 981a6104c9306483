"""The published size of Qwen4-Exp by name."""

from typing import Any

from paddle_vl.families.vlm.modeling.config import size_name

SIZE_NAMES = ("qwen3.8-flash-next",)


def size_values(name: str) -> dict[str, Any]:
    """What config.json of a published size has besides the defaults of the configuration classes.

    Args:
        name: one of `SIZE_NAMES`, or a model's name on the hub, see `size_name`.

    Raises:
        ValueError: there is no such size.
    """
    size_name(name, SIZE_NAMES, "Qwen4-Exp", "Qwen3.8-Flash-Next")
    return {
        "tie_word_embeddings": False,
        "text_config": {
            "tie_word_embeddings": False,
            "hidden_size": 2560,
            "num_hidden_layers": 48,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
            "output_gate_type": "sigmoid",
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "max_position_embeddings": 262144,
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2],
            "split_ngram_parts": 128,
            "bos_token_id": 248044,
            "eos_token_id": 248044,
        },
        "vision_config": {"out_hidden_size": 2560},
    }
