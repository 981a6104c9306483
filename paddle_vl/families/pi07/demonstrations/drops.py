"""Leaving optional fields out of samples in training, so that a policy learns to do without.

Source: OpenTau's dataset mixture. Its `subgoal_end_of_segment_prob` chooses the frame that is the
goal, which is a matter of sources that have episodes; it is not one of these.
"""

from typing import NamedTuple

import numpy as np

from paddle_vl.families.pi07.demonstrations.sample import (
    NUMBER_TYPES,
    Demonstration,
    DemonstrationShapes,
)
from paddle_vl.families.pi07.settings import DropProbabilities

# Metadata that may be left out, in the order of the draws; `fps` never is.
DROPPED_METADATA = ("speed", "mistake", "quality", "robot_type", "control_mode")


NO_DROPS = DropProbabilities(**dict.fromkeys(DropProbabilities.model_fields, 0.0))


class Drops(NamedTuple):
    """What a sample loses.

    Attributes:
        response: holds where the sample has goal images left.
        metadata: names of fields.
    """

    subgoal: bool
    history: bool
    response: bool
    metadata: frozenset[str]


def draw_drops(probabilities: DropProbabilities, rng: np.random.Generator) -> Drops:
    """Decide what a sample loses, which can be known before its images are read.

    Every decision takes its random number whether it matters or not: a probability that is changed
    leaves the other decisions as they were.
    """
    subgoal, history, response, everything, *each = rng.random(4 + len(DROPPED_METADATA))
    drops_all = everything < probabilities.metadata_drop_all_prob
    limit = 1.0 if drops_all else probabilities.metadata_drop_each_prob
    return Drops(
        subgoal=subgoal < probabilities.subgoal_drop_prob,
        history=history < probabilities.history_state_drop_prob,
        response=response < probabilities.response_drop_prob,
        metadata=frozenset(n for n, u in zip(DROPPED_METADATA, each, strict=True) if u < limit),
    )


def drop_fields(sample: Demonstration, drops: Drops, shapes: DemonstrationShapes) -> Demonstration:
    """The sample without what it loses; its entries and their shapes stay."""
    sample = dict(sample)
    has_goal = "subgoal_is_pad" in sample and not sample["subgoal_is_pad"]
    if has_goal and drops.subgoal:
        for goal in shapes.goals.values():
            sample[goal] = np.zeros_like(sample[goal])
        sample["subgoal_is_pad"] = np.bool_(True)
    if drops.history:
        for camera in shapes.cameras:
            frames = np.zeros_like(sample[camera])
            frames[-1] = sample[camera][-1]
            sample[camera] = frames
        sample["obs_history_is_pad"] = np.ones_like(sample["obs_history_is_pad"])
    if has_goal and not drops.subgoal and drops.response and "response" in sample:
        sample["response"] = ""
    for name in drops.metadata & sample.keys():
        if name in NUMBER_TYPES:
            sample[name] = NUMBER_TYPES[name](0)
            sample[f"{name}_is_pad"] = np.bool_(True)
        else:
            sample[name] = ""
    return sample
