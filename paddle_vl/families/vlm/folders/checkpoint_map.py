"""Checkpoint rules that vision-language models share: parameters under HF's keys."""

from collections.abc import Iterable

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same, low_rank_rules
from paddle_vl.families.vlm.modeling.config import EMBEDDING_KEY, HEAD_KEY, VLConfig


def model_rules(config: VLConfig, decoder: Iterable[Rule] = ()) -> tuple[Rule, ...]:
    """Rules from parameter names to HF keys and layouts, special cases first.

    Args:
        decoder: a family's own rules for its decoder's layers, before those for all linears.
    """
    vision = config.vision_config
    kernel = (
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )
    towers = Rule("visual.*", "model.visual.*", LinearWeights())
    layers = Rule("language_model.*", "model.language_model.*", LinearWeights())
    head = Rule("lm_head.*", "lm_head.*", LinearWeights())
    return (
        *low_rank_rules([towers, layers, head]),
        Rule(
            "visual.patch_embed.weight", "model.visual.patch_embed.proj.weight", PatchKernel(kernel)
        ),
        Rule("visual.patch_embed.bias", "model.visual.patch_embed.proj.bias", Same()),
        Rule("visual.pos_embed.weight", "model.visual.pos_embed.weight", Same()),
        towers,
        Rule("language_model.embedding.embed_tokens.weight", EMBEDDING_KEY, Same()),
        *decoder,
        layers,
        # A tied head has its own weight only on a pipeline stage without the embedding.
        Rule(HEAD_KEY, EMBEDDING_KEY if config.tie_word_embeddings else HEAD_KEY, Same()),
    )
