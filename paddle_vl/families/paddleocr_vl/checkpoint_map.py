"""Checkpoint rules of PaddleOCR-VL: parameters under the keys of the hub's files.

These are the keys of Paddle's tools too, which transformers 5 writes as well; under the names of
its modules (`save_original_format=False`) it has others, which are read.
"""

from typing import TypeVar

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same, low_rank_rules
from paddle_vl.families.paddleocr_vl.config import PaddleOCRVLConfig
from paddle_vl.families.vlm.modeling.config import HEAD_KEY

T = TypeVar("T")
_TOWER = "visual.vision_model."
# No forward reads them; PaddleX and vLLM do not load a folder without them.
KEPT = (f"{_TOWER}embeddings.packing_position_embedding.", f"{_TOWER}head.")
# Files have a head also where its values are the embedding's.
WRITES_TIED_HEAD = True
# Names of transformers' modules, and the same in the hub's keys.
_MODULES = {
    "model.visual.": "visual.",
    "model.projector.": "mlp_AR.",
    "model.language_model.": "model.",
}


def checkpoint_rules(config: PaddleOCRVLConfig) -> tuple[Rule, ...]:
    """Rules from parameter names to keys and layouts, special cases first."""
    vision, embedding = config.vision_config, config.embedding_key
    patches = f"{_TOWER}embeddings.patch_embedding"
    kernel = PatchKernel((vision.in_channels, vision.patch_size, vision.patch_size))
    linears = [
        Rule("visual.blocks.*", f"{_TOWER}encoder.layers.*", LinearWeights()),
        Rule("visual.projector.*", "mlp_AR.*", LinearWeights()),
        Rule("language_model.*", "model.*", LinearWeights()),
        Rule("lm_head.*", "lm_head.*", LinearWeights()),
    ]
    table = f"{_TOWER}embeddings.position_embedding.weight"
    return (
        *low_rank_rules(linears),
        Rule("visual.patch_embed.weight", f"{patches}.weight", kernel),
        Rule("visual.patch_embed.bias", f"{patches}.bias", Same()),
        Rule("visual.pos_embed.weight", table, Same()),
        Rule("visual.post_layernorm.*", f"{_TOWER}post_layernorm.*", Same()),
        Rule("language_model.embedding.embed_tokens.weight", embedding, Same()),
        *linears[:-1],
        # A tied head has its own weight only on a pipeline stage without the embedding.
        Rule(HEAD_KEY, embedding if config.tie_word_embeddings else HEAD_KEY, Same()),
    )


def tensors_as_here(stored: dict[str, T], config: PaddleOCRVLConfig) -> dict[str, T]:
    """A checkpoint's tensors under the hub's keys."""
    return {_hub_key(key): tensor for key, tensor in stored.items()}


def _hub_key(key: str) -> str:
    for module, name in _MODULES.items():
        if key.startswith(module):
            return name + key.removeprefix(module)
    return key
