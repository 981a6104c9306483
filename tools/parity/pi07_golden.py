"""Models of pi07's golden cases, and their intermediate values under golden names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import paddle

from paddle_vl.checkpoint.reading import check_keys, fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS, engine_keys
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.decoder import block_mask, prefix_positions, suffix_positions
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix import Prefix
from paddle_vl.families.pi07.vision import VideoEncoder
from paddle_vl.nn.attention_masks import KeyMask
from parity.comparison import CaseReport
from parity.golden import PI07Case
from parity.recording import Recording, array

_SECTIONS = {"vlm": "vlm_config", "gemma3": "gemma3_config", "expert": "gemma_expert_config"}
RTOL, ATOL = 1e-4, 1e-5
BFLOAT16, BFLOAT16_GRADIENT = 2e-2, 6e-2
_ALL_ROUNDING = 1e-6


class Comparison(CaseReport):
    """The report of a case, which chooses a tolerance for each value."""

    is_bfloat16 = False

    def check(self, group: str, values: Mapping[str, Any], start: str = "") -> None:
        """Compare the named values that the case has.

        Args:
            start: of the names in the case.
        """
        for name, found in values.items():
            if start + name in self.golden:
                self.value(group, start + name, array(found), self.golden[start + name])

    def value(self, group: str, name: str, found: Any, wanted: np.ndarray) -> None:
        """Compare one value."""
        found = np.asarray(found)
        if wanted.dtype.kind in "bi":
            self.exact(group, name, found, wanted)
        elif group == "grads" and np.abs(wanted).max() < _ALL_ROUNDING:
            self.absolute(group, name, found, _ALL_ROUNDING, wanted)
        elif self.is_bfloat16 and group == "grads":
            # Relative to the tensor's norm; for a key bias, whose gradient is all rounding, to that
            # of the query bias.
            like = self.golden.get(name.replace("k_proj.bias", "q_proj.bias"), wanted)
            away = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(like)
            self.absolute(group, name, away, BFLOAT16_GRADIENT, 0.0)
        elif self.is_bfloat16:
            self.relative(group, name, found, BFLOAT16, wanted)
        elif group == "grads":
            self.relative(group, name, found, RTOL, wanted)
        else:
            self.near(group, name, found, RTOL, ATOL, wanted)


def model_of(case: PI07Case, weights: str = "", **settings) -> PI07LowLevelFlowMatching:
    """The case's model with its weights.

    Args:
        weights: file that replaces the case's weights.
        settings: changes to the configuration; `vlm_...` changes its `vlm_config`.
    """
    stored = _stored_weights(case, weights)
    config = config_of(case, stored, **settings)
    model = PI07LowLevelFlowMatching(config, case.meta["config"]["indicator_token_ids"])
    fill(model, case, stored)
    return model


def fill(model, case: PI07Case, stored: dict | None = None) -> None:
    """Load the case's weights; all must be used unless the model has no expert."""
    stored = _stored_weights(case) if stored is None else stored
    placed = model.stored_parameters()
    if model.config.vlm_config.disable_action_expert:
        stored = {item.key: stored[item.key] for item in placed}
    check_keys(case.file.parent, stored, placed, set(UNUSED_KEYS), f"the model of {case.name}")
    fill_parameters(placed, stored)


def _stored_weights(case: PI07Case, name: str = "") -> dict:
    return engine_keys(read_header(case.folders.file(name or case.meta["weights_file"])))


def config_of(case: PI07Case, stored: dict | None = None, **settings) -> PI07Config:
    """The case's configuration with the groups of its weights; `settings` as in `model_of`."""
    given = case.meta["config"]
    own = {k: v for k, v in given.items() if k not in _SECTIONS and k != "indicator_token_ids"}
    side = given["gemma3"]["vision_config"]["image_size"]
    vlm = given["vlm"] | {_SECTIONS[name]: given[name] for name in ("gemma3", "expert")}
    config = PI07Config.from_dict(
        own | {"vlm_config": vlm, "resize_imgs_with_padding": [side, side]}
    )
    if stored is not None and config.per_group_projection:
        groups = stored["state_proj.weight"].shape[0]
        config = config.changed(dataset_names=[f"group {i}" for i in range(groups)])
    engine = {k[4:]: v for k, v in settings.items() if k.startswith("vlm_")}
    own = {k: v for k, v in settings.items() if not k.startswith("vlm_")}
    if engine:
        own["vlm_config"] = replace(config.vlm_config, **engine)
    return config.changed(**own) if own else config


def recorded(model: PI07LowLevelFlowMatching) -> Recording:
    """Records the layers of a complete model."""
    layers: dict[str, Any] = {
        "tokens": video_encoder(model).projector,
        "prefix": model.prefix,
        "suffix": model.suffix,
        "decoder": model.decoder,
        "velocity": model.action_out_proj,
        "logits": model.da_head,
    }
    return Recording(layers | {f"layer{i}": layer for i, layer in enumerate(model.decoder.layers)})


def video_encoder(model: PI07LowLevelFlowMatching) -> VideoEncoder:
    """The video encoder of a complete model."""
    assert model.prefix is not None, "a full model has all layers"
    return model.prefix.video_encoder


def samples_of(rows, size: int) -> np.ndarray:
    """Token rows `[B * L, D]` of B = `size` samples, reshaped to `[B, L, D]`."""
    return array(rows).reshape(size, -1, rows.shape[-1])


def prefix_quantities(prefix: Prefix) -> dict[str, Any]:
    """Embedded prefix, its masks and positions."""
    return {
        "out.embed_prefix.embs": prefix.embs,
        "out.embed_prefix.pad_masks": prefix.pad_masks,
        "out.embed_prefix.att_masks": prefix.att_masks,
        "out.prefix.att_2d_mask": block_mask(prefix.pad_masks, prefix.att_masks),
        "out.prefix.position_ids": prefix_positions(prefix.pad_masks),
    }


def camera_tokens(prefix: Prefix, tokens, num_cams: int) -> dict[str, np.ndarray]:
    """The visual tokens of each camera; goal images follow the camera images in one pass."""
    cameras = np.split(array(tokens)[: num_cams * prefix.embs.shape[0]], num_cams)
    return {f"out.video{i}.embs": camera for i, camera in enumerate(cameras)}


def suffix_quantities(prefix: Prefix, num_steps: int) -> dict[str, Any]:
    """Masks and positions of an action chunk after a prefix; names without their prefix."""
    seen = prefix.pad_masks[:, : prefix.num_seen]
    pad = paddle.ones([seen.shape[0], num_steps], dtype="bool")
    # A chunk is one block.
    marks = np.zeros([seen.shape[0], num_steps], dtype=bool)
    marks[:, 0] = True
    mask = KeyMask(paddle.concat([seen, pad], axis=1), num_steps)
    return {
        "pad_masks": pad,
        "att_masks": marks,
        "att_2d_mask": mask.visible_BLS,
        "position_ids": suffix_positions(seen, num_steps),
    }


def cache_quantities(cache, num_seen: int) -> dict[str, Any]:
    """Keys and values that the expert sees."""
    return {
        f"out.kv.layer{i}.{name}": x[:, :num_seen]
        for i, pair in enumerate(cache)
        for name, x in zip(("key", "value"), pair, strict=True)
    }


def adamw(settings: Mapping[str, Any], clip: float) -> TrainConfig:
    """AdamW with a case's settings; OpenTau's defaults for those that it lacks."""
    beta1, beta2 = settings.get("betas", (0.9, 0.95))
    return TrainConfig(
        output_dir="unused",
        learning_rate=settings.get("lr", 2.5e-5),
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=settings.get("eps", 1e-8),
        weight_decay=settings.get("weight_decay", 1e-10),
        max_grad_norm=clip,
    )
