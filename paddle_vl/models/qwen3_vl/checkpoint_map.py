"""Qwen3-VL parameters under HF's key names."""

from paddle_vl.models.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same
from paddle_vl.models.qwen3_vl.config import Qwen3VLConfig

HEAD_KEY = "lm_head.weight"


def checkpoint_rules(config: Qwen3VLConfig) -> tuple[Rule, ...]:
    """The rule table, special cases first."""
    vision = config.vision_config
    kernel = (
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )
    embed_tokens = "embed_tokens.weight"
    embed_key = f"model.language_model.{embed_tokens}"
    return (
        Rule(
            "visual.patch_embed.weight", "model.visual.patch_embed.proj.weight", PatchKernel(kernel)
        ),
        Rule("visual.patch_embed.bias", "model.visual.patch_embed.proj.bias", Same()),
        Rule("visual.pos_embed.weight", "model.visual.pos_embed.weight", Same()),
        Rule("visual.*", "model.visual.*", LinearWeights()),
        Rule(f"language_model.embedding.{embed_tokens}", embed_key, Same()),
        Rule("language_model.*", "model.language_model.*", LinearWeights()),
        # A tied head has a weight of its own only on a rank that has no embedding.
        Rule(HEAD_KEY, embed_key if config.tie_word_embeddings else HEAD_KEY, Same()),
    )
