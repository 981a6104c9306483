"""A tiny Qwen3.5, for the batches of `paddle_vl.testing.qwen3_vl`."""

from typing import Any

from paddle_vl.families.qwen3_5.config import Qwen3_5Config
from paddle_vl.families.qwen3_5.model import Qwen3_5ForConditionalGeneration
from paddle_vl.nn.placement import Placement
from paddle_vl.testing.qwen3_vl import tiny_values, unlike_neutral

# Text settings of a tiny model with experts.
EXPERTS_3_5 = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def tiny_qwen3_5_config(**text: Any) -> Qwen3_5Config:
    """Three decoder layers of width 16, the middle one with attention, a vocabulary of 64.

    4 key heads of the delta rule and 2 of attention, so that mp_degree 1, 2 and 4 run. The norms'
    epsilon is large: a first token gives `(k . q) v`, and where k . q is near zero a norm would
    amplify the rounding of a sum in another order a thousandfold.

    Args:
        text: settings of the text model to change; with those of `EXPERTS_3_5` it has experts, and
            `tie_word_embeddings` belongs here too.
    """
    defaults = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "rms_norm_eps": 1e-2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "rope_parameters": {
            "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    }  # fmt: skip
    if "num_experts" not in text:
        defaults["intermediate_size"] = 24
    return Qwen3_5Config.from_dict(tiny_values("qwen3_5", defaults | text, []))


def tiny_qwen3_5(
    placement: Placement | None = None, seed: int = 0, **text: Any
) -> Qwen3_5ForConditionalGeneration:
    """A tiny model in which no parameter has a neutral value, such as a norm's 0 or a bias's 0.

    Equal seeds give equal full parameters under every placement.

    Args:
        text: see `tiny_qwen3_5_config`.
    """
    config = tiny_qwen3_5_config(**text)
    return unlike_neutral(Qwen3_5ForConditionalGeneration, config, placement, seed)
