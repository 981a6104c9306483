"""A tiny Qwen4-Exp, for the batches of `paddle_vl.testing.qwen3_vl`."""

from typing import Any

from paddle_vl.families.qwen4_exp.config import Qwen4ExpConfig
from paddle_vl.families.qwen4_exp.model import Qwen4ExpForConditionalGeneration
from paddle_vl.nn.placement import Placement
from paddle_vl.testing.qwen3_vl import tiny_values, unlike_neutral


def tiny_qwen4_exp_config(**text: Any) -> Qwen4ExpConfig:
    """Three decoder layers of width 16 with two streams, the middle one with attention, the others
    with embeddings of n-grams; a vocabulary of 64.

    Heads as of `tiny_qwen3_5_config`. A query with more than 5 tokens chooses blocks of 2.

    Args:
        text: settings of the text model to change; `tie_word_embeddings` belongs here too.
    """
    defaults = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "rms_norm_eps": 1e-2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "output_gate_type": "sigmoid", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
        "hc_count": 2, "hc_lowrank": 4,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 4, "indexer_compress_ratio": 2,
        "ple_layer_ids": [1, 3], "heads_per_ngram": 2, "ple_conv_kernel_size": 3,
        "ngram_vocab_size_base": 20, "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4, "eos_token_id": 5,
        "rope_parameters": {
            "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    }  # fmt: skip
    values = tiny_values("qwen4_exp", defaults | text, [])
    return Qwen4ExpConfig.from_dict(values | {"model_type": "qwen4_exp"})


def tiny_qwen4_exp(
    placement: Placement | None = None, seed: int = 0, **text: Any
) -> Qwen4ExpForConditionalGeneration:
    """A tiny model in which no parameter has a neutral value, such as a norm's 0.

    Equal seeds give equal full parameters under every placement.

    Args:
        text: see `tiny_qwen4_exp_config`.
    """
    config = tiny_qwen4_exp_config(**text)
    return unlike_neutral(Qwen4ExpForConditionalGeneration, config, placement, seed)
