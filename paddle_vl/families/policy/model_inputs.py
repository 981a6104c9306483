"""Raw observations and demonstrations to the inputs of the low-level model and of the planner.

NumPy only: loader workers run it. Entries of raw batches: `paddle_vl.families.pi07.policy`; of the
inputs: `paddle_vl.families.policy.collate`.

Shapes: B batch, F frames of an observation, C steps of a chunk, A action and S state dims.

Source: the preprocessing of OpenTau's pi07 policies.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.policy.discrete_actions import ActionTokenizer, padded_tokens
from paddle_vl.families.policy.features import PolicyConfig
from paddle_vl.families.policy.images import (
    cameras_of,
    check_images,
    prepare_subgoals,
    prepare_videos,
)
from paddle_vl.families.policy.normalize import Normalizer, group_index
from paddle_vl.families.policy.prompt import (
    PromptTokenizer,
    metadata_texts,
    prompt_texts,
    required,
    required_words,
    response_texts,
)

logger = logging.getLogger(__name__)


def as_arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with tensors as NumPy arrays, texts unchanged, and without None entries."""
    return {
        name: value.numpy() if hasattr(value, "numpy") else value
        for name, value in batch.items()
        if value is not None
    }


def observation_inputs(
    batch: Mapping[str, Any], config: PolicyConfig, tokenizer: PromptTokenizer
) -> dict[str, Any]:
    """The low-level model's inputs from a batch with a normalized state.

    Raises:
        ValueError: entries are missing or have another shape than configured.
    """
    state_BFS = prepare_state(batch, config)
    size, history = len(state_BFS), batch.get("obs_history_is_pad")
    history = None if history is None else np.asarray(history, dtype=bool)
    cameras = cameras_of(config.input_features)
    image_size = config.resize_imgs_with_padding
    videos = prepare_videos(
        batch, cameras, image_size, config.n_obs_steps, config.empty_cameras, history
    )
    subgoals = prepare_subgoals(batch, cameras, image_size, config.empty_cameras)
    inputs: dict[str, Any] = {
        "videos": videos.images,
        "vid_masks": videos.masks,
        "state": state_BFS,
        "subgoal_images": subgoals.images,
        "subgoal_img_masks": subgoals.masks,
    }
    if history is not None:
        inputs["obs_history_is_pad"] = history
    return inputs | _tokenized(
        tokenizer,
        lang=(prompt_texts(batch, size), config.prompt_max_length, True),
        response=(response_texts(batch, size), config.response_max_length, False),
        metadata=(metadata_texts(batch, size), config.metadata_max_length, False),
    )


def _tokenized(
    tokenizer: PromptTokenizer, **texts: tuple[Sequence[str], int, bool]
) -> dict[str, np.ndarray]:
    """`<name>_tokens` and `<name>_masks` of texts, given with their length in tokens and whether
    they get special tokens."""
    inputs = {}
    for name, of_name in texts.items():
        inputs[f"{name}_tokens"], inputs[f"{name}_masks"] = tokenizer.padded(*of_name)
    return inputs


def prepare_state(batch: Mapping[str, Any], config: PolicyConfig) -> np.ndarray:
    """The state at every frame, padded with zeros to `[B, F, max_state_dim]` float32.

    Raises:
        ValueError: there is no state, or it has more than `max_state_dim` dims.
    """
    state = np.asarray(required(batch, "state"), dtype=np.float32)
    if state.ndim == 2 and config.n_obs_steps == 1:
        state = state[:, None]
    if state.ndim != 3:
        raise ValueError(
            f"'state' has shape {list(state.shape)}; n_obs_steps {config.n_obs_steps} needs "
            "[batch, frames, dims]"
            + (", which select_action makes of single steps" if config.n_obs_steps > 1 else "")
        )
    return _padded(state, config.max_state_dim, "state", "max_state_dim")


def target_inputs(
    batch: Mapping[str, Any],
    discrete_BCA: np.ndarray,
    config: PolicyConfig,
    tokenizer: ActionTokenizer | None,
) -> dict[str, Any]:
    """The low-level model's targets from a batch with normalized actions.

    Args:
        discrete_BCA: the actions, normalized for the action tokenizer.

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
        "actions": _padded(actions, config.max_action_dim, "actions", "max_action_dim"),
        "discrete_actions": ids,
        "discrete_action_masks": mask,
    }
    for theirs, ours in (("action_is_pad", "actions_is_pad"), ("real_action_dim",) * 2):
        if theirs in batch:
            inputs[ours] = np.asarray(batch[theirs])
    if "real_action_dim" not in inputs and actions.shape[-1] < config.max_action_dim:
        inputs["real_action_dim"] = np.full(len(actions), actions.shape[-1], dtype=np.int64)
    return inputs


def padded_action_prefix(normalized_BDA: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Given normalized actions `[B, delay, dims]`, padded with zeros to `[B, C, max_action_dim]`.

    Raises:
        ValueError: they do not fit into a chunk.
    """
    prefix = np.asarray(normalized_BDA, dtype=np.float32)
    if prefix.ndim != 3 or prefix.shape[1] > config.chunk_size:
        raise ValueError(
            f"action_prefix has shape {list(prefix.shape)}; [batch, at most {config.chunk_size} "
            "steps, dims] is needed"
        )
    prefix = _padded(prefix, config.max_action_dim, "action_prefix", "max_action_dim")
    return np.pad(prefix, ((0, 0), (0, config.chunk_size - prefix.shape[1]), (0, 0)))


def warn_of_outliers(batch: Mapping[str, Any], threshold: float) -> None:
    """Warn of normalized states and actions beyond a threshold: their statistics may be wrong."""
    for name in ("state", "actions"):
        if threshold <= 0 or name not in batch:
            continue
        largest = np.abs(np.asarray(batch[name])).max(axis=tuple(range(np.ndim(batch[name]) - 1)))
        if (far := np.flatnonzero(largest > threshold)).size:
            logger.warning(
                "normalized %s reach %.3g in dims %s, beyond warn_outlier_threshold %g: check "
                "their statistics",
                name,
                largest.max(),
                far.tolist(),
                threshold,
            )


def _padded(values: np.ndarray, width: int, name: str, setting: str) -> np.ndarray:
    if values.shape[-1] > width:
        raise ValueError(
            f"{name!r} has {values.shape[-1]} dims, {setting} is {width}: raise {setting}, or "
            "choose fewer"
        )
    missing = width - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)]) if missing else values


class PolicyInputs:
    """Makes the low-level model's inputs: normalizes, tokenizes, resizes images.

    Args:
        action_tokenizer: None if the policy only acts.
        normalizers: of the policy, by name.
    """

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: PromptTokenizer,
        action_tokenizer: ActionTokenizer | None,
        normalizers: Mapping[str, Normalizer],
    ):
        self.config, self.tokenizer = config, tokenizer
        self.action_tokenizer, self.normalizers = action_tokenizer, normalizers

    def observed(self, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's inputs from a raw observation, and this with its state normalized.

        Args:
            batch: arrays and texts, see `paddle_vl.families.pi07.policy`.

        Raises:
            ValueError: an entry is missing or does not fit; names it.
        """
        required(batch, "state")
        # Before they are normalized.
        check_images(batch, cameras_of(self.config.input_features))
        normalizer = self.normalizers["normalize_inputs"]
        group_B = group_index(batch, len(batch["state"]), self.config, normalizer.num_groups)
        normalized = normalizer.normalize(batch, group_B)
        inputs = observation_inputs(normalized, self.config, self.tokenizer)
        return inputs | {"group_index": group_B}, normalized

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs and targets from raw demonstrations, as arrays.

        Raises:
            ValueError: an entry is missing or does not fit; names it.
        """
        batch = as_arrays(batch)
        required(batch, "actions")
        inputs, normalized = self.observed(batch)
        group_B = inputs["group_index"]
        discrete = self.normalizers["normalize_discrete_actions"].normalize(batch, group_B)
        normalized = self.normalizers["normalize_targets"].normalize(normalized, group_B)
        warn_of_outliers(normalized, self.config.warn_outlier_threshold)
        return inputs | target_inputs(
            normalized, discrete["actions"], self.config, self.action_tokenizer
        )


EOS = "<eos>"
_NUM_BINS = 256


class PlannerInputs:
    """Makes the planner's inputs: normalizes and writes out the state, tokenizes, resizes images.

    Args:
        normalizer: of the state.
    """

    def __init__(self, config: PolicyConfig, tokenizer: PromptTokenizer, normalizer: Normalizer):
        self.config, self.tokenizer, self.normalizer = config, tokenizer, normalizer

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs and targets from raw demonstrations, as arrays.

        Raises:
            ValueError: an entry is missing or does not fit; names it.
        """
        inputs, batch = self.observation_inputs(batch), as_arrays(batch)
        texts = {}
        for name, source in (("memory", "next_memory"), ("response", "response")):
            words = required_words(batch, source, len(batch["state"]))
            length = getattr(self.config, f"{name}_max_length")
            texts[name] = [text + EOS for text in words], length, True
        return inputs | _tokenized(self.tokenizer, **texts)

    def observation_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs from raw observations, as arrays.

        Raises:
            ValueError: an entry is missing or does not fit; names it.
        """
        config, batch = self.config, as_arrays(batch)
        state = np.asarray(required(batch, "state"), dtype=np.float32)
        state = state[:, 0] if state.ndim == 3 and state.shape[1] == 1 else state
        if state.ndim != 2 or state.shape[1] > config.max_state_dim:
            raise ValueError(
                f"'state' has shape {list(state.shape)}; [batch, dims] with at most "
                f"{config.max_state_dim} dims (max_state_dim) is needed"
            )
        size = len(state)
        index_B = group_index(batch, size, config, self.normalizer.num_groups)
        states = state_texts(self.normalizer.normalize({"state": state}, index_B)["state"])
        tasks, memories = (required_words(batch, name, size) for name in ("prompt", "past_memory"))
        prompts = [
            f"Task: {task}, Past Memory: {memory}, State: {state}, "
            for task, memory, state in zip(tasks, memories, states, strict=True)
        ]
        cameras, image_size = cameras_of(config.input_features), config.resize_imgs_with_padding
        assert image_size is not None, "check_common gives it a value"
        check_images(batch, cameras)
        frames = prepare_videos(batch, cameras, image_size, 1, config.empty_cameras)
        inputs: dict[str, Any] = {
            "images": [video[:, 0] * 2.0 - 1.0 for video in frames.images],
            "img_masks": frames.masks,
        }
        return inputs | _tokenized(
            self.tokenizer,
            lang=(prompts, config.prompt_max_length, True),
            metadata=(metadata_texts(batch, size), config.metadata_max_length, False),
        )


def state_texts(state_BS: np.ndarray) -> list[str]:
    """Normalized states `[B, S]` as texts: each value, clipped to [-1, 1], as one of 256 bins."""
    scaled = (np.clip(state_BS, -1.0, 1.0) + 1.0) * (_NUM_BINS / 2)
    bins = np.minimum(scaled.astype(np.int64), _NUM_BINS - 1)
    return [" ".join(map(str, row)) for row in bins.tolist()]
