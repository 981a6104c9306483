"""Raw observations and demonstrations to the inputs of the low-level model and of the planner.

NumPy only: loader workers run it. Entries of raw batches: `paddle_vl.families.pi07.policy`; a
ValueError names those that are missing or do not fit.

Shapes: B batch, T observed frames, C camera pixel channels (3), H and W pixels, S state dims, L
padded length of a text, N slots with a target, J steps of an action chunk, A action dims.

Source: the preprocessing of OpenTau's pi07 policies.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from paddle_vl.batch.positions import target_rows
from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Array, Axes, HostBatch
from paddle_vl.families.policy.demonstrations.sample import collate_demonstrations
from paddle_vl.families.policy.features import PolicyConfig
from paddle_vl.families.policy.images import (
    cameras_of,
    check_images,
    prepare_subgoals,
    prepare_videos,
)
from paddle_vl.families.policy.normalize import Normalizer, group_index, required, words_of
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer, padded_tokens

logger = logging.getLogger(__name__)
EOS = "<eos>"
# Bins of a value in a planner's prompt.
_NUM_BINS = 256
# Metadata in the order of the prompt; numbers have a `<name>_is_pad` beside them.
_METADATA = {
    "speed": "Speed",
    "quality": "Quality",
    "mistake": "Mistake",
    "robot_type": "Robot",
    "fps": "FPS",
    "control_mode": "Control",
}
_WORDS = ("robot_type", "control_mode")
# As in OpenTau: speed is the decile rank of the episode's length, quality a score, fps in Hz.
METADATA_RANGES = {"speed": (0, 100), "quality": (1, 5), "fps": (1, 1000)}
# Drawn for the flow: see `paddle_vl.families.policy.demonstrations.sample`.
DRAWN = ("noise", "time", "delay")


Tokens = Annotated[Array, Axes("B L", "int64")]
TokenMask = Annotated[Array, Axes("B L", "bool")]
# True where a sample has that camera's image.
ImageMask = Annotated[Array, Axes("B", "bool")]


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptBatch(HostBatch):
    """Fields of both of pi07's batches, from `PolicyInputs` and `PlannerInputs`, for the prefix.

    A mask is True at real tokens. Optional texts are always there, masked where a sample has none.
    """

    lang_tokens: Tokens = None
    lang_masks: TokenMask = None
    metadata_tokens: Tokens = None
    metadata_masks: TokenMask = None
    response_tokens: Tokens = None
    response_masks: TokenMask = None
    # Which optional parts are laid out, see `Presence`; where ranks agree on it, from
    # `PolicyBatchAdapter.synchronized`.
    presence: tuple[bool, ...] | None = None
    other_lanes: list[Any] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyBatch(PromptBatch):
    """What `PolicyCollator` makes for `PI07LowLevelFlowMatching`."""

    # One of each camera: frames in [-1, 1], goal images in [-1, 1]. For the vision tower.
    videos: list[Annotated[Array, Axes("B T C H W", "float32")]] | None = None
    vid_masks: list[ImageMask] | None = None
    subgoal_images: list[Annotated[Array, Axes("B C H W", "float32")]] | None = None
    subgoal_img_masks: list[ImageMask] | None = None
    # Normalised. For the state's projection.
    state: Annotated[Array, Axes("B T S", "float32")] = None
    # Row of the statistics of each sample. For per-group projections.
    group_index: Annotated[Array, Axes("B", "int64")] = None
    # Normalised, and as FAST tokens. For the two losses.
    actions: Annotated[Array, Axes("B J A", "float32")] = None
    discrete_actions: Tokens = None
    discrete_action_masks: TokenMask = None
    # True at frames before the episode's first.
    obs_history_is_pad: Annotated[Array, Axes("B T", "bool")] = None
    actions_is_pad: Annotated[Array, Axes("B J", "bool")] = None
    real_action_dim: Annotated[Array, Axes("B", "int64")] = None
    # Drawn for the flow: see `paddle_vl.families.policy.demonstrations.sample`.
    noise: Annotated[Array, Axes("B J A", "float32")] = None
    time: Annotated[Array, Axes("B", "float32")] = None
    delay: Annotated[Array, Axes("B", "int64")] = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannerBatch(PromptBatch):
    """What `PolicyCollator` makes for `PI07HighLevelPlannerModel`."""

    # One of each camera, in [-1, 1]. For the vision tower.
    images: list[Annotated[Array, Axes("B C H W", "float32")]] | None = None
    img_masks: list[ImageMask] | None = None
    # Read and written by the planner, as its response is. For the loss.
    memory_tokens: Tokens = None
    memory_masks: TokenMask = None
    # Slots of a text that predict a token, and these tokens.
    memory_target_rows: Annotated[Array, Axes("2 N", "int64")] = None
    response_target_rows: Annotated[Array, Axes("2 N", "int64")] = None


def as_arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with tensors as NumPy arrays, texts unchanged, and without None entries."""
    return {
        name: value.numpy() if hasattr(value, "numpy") else value
        for name, value in batch.items()
        if value is not None
    }


def prompt_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Task: <prompt>, ` for each sample; it raises ValueError for a batch without prompts."""
    required(batch, "prompt")
    return [f"Task: {text}, " for text in words_of(batch, "prompt", batch_size)]


def response_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Subtask: <response>, ` for each sample; empty without a response."""
    words = words_of(batch, "response", batch_size)
    return [f"Subtask: {text}, " if text else "" for text in words]


def metadata_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Metadata: Speed: 50,  Quality: 3, ...` for each sample; empty without metadata.

    Numbers count if `<name>_is_pad` is there and False, texts if they are not empty.
    """
    columns = {
        title: (words_of if name in _WORDS else _numbers)(batch, name, batch_size)
        for name, title in _METADATA.items()
    }
    texts = []
    for row in range(batch_size):
        found = [f"{title}: {column[row]}, " for title, column in columns.items() if column[row]]
        texts.append(f"Metadata: {' '.join(found)}" if found else "")
    return texts


def _numbers(batch: Mapping[str, Any], name: str, batch_size: int) -> list[str]:
    """A number of the metadata for each sample, as text; empty where it is padding."""
    if name not in batch or f"{name}_is_pad" not in batch:
        return [""] * batch_size
    values, is_pad = np.asarray(batch[name]), np.asarray(batch[f"{name}_is_pad"])
    if values.shape != (batch_size,) or is_pad.shape != (batch_size,):
        raise ValueError(
            f"{name!r} has shape {list(values.shape)} and {name}_is_pad {list(is_pad.shape)}; both "
            f"must be [{batch_size}]"
        )
    numbers = [
        None if absent else value
        for value, absent in zip(values.tolist(), is_pad.tolist(), strict=True)
    ]
    for value in numbers if name in METADATA_RANGES else ():
        if isinstance(value, bool):
            raise ValueError(f"{name!r} is {value!r}; a number is needed")
        if value is not None and (problem := metadata_problem(name, value)) is not None:
            raise ValueError(problem)
    return ["" if value is None else str(value) for value in numbers]


def metadata_problem(name: str, value: float) -> str | None:
    """What is wrong with a metadata number; None if it is valid."""
    least, most = METADATA_RANGES.get(name, (value, value))
    if least <= value <= most:
        return None
    if isinstance(value, int) and abs(value) >= 10**18:
        # Python refuses to print integers of thousands of digits.
        found = f"a number of {value.bit_length()} bits"
    else:
        found = str(value)
    return f"{name!r} is {found}; it must be from {least} to {most}"


def state_texts(state_BS: np.ndarray) -> list[str]:
    """Normalized states `[B, S]` as texts: each value, clipped to [-1, 1], as one of 256 bins."""
    scaled = (np.clip(state_BS, -1.0, 1.0) + 1.0) * (_NUM_BINS / 2)
    bins = np.minimum(scaled.astype(np.int64), _NUM_BINS - 1)
    return [" ".join(map(str, row)) for row in bins.tolist()]


def observation_inputs(
    batch: Mapping[str, Any], config: PolicyConfig, tokenizer: PromptTokenizer
) -> dict[str, Any]:
    """The low-level model's inputs from a batch with a normalized state."""
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
    """The state at every frame, padded with zeros to `[B, F, max_state_dim]` float32."""
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
    inputs: dict[str, Any] = {
        "actions": _padded(actions, config.max_action_dim, "actions", "max_action_dim"),
        "discrete_actions": ids,
        "discrete_action_masks": mask,
    }
    if "action_is_pad" in batch:
        inputs["actions_is_pad"] = np.asarray(batch["action_is_pad"])
    if "real_action_dim" in batch:
        inputs["real_action_dim"] = np.asarray(batch["real_action_dim"])
    if "real_action_dim" not in inputs and actions.shape[-1] < config.max_action_dim:
        inputs["real_action_dim"] = np.full(len(actions), actions.shape[-1], dtype=np.int64)
    return inputs


def padded_action_prefix(normalized_BDA: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Given normalized actions `[B, delay, dims]`, padded to `[B, C, max_action_dim]`."""
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
        """The model's inputs and targets from raw demonstrations, as arrays."""
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


class PlannerInputs:
    """Makes the planner's inputs: normalizes and writes out the state, tokenizes, resizes images.

    Args:
        normalizer: of the state.
    """

    def __init__(self, config: PolicyConfig, tokenizer: PromptTokenizer, normalizer: Normalizer):
        self.config, self.tokenizer, self.normalizer = config, tokenizer, normalizer

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs and targets from raw demonstrations, as arrays."""
        inputs, batch = self.observation_inputs(batch), as_arrays(batch)
        texts = {}
        for name, source in (("memory", "next_memory"), ("response", "response")):
            required(batch, source)
            words = words_of(batch, source, len(batch["state"]))
            length = getattr(self.config, f"{name}_max_length")
            texts[name] = [text + EOS for text in words], length, True
        return inputs | _tokenized(self.tokenizer, **texts)

    def observation_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs from raw observations, as arrays."""
        config, batch = self.config, as_arrays(batch)
        for name in ("state", "prompt", "past_memory"):
            required(batch, name)
        state = np.asarray(batch["state"], dtype=np.float32)
        state = state[:, 0] if state.ndim == 3 and state.shape[1] == 1 else state
        if state.ndim != 2 or state.shape[1] > config.max_state_dim:
            raise ValueError(
                f"'state' has shape {list(state.shape)}; [batch, dims] with at most "
                f"{config.max_state_dim} dims (max_state_dim) is needed"
            )
        size = len(state)
        index_B = group_index(batch, size, config, self.normalizer.num_groups)
        states = state_texts(self.normalizer.normalize({"state": state}, index_B)["state"])
        tasks, memories = (words_of(batch, name, size) for name in ("prompt", "past_memory"))
        prompts = [
            f"Task: {task}, Past Memory: {memory}, State: {state}, "
            for task, memory, state in zip(tasks, memories, states, strict=True)
        ]
        cameras = cameras_of(config.input_features)
        check_images(batch, cameras)
        frames = prepare_videos(
            batch, cameras, config.resize_imgs_with_padding, 1, config.empty_cameras
        )
        inputs: dict[str, Any] = {
            "images": [video[:, 0] * 2.0 - 1.0 for video in frames.images],
            "img_masks": frames.masks,
        }
        return inputs | _tokenized(
            self.tokenizer,
            lang=(prompts, config.prompt_max_length, True),
            metadata=(metadata_texts(batch, size), config.metadata_max_length, False),
        )


class PolicyCollator:
    """Samples to a complete batch of a model, with the draws of the flow.

    Args:
        agrees_on_presence: whether ranks lay out the optional fields that any of them has.
        on_host: fields that are not copied to the device.
    """

    def __init__(
        self,
        inputs: PolicyInputs | PlannerInputs,
        agrees_on_presence: bool = False,
        on_host: Sequence[str] = (),
    ):
        self.inputs, self.agrees_on_presence = inputs, agrees_on_presence
        self.on_host = (*on_host, "other_lanes")

    def __call__(self, samples: Sequence[dict[str, Any]]) -> PolicyBatch | PlannerBatch:
        raw = collate_demonstrations(samples)
        fields = self.inputs.training_inputs(raw)
        kind, config = PolicyBatch, self.inputs.config
        if isinstance(self.inputs, PlannerInputs):
            kind = PlannerBatch
            fields |= planner_targets(fields)
            # The first token of a text is not predicted.
            counts = [fields[f"{name}_tokens"][:, 1:].size for name in ("memory", "response")]
        else:
            fields |= {name: raw[name] for name in DRAWN if name in raw}
            actions = fields["discrete_actions"].size
            counts = [num_flow_values(fields, config.max_action_dim), actions]
        presence = fields_present(fields)
        return kind(
            **fields,
            presence=None if self.agrees_on_presence else presence,
            counts=tuple(counts),
            optional_branches=presence if self.agrees_on_presence else (),
            num_samples=len(fields["lang_tokens"]),
            on_host=self.on_host,
        )


def planner_targets(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The token slots of the planner's texts that have a target."""
    found = {}
    for text in ("memory", "response"):
        # Each token predicts the next.
        tokens_BL, masks_BL = fields[f"{text}_tokens"], fields[f"{text}_masks"]
        targets_BL = np.where(masks_BL, tokens_BL, IGNORE_INDEX)[:, 1:]
        found[f"{text}_target_rows"] = target_rows(targets_BL.reshape(-1))
    return found


def fields_present(fields: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether any sample has a real token of a response and of metadata, and a goal image."""
    masks = (fields.get("response_masks"), fields.get("metadata_masks"))
    goals = fields.get("subgoal_img_masks") or ()
    response, metadata = (mask is not None and bool(mask.any()) for mask in masks)
    return response, metadata, any(bool(mask.any()) for mask in goals)


def num_flow_values(batch: dict[str, Any], max_action_dim: int) -> int:
    """Action values that are neither given in advance nor padding, of the dims in use."""
    samples, steps = batch["actions"].shape[:2]
    counts_BJ = np.arange(steps) >= batch["delay"][:, None]
    if (is_pad_BJ := batch.get("actions_is_pad")) is not None:
        counts_BJ = counts_BJ & ~is_pad_BJ
    dims_B = batch.get("real_action_dim", np.full(samples, max_action_dim))
    return int((counts_BJ.sum(axis=1) * np.minimum(dims_B, max_action_dim)).sum())
