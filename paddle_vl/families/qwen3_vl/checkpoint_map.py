"""Checkpoint rules of Qwen3-VL: parameters under HF's keys."""

from typing import TYPE_CHECKING

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig, Qwen3VLMoeTextConfig
from paddle_vl.families.vlm.config import EMBEDDING_KEY, HEAD_KEY

if TYPE_CHECKING:
    from paddle_vl.checkpoint.safetensors_io import StoredTensor


def checkpoint_rules(config: Qwen3VLConfig) -> tuple[Rule, ...]:
    """Rules from parameter names to HF keys and layouts, special cases first."""
    vision = config.vision_config
    kernel = (
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )
    return (
        *(
            Rule(f"{ours}*.lora.{factor}", f"{theirs}*.lora_{factor}.weight", LinearWeights())
            for ours, theirs in (
                ("visual", "model.visual"),
                ("language_model", "model.language_model"),
                ("lm_head", "lm_head"),
            )
            for factor in "AB"
        ),
        Rule(
            "visual.patch_embed.weight", "model.visual.patch_embed.proj.weight", PatchKernel(kernel)
        ),
        Rule("visual.patch_embed.bias", "model.visual.patch_embed.proj.bias", Same()),
        Rule("visual.pos_embed.weight", "model.visual.pos_embed.weight", Same()),
        Rule("visual.*", "model.visual.*", LinearWeights()),
        Rule("language_model.embedding.embed_tokens.weight", EMBEDDING_KEY, Same()),
        # Stacked experts; names of linears end with ".weight".
        Rule("language_model.*.gate_up_proj", "model.language_model.*.gate_up_proj", Same()),
        Rule("language_model.*.down_proj", "model.language_model.*.down_proj", Same()),
        Rule("language_model.*", "model.language_model.*", LinearWeights()),
        # A tied head has its own weight only on a pipeline stage without the embedding.
        Rule(HEAD_KEY, EMBEDDING_KEY if config.tie_word_embeddings else HEAD_KEY, Same()),
    )


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
