"""Folders of Gemma 3, whose weights a policy's backbone may start from: their configuration, and
their tensors under pi07's keys.

Source: `load_pretrained_gemma3` and `bilinear_resample_pos_embed` of OpenTau.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.reading import ChangedTensor, ReadableTensor
from paddle_vl.checkpoint.safetensors_io import encoded, widened
from paddle_vl.config.families import model_values
from paddle_vl.families.pi07.config import (
    PLANNER_TYPE,
    Gemma3Config,
    PI07Config,
    PI07PlannerConfig,
    SiglipVisionConfig,
)
from paddle_vl.files.stored_settings import check_mapping
from paddle_vl.files.text_file import read_json_object, shown

logger = logging.getLogger(__name__)
_ENGINE = "gemma3_with_expert"
_BACKBONE = f"{_ENGINE}.gemma3.model"
_POSITIONS = f"{_BACKBONE}.vision_tower.vision_model.embeddings.position_embedding.weight"
# Starts of keys without `model.`: those of the hub are `language_model.model.` and
# `vision_tower.vision_model.`, newer writers leave out the second part.
_LAYER = rf"{_ENGINE}.interleaved_layers.\2.backbone_layer."
_STARTS = {
    r"(language_model\.)?lm_head\.": f"{_ENGINE}.gemma3.lm_head.",
    r"language_model\.(model\.)?layers\.(\d+)\.": _LAYER,
    r"language_model\.(model\.)?": f"{_BACKBONE}.language_model.",
    r"vision_tower\.(vision_model\.)?": f"{_BACKBONE}.vision_tower.vision_model.",
    r"multi_modal_projector\.": f"{_BACKBONE}.multi_modal_projector.",
}
# Keys of a policy that Gemma 3 lacks.
_DRAWN_KEYS = (
    *("*.expert_layer.*", "*.gemma_expert.*", "*.discrete_action_embedding.*", "*.da_head.*"),
    *("state_proj.*", "action_in_proj.*", "action_out_proj.*", "time_mlp_*"),
)
# OpenTau might build in a dtype that the backbone's section names.
_NO_DTYPES = {"dtype": None, "torch_dtype": None}
# Sections, which are compared field by field, and what may differ from the folder's.
_FREE = ("text_config", "vision_config", "image_size")
# The expert has as many of them as the backbone.
_SHARED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def engine_key(key: str) -> str:
    """pi07's key, without `model.`, of a tensor of Gemma 3; another key as it is."""
    inner = key.removeprefix("model.")
    for start, ours in _STARTS.items():
        renamed, count = re.subn(f"^{start}", ours, inner)
        if count:
            return renamed
    return key


def backbone_config(folder: Path) -> Gemma3Config:
    """The configuration of a folder of Gemma 3."""
    file = folder / "config.json"
    try:
        return Gemma3Config(**read_json_object(file, "a model's configuration"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def with_backbone(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A policy's configuration with what it leaves out of the backbone taken from Gemma's folder.

    What has no effect on weights, as `rope_scaling`, is the folder's. The size of images is the
    policy's: `vision_config.image_size` or `resize_imgs_with_padding`, by default pi07's.

    Args:
        values: as in config.json.
    """
    own, values = backbone_config(folder), dict(values)
    text, vision = own.text_config.to_dict(), own.vision_config.to_dict()
    size = (values.get("resize_imgs_with_padding") or [SiglipVisionConfig().image_size])[0]
    vlm = check_mapping(values.get("vlm_config"), "vlm_config")
    given = check_mapping(vlm.get("gemma3_config"), "gemma3_config")
    for name, section in (("text_config", text), ("vision_config", vision | {"image_size": size})):
        inert = getattr(own, name).other
        given[name] = section | check_mapping(given.get(name), name) | inert | _NO_DTYPES
    vlm |= {"gemma3_config": own.to_dict() | given | _NO_DTYPES, "load_pretrained_gemma3": False}
    if values.get("type") != PLANNER_TYPE:
        expert = check_mapping(vlm.get("gemma_expert_config"), "gemma_expert_config")
        vlm["gemma_expert_config"] = {name: text[name] for name in _SHARED} | expert
    return values | {"vlm_config": vlm}


def base_config(config_class: Any, described: Any, folder: Path | None) -> Any:
    """Configuration of the policy in a folder; or of one that is described, `model.config`, with
    the backbone of Gemma 3's folder."""
    if folder is not None and not Gemma3Config.is_folder(folder):
        return config_class.from_pretrained(folder)
    values = model_values(described)
    return config_class.from_dict(values if folder is None else with_backbone(values, folder))


def _check_sizes(found: Gemma3Config, folder: Path) -> None:
    """Refuse a backbone that differs from that of the folder, but for the size of images."""
    own, differing = backbone_config(folder), []
    for name in ("", "text_config", "vision_config"):
        theirs, ours = ((getattr(each, name) if name else each) for each in (own, found))
        for each in fields(theirs):
            values = getattr(ours, each.name), getattr(theirs, each.name)
            is_free = not each.compare or each.name in _FREE
            if not is_free and values[0] != values[1]:
                place = f"{name}.{each.name}".lstrip(".")
                differing.append(f"{place} is {shown(values[0])}, not {values[1]}")
    if differing:
        raise ValueError(
            f"the policy's gemma3_config is not that of {folder}, whose weights it starts from: "
            f"{'; '.join(differing)}: leave these settings out, so that they are taken from there"
        )


def resampled_positions(stored: ReadableTensor, side: int) -> ReadableTensor:
    """A table of positions `[N, U]` of square images, read for images of `side` patches a side.

    Bilinear between the centres of patches, in float32, then in the dtype of the file.
    """

    def resampled(table_NU: np.ndarray) -> np.ndarray:
        old = isqrt(len(table_NU))
        place = np.maximum((np.arange(side, dtype=np.float32) + 0.5) * (old / side) - 0.5, 0)
        low = place.astype(np.int64)
        high, share = np.minimum(low + 1, old - 1), (place - low).astype(np.float32)
        grid = table_NU.astype(np.float32).reshape(old, old, -1)
        for axis, weight in ((1, share[:, None]), (0, share[:, None, None])):
            grid = grid.take(low, axis) * (1 - weight) + grid.take(high, axis) * weight
        return widened(encoded(grid.reshape(shape), stored.dtype), stored.dtype)

    shape = (side**2, stored.shape[1])
    return ChangedTensor(stored, shape, resampled)


def fit_backbone(
    tensors: dict[str, ReadableTensor], config: PI07Config | PI07PlannerConfig, folder: Path
) -> Sequence[str]:
    """Make a folder's tensors fit a policy, which must have the folder's sizes.

    Args:
        tensors: by pi07's keys; the table of the tower's positions is replaced if it is for images
            of another size.

    Returns:
        Patterns of the policy's keys that Gemma 3 lacks.
    """
    _check_sizes(config.vlm_config.gemma3_config, folder)
    vision, table = config.vlm_config.gemma3_config.vision_config, tensors.get(_POSITIONS)
    side = 0 if table is None else isqrt(table.shape[0])
    if table is not None and side**2 == table.shape[0] != vision.num_patches:
        tensors[_POSITIONS] = resampled_positions(table, vision.grid_side)
        logger.info(
            "%s is for images of %d pixels and the policy's have %d: the tower's %d positions are "
            "resampled to %d (OpenTau refuses this)",
            folder,
            side * vision.patch_size,
            vision.image_size,
            table.shape[0],
            vision.num_patches,
        )
    return _DRAWN_KEYS
