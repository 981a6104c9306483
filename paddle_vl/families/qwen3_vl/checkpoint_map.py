"""Checkpoint rules of Qwen3-VL: parameters under HF's keys."""

from typing import TYPE_CHECKING

from paddle_vl.checkpoint.rules import Rule, Same
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig, Qwen3VLMoeTextConfig
from paddle_vl.families.vlm.folders.checkpoint_map import model_rules

if TYPE_CHECKING:
    from paddle_vl.checkpoint.safetensors_io import StoredTensor


def checkpoint_rules(config: Qwen3VLConfig) -> tuple[Rule, ...]:
    """Rules from parameter names to HF keys and layouts, special cases first."""
    # Stacked experts; names of linears end with ".weight".
    experts = (
        Rule("language_model.*.gate_up_proj", "model.language_model.*.gate_up_proj", Same()),
        Rule("language_model.*.down_proj", "model.language_model.*.down_proj", Same()),
    )
    return model_rules(config, experts)


def tensors_as_here(
    stored: "dict[str, StoredTensor]", config: Qwen3VLConfig
) -> "dict[str, StoredTensor]":
    """A checkpoint's tensors, with experts as `[E, in, out]`.

    The hub's files and transformers 4.57 store `[E, in, out]`; transformers 5.x stores the
    transpose under the same keys. The shapes decide: at most one of a layer's two tensors is
    square. Tensors of another shape are left unchanged.
    """
    text = config.text_config
    if not isinstance(text, Qwen3VLMoeTextConfig):
        return stored
    width, inner = text.hidden_size, text.moe_intermediate_size
    stored = dict(stored)
    for layer in filter(text.has_experts, range(text.num_hidden_layers)):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        shapes = {f"{prefix}gate_up_proj": (width, 2 * inner), f"{prefix}down_proj": (inner, width)}
        found = {key: stored[key].shape[-2:] for key in shapes if key in stored}
        is_swapped = any(shape == shapes[key][::-1] != shapes[key] for key, shape in found.items())
        is_straight = any(shape == shapes[key] != shapes[key][::-1] for key, shape in found.items())
        if is_swapped and not is_straight:
            stored |= {key: stored[key].swapped() for key in found}
    return stored
