"""Checkpoint rules of PaddleOCR-VL: parameters under the keys of the hub's files.

These are the keys of Paddle's tools too, which transformers 5 writes as well; under the names of
its modules (`save_original_format=False`) it has others, which are read.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same, low_rank_rules
from paddle_vl.checkpoint.safetensors_io import NUMPY_DTYPES, TensorToWrite
from paddle_vl.families.paddleocr_vl.config import PaddleOCRVLConfig
from paddle_vl.families.vlm.modeling.config import HEAD_KEY

T = TypeVar("T")
_TOWER = "visual.vision_model."
# No forward reads them; PaddleX and vLLM do not load a folder without them.
KEPT = (f"{_TOWER}embeddings.packing_position_embedding.", f"{_TOWER}head.")
# Rows of the table that no forward reads.
PACKED_POSITIONS = 32768
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
    return {key_here(key): tensor for key, tensor in stored.items()}


def key_here(key: str) -> str:
    """The hub's key of one of transformers' modules, or of the hub."""
    return _renamed(key, _MODULES)


def adapter_key(key: str) -> str:
    """The key of transformers' modules, whose names PEFT needs, of one of the hub."""
    return _renamed(key, {hubs: module for module, hubs in _MODULES.items()})


def _renamed(key: str, names: dict[str, str]) -> str:
    for before, after in names.items():
        if key.startswith(before):
            return after + key.removeprefix(before)
    return key


def folder_of(
    config: PaddleOCRVLConfig, tensors: Iterable[TensorToWrite], layout: str = "hub"
) -> tuple[PaddleOCRVLConfig, list[TensorToWrite]]:
    """Configuration and tensors of a model folder, of those of a stage.

    Args:
        layout: `hub` has a head where it is tied too, and what no forward reads: that of the source
            folder, or of the table zeros, and of the pooling head nothing, as config.json then
            says. `transformers` has the names of its modules and what they read.
    """
    found = {tensor.name: tensor for tensor in tensors}
    embedding = found.get(config.embedding_key)
    has_pooling = layout == "hub" and any(name.startswith(KEPT[1]) for name in found)
    vision = replace(config.vision_config, vision_use_head=has_pooling)
    config = replace(config, vision_config=vision)
    if layout == "transformers":
        read = [tensor for name, tensor in found.items() if not name.startswith(KEPT)]
        return config, [tensor._replace(name=adapter_key(tensor.name)) for tensor in read]
    if embedding is not None:
        if config.tie_word_embeddings:
            found.setdefault(HEAD_KEY, embedding._replace(name=HEAD_KEY))
        table, shape = f"{KEPT[0]}weight", (PACKED_POSITIONS, vision.hidden_size)
        dtype = embedding.dtype
        zeros = partial(np.zeros, shape, NUMPY_DTYPES[dtype])
        found.setdefault(table, TensorToWrite(table, shape, dtype, zeros))
    return config, list(found.values())
