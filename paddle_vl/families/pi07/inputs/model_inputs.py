"""From a raw batch to what the model takes.

Shapes: B batch, T frames of an observation, C steps of a chunk, A action and S state dims.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.features import PolicyFeature
from paddle_vl.families.pi07.inputs.discrete_actions import ActionTokenizer, padded_tokens
from paddle_vl.families.pi07.inputs.images import prepare_subgoals, prepare_videos
from paddle_vl.families.pi07.inputs.prompt import (
    PromptTokenizer,
    metadata_texts,
    prompt_texts,
    response_texts,
)

logger = logging.getLogger(__name__)


def cameras_of(features: Mapping[str, PolicyFeature]) -> list[str]:
    """Names of the images among the features."""
    return [name for name, feature in features.items() if feature.type == "VISUAL"]


def as_arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its tensors as arrays; texts stay as they are, None entries go."""
    return {
        name: value.numpy() if hasattr(value, "numpy") else value
        for name, value in batch.items()
        if value is not None
    }


def observation_inputs(
    batch: Mapping[str, Any], config: PI07Config, tokenizer: PromptTokenizer
) -> dict[str, Any]:
    """What the model sees and reads, of a batch whose state is normalised.

    Raises:
        ValueError: entries are missing or have another shape than the configuration says.
    """
    state_BTS = prepare_state(batch, config)
    size, history = len(state_BTS), _history(batch)
    cameras = cameras_of(config.input_features)
    image_size = config.resize_imgs_with_padding
    videos = prepare_videos(
        batch, cameras, image_size, config.n_obs_steps, config.empty_cameras, history
    )
    subgoals = prepare_subgoals(batch, cameras, image_size, config.empty_cameras)
    inputs: dict[str, Any] = {
        "videos": videos.images,
        "vid_masks": videos.masks,
        "state": state_BTS,
        "subgoal_images": subgoals.images,
        "subgoal_img_masks": subgoals.masks,
    }
    if history is not None:
        inputs["obs_history_is_pad"] = history
    for name, texts, length, has_special in (
        ("lang", prompt_texts(batch, size), config.prompt_max_length, True),
        ("response", response_texts(batch, size), config.response_max_length, False),
        ("metadata", metadata_texts(batch, size), config.metadata_max_length, False),
    ):
        ids, mask = tokenizer.padded(texts, length, has_special)
        inputs |= {f"{name}_tokens": ids, f"{name}_masks": mask}
    return inputs


def prepare_state(batch: Mapping[str, Any], config: PI07Config) -> np.ndarray:
    """The state at every frame, filled with zeros to `[B, T, max_state_dim]`.

    Raises:
        ValueError: there is none, or it is longer than `max_state_dim`.
    """
    if "state" not in batch:
        raise ValueError(f"the batch has no 'state'; its entries are {sorted(batch)}")
    state = np.asarray(batch["state"], dtype=np.float32)
    if state.ndim == 2 and config.n_obs_steps == 1:
        state = state[:, None]
    if state.ndim != 3:
        raise ValueError(
            f"'state' has shape {list(state.shape)}; n_obs_steps {config.n_obs_steps} needs "
            "[batch, frames, dims]"
            + (", which select_action makes of single steps" if config.n_obs_steps > 1 else "")
        )
    return _filled(state, config.max_state_dim, "state", "max_state_dim")


def target_inputs(
    batch: Mapping[str, Any],
    discrete_BCA: np.ndarray,
    config: PI07Config,
    tokenizer: ActionTokenizer | None,
) -> dict[str, Any]:
    """What the model learns from, of a batch whose actions are normalised.

    Args:
        discrete_BCA: the actions, normalised for the action tokenizer.

    Raises:
        ValueError: there is no tokenizer, or the actions have another shape.
    """
    if tokenizer is None:
        raise ValueError(
            "training needs an action tokenizer, and the policy has none: give its folder as "
            "action_tokenizer when the policy is made or loaded, or as "
            "discrete_action_tokenizer_path of the configuration"
        )
    actions = np.asarray(batch["actions"], dtype=np.float32)
    if actions.ndim != 3 or actions.shape[1] != config.chunk_size:
        raise ValueError(
            f"'actions' has shape {list(actions.shape)}; chunk_size {config.chunk_size} needs "
            f"[batch, {config.chunk_size}, dims]"
        )
    ids, mask = padded_tokens(tokenizer(discrete_BCA), config.discrete_action_max_length)
    inputs = {
        "actions": _filled(actions, config.max_action_dim, "actions", "max_action_dim"),
        "discrete_actions": ids,
        "discrete_action_masks": mask,
    }
    for theirs, ours in (("action_is_pad", "actions_is_pad"), ("real_action_dim",) * 2):
        if theirs in batch:
            inputs[ours] = np.asarray(batch[theirs])
    if "real_action_dim" not in inputs and actions.shape[-1] < config.max_action_dim:
        inputs["real_action_dim"] = np.full(len(actions), actions.shape[-1], dtype=np.int64)
    return inputs


def whole_action_prefix(normalized_BDA: np.ndarray, config: PI07Config) -> np.ndarray:
    """Actions that are under way, normalised, filled with zeros to a whole chunk `[B, C, A]`.

    Raises:
        ValueError: they are more or wider than a chunk.
    """
    prefix = np.asarray(normalized_BDA, dtype=np.float32)
    if prefix.ndim != 3 or prefix.shape[1] > config.chunk_size:
        raise ValueError(
            f"action_prefix has shape {list(prefix.shape)}; [batch, at most {config.chunk_size} "
            "steps, dims] is needed"
        )
    prefix = _filled(prefix, config.max_action_dim, "action_prefix", "max_action_dim")
    return np.pad(prefix, ((0, 0), (0, config.chunk_size - prefix.shape[1]), (0, 0)))


def warn_of_outliers(batch: Mapping[str, Any], threshold: float) -> None:
    """Warn of normalised states and actions that lie far out: their statistics may be wrong."""
    for name in ("state", "actions"):
        if threshold <= 0 or name not in batch:
            continue
        largest = np.abs(np.asarray(batch[name])).max(axis=tuple(range(np.ndim(batch[name]) - 1)))
        if (far := np.flatnonzero(largest > threshold)).size:
            logger.warning(
                "normalised %s reach %.3g in dims %s, beyond warn_outlier_threshold %g: check "
                "their statistics",
                name,
                largest.max(),
                far.tolist(),
                threshold,
            )


def _history(batch: Mapping[str, Any]) -> np.ndarray | None:
    history = batch.get("obs_history_is_pad")
    return None if history is None else np.asarray(history, dtype=bool)


def _filled(values: np.ndarray, width: int, name: str, setting: str) -> np.ndarray:
    if values.shape[-1] > width:
        raise ValueError(
            f"{name!r} has {values.shape[-1]} dims, {setting} is {width}: raise {setting}, or "
            "choose fewer"
        )
    missing = width - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)]) if missing else values
