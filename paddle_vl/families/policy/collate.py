"""Demonstrations to the batches that pi07 trains on. No Paddle: loader workers run it.

Axes: B batch, T observed frames, C camera pixel channels (3), H and W pixels, S state dims, L
padded length of a text, N slots with a target, J steps of an action chunk, A action dims.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import numpy as np
from typing_extensions import NotRequired, TypedDict

from paddle_vl.batch.schema import Array, Axes
from paddle_vl.families.policy.demonstrations.sample import collate_demonstrations
from paddle_vl.families.policy.model_inputs import PlannerInputs, PolicyInputs

DRAWN = ("noise", "time", "delay")

Tokens = Annotated[Array, Axes("B L", "int64")]
TokenMask = Annotated[Array, Axes("B L", "bool")]
# True where a sample has that camera's image.
ImageMask = Annotated[Array, Axes("B", "bool")]


class PromptBatch(TypedDict):
    """Fields of both of pi07's batches, from `PolicyInputs` and `PlannerInputs`, for the prefix.

    A mask is True at real tokens. Optional texts are always there, masked where a sample has none.
    """

    lang_tokens: Tokens
    lang_masks: TokenMask
    metadata_tokens: Tokens
    metadata_masks: TokenMask
    response_tokens: Tokens
    response_masks: TokenMask
    # `Presence`: which optional parts are laid out. From `PolicyBatchAdapter`; on the host.
    presence: NotRequired[Any]


class PolicyBatch(PromptBatch):
    """What `PolicyCollator` makes for `PI07LowLevelFlowMatching`."""

    # One of each camera: frames in [-1, 1], goal images in [-1, 1]. For the vision tower.
    videos: list[Annotated[Array, Axes("B T C H W", "float32")]]
    vid_masks: list[ImageMask]
    subgoal_images: list[Annotated[Array, Axes("B C H W", "float32")]]
    subgoal_img_masks: list[ImageMask]
    # Normalised. For the state's projection.
    state: Annotated[Array, Axes("B T S", "float32")]
    # Row of the statistics of each sample. For per-group projections.
    group_index: Annotated[Array, Axes("B", "int64")]
    # Normalised, and as FAST tokens. For the two losses.
    actions: Annotated[Array, Axes("B J A", "float32")]
    discrete_actions: Tokens
    discrete_action_masks: TokenMask
    # Divisors of the losses: action values that count, and all slots of discrete actions.
    num_flow_values: int
    num_action_slots: int
    # True at frames before the episode's first.
    obs_history_is_pad: NotRequired[Annotated[Array, Axes("B T", "bool")]]
    actions_is_pad: NotRequired[Annotated[Array, Axes("B J", "bool")]]
    real_action_dim: NotRequired[Annotated[Array, Axes("B", "int64")]]
    # Drawn for the flow: see `paddle_vl.families.policy.demonstrations.training_set`.
    noise: NotRequired[Annotated[Array, Axes("B J A", "float32")]]
    time: NotRequired[Annotated[Array, Axes("B", "float32")]]
    delay: NotRequired[Annotated[Array, Axes("B", "int64")]]


class PlannerBatch(PromptBatch):
    """What `PolicyCollator` makes for `PI07HighLevelPlannerModel`."""

    # One of each camera, in [-1, 1]. For the vision tower.
    images: list[Annotated[Array, Axes("B C H W", "float32")]]
    img_masks: list[ImageMask]
    # Read and written by the planner, as its response is. For the loss.
    memory_tokens: Tokens
    memory_masks: TokenMask
    # Divisors of the losses: token slots that have a token before them.
    num_memory_slots: int
    num_response_slots: int
    # Slots of a text that predict a token, and these tokens. From `PolicyBatchAdapter.prepared`.
    memory_target_rows: NotRequired[Annotated[Array, Axes("2 N", "int64")]]
    response_target_rows: NotRequired[Annotated[Array, Axes("2 N", "int64")]]


class PolicyCollator:
    """Samples to a model's inputs, with the draws of the flow and the divisors of the losses."""

    def __init__(self, inputs: PolicyInputs | PlannerInputs):
        self.inputs = inputs

    def __call__(self, samples: Sequence[dict[str, Any]]) -> PolicyBatch | PlannerBatch:
        raw = collate_demonstrations(samples)
        batch = self.inputs.training_inputs(raw)
        if isinstance(self.inputs, PlannerInputs):
            for name in ("memory", "response"):
                # The first token of a text is not predicted.
                batch[f"num_{name}_slots"] = batch[f"{name}_tokens"][:, 1:].size
            return cast(PlannerBatch, batch)
        batch |= {name: raw[name] for name in DRAWN if name in raw}
        batch["num_flow_values"] = num_flow_values(batch, self.inputs.config.max_action_dim)
        batch["num_action_slots"] = batch["discrete_actions"].size
        return cast(PolicyBatch, batch)


def num_flow_values(batch: dict[str, Any], max_action_dim: int) -> int:
    """Action values that are neither given in advance nor padding, of the dims in use."""
    samples, steps = batch["actions"].shape[:2]
    counts_BJ = np.arange(steps) >= batch["delay"][:, None]
    if (is_pad_BJ := batch.get("actions_is_pad")) is not None:
        counts_BJ = counts_BJ & ~is_pad_BJ
    dims_B = batch.get("real_action_dim", np.full(samples, max_action_dim))
    return int((counts_BJ.sum(axis=1) * np.minimum(dims_B, max_action_dim)).sum())
