"""Demonstrations to the batches that a robot policy trains on. No Paddle: loader workers run it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from paddle_vl.families.pi07.demonstrations.sample import collate_demonstrations

DRAWN = ("noise", "time", "delay")


class RawInputs(Protocol):
    """Makes a model's inputs of a raw batch."""

    def training_inputs(self, batch: dict[str, Any]) -> dict[str, Any]: ...


class PolicyCollator:
    """Samples to the low-level model's inputs, with what was drawn and what its losses are means
    of: `num_flow_values`, the action values that count in the flow's loss, and `num_action_slots`,
    the places of discrete actions, padding too.

    Args:
        max_action_dim: values of an action that the model computes.
    """

    def __init__(self, inputs: RawInputs, max_action_dim: int):
        self.inputs, self.max_action_dim = inputs, max_action_dim

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        raw = collate_demonstrations(samples)
        batch = self.inputs.training_inputs(raw)
        batch |= {name: raw[name] for name in DRAWN if name in raw}
        batch["num_flow_values"] = num_flow_values(batch, self.max_action_dim)
        batch["num_action_slots"] = batch["discrete_actions"].size
        return batch


def num_flow_values(batch: dict[str, Any], max_action_dim: int) -> int:
    """Action values that are neither given in advance nor padding, of the dims in use."""
    samples, steps = batch["actions"].shape[:2]
    counts_BC = np.arange(steps) >= batch["delay"][:, None]
    if (is_pad_BC := batch.get("actions_is_pad")) is not None:
        counts_BC = counts_BC & ~is_pad_BC
    dims_B = batch.get("real_action_dim", np.full(samples, max_action_dim))
    return int((counts_BC.sum(axis=1) * np.minimum(dims_B, max_action_dim)).sum())


class PlannerCollator:
    """Samples to the planner's inputs, with the places that its losses are means of."""

    def __init__(self, inputs: RawInputs):
        self.inputs = inputs

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = self.inputs.training_inputs(collate_demonstrations(samples))
        for name in ("memory", "response"):
            # No token predicts the first one.
            batch[f"num_{name}_slots"] = batch[f"{name}_tokens"][:, 1:].size
        return batch
