"""Training samples for the loader: optional fields are dropped, noise and times drawn.

A draw is a function of seed, epoch and sample number, independent of batch, rank and worker. Every
purpose has its own stream, so a setting of one does not change the draws of another.

Source: the drops of OpenTau's dataset mixture. Its `subgoal_end_of_segment_prob`, which chooses the
goal frame in an episode, is left to the source of the demonstrations.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.policy.demonstrations.sample import (
    NUMBER_TYPES,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
)
from paddle_vl.families.policy.features import DropProbabilities


class Stream(IntEnum):
    """Purposes of random numbers."""

    DROPS = 0
    FLOW = 1
    CONTENT = 2


def sample_rng(seed: int, stream: Stream, *place: int) -> np.random.Generator:
    """The random generator of one sample for one purpose.

    Args:
        place: epoch and sample number, or other numbers that identify the sample.
    """
    # A spawn key, since entropy [seed, epoch] equals [seed, epoch, 0], which draws the sample
    # order.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, *place)))


@dataclass(frozen=True)
class FlowDraws:
    """Draws noise, time and delay of a sample for the flow loss.

    Attributes:
        chunk_size, max_action_dim: shape of the noise, as of the model's actions.
        max_delay: most actions of a chunk that are already given.
    """

    chunk_size: int
    max_action_dim: int
    max_delay: int = 0

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray | np.generic]:
        """`noise` `[C, max_action_dim]` float32 normal; `time` float32, 0.001 + 0.999 Beta(1.5, 1)
        by the inverse of its distribution; `delay` int64, uniform from 0 to `max_delay`.
        """
        time = rng.random() ** (1 / 1.5) * 0.999 + 0.001
        delay = rng.integers(0, self.max_delay, endpoint=True)
        shape = (self.chunk_size, self.max_action_dim)
        return {
            "noise": rng.standard_normal(shape, dtype=np.float32),
            "time": np.float32(time),
            "delay": np.int64(delay),
        }


# Metadata that may be dropped, in the order of the draws; `fps` never is.
DROPPED_METADATA = ("speed", "mistake", "quality", "robot_type", "control_mode")


NO_DROPS = DropProbabilities(**dict.fromkeys(DropProbabilities.model_fields, 0.0))


class Drops(NamedTuple):
    """What to drop from a sample.

    Attributes:
        response: applies only if the sample keeps its goal images.
        metadata: names of fields.
    """

    subgoal: bool
    history: bool
    response: bool
    metadata: frozenset[str]


def draw_drops(probabilities: DropProbabilities, rng: np.random.Generator) -> Drops:
    """Decide what to drop, before the images are read.

    Every decision uses one random number, needed or not, so that changing one probability does not
    change the other decisions.
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
    """The sample with dropped fields marked as absent; entries and shapes stay."""
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


def _of_source(name: str) -> Any:
    """A property, or method, that is the source's; see `DemonstrationSource`."""
    return property(lambda self: getattr(self.source, name))


@dataclass(frozen=True)
class DrawnDemonstrations:
    """Samples of a source with the drops and flow draws of one epoch.

    The loader gets the view of an epoch from `in_epoch`. For evaluation leave out `probabilities`:
    nothing is dropped, and since every evaluation is epoch 0, its draws are always the same.

    Attributes:
        probabilities: of the drops.
        flow: draws for the flow loss; None for none, as for the planner.
        seed: of all draws.
    """

    source: DemonstrationSource
    probabilities: DropProbabilities = NO_DROPS
    flow: FlowDraws | None = None
    seed: int = 0
    epoch: int = 0

    def __post_init__(self):
        """Check that the noise fits the actions.

        Raises:
            ValueError: it does not.
        """
        shape = self.source.shapes.action_shape
        if self.flow is None:
            return
        if not shape or shape[0] != self.flow.chunk_size or shape[1] > self.flow.max_action_dim:
            raise ValueError(
                f"noise is drawn for {self.flow.chunk_size} steps of {self.flow.max_action_dim} "
                f"values, and the data has actions of shape {list(shape)}: the same number of "
                "steps and at most as many values are needed"
            )

    def in_epoch(self, epoch: int) -> "DrawnDemonstrations":
        """The same samples, with that epoch's draws."""
        return replace(self, epoch=epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Demonstration:
        """A sample.

        Raises:
            BadSampleError: the sample cannot be used; says `file:line: reason`.
        """
        place = (self.epoch, number)
        drops = draw_drops(self.probabilities, sample_rng(self.seed, Stream.DROPS, *place))
        sample = self.source.demonstration(
            number, with_history=not drops.history, with_subgoals=not drops.subgoal
        )
        sample = drop_fields(sample, drops, self.shapes)
        if self.flow is not None:
            sample |= self.flow.draw(sample_rng(self.seed, Stream.FLOW, *place))
        return sample

    files, contents = _of_source("files"), _of_source("contents")
    shapes, fields = _of_source("shapes"), _of_source("fields")
    group_names, place = _of_source("group_names"), _of_source("place")
    on_bad_sample, skipped = _of_source("on_bad_sample"), _of_source("skipped")
    fingerprint = _of_source("fingerprint")
    positions_fingerprint = _of_source("positions_fingerprint")
