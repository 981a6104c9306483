"""One demonstration, a moment of an episode: its entries and shapes; batches of them; and what is
drawn for training: fields that are dropped, changes of images, noise and times.

A sample is a mapping with the names of OpenTau's standard data format. Shapes: F frames of an
observation (`n_obs_steps`, the current one last), S state dims, C steps of a chunk, A action dims,
H x W pixels.

Always:
    `state` `[F, S]` float32; the frames of each camera under its name, `camera0`...,
    `[F, 3, H, W]` float32 in [0, 1]; `obs_history_is_pad` `[F]` bool, True for frames from before
    the episode, which are zeros; `prompt`, text; `dataset_index`, int64, the group of data.
If actions are needed:
    `actions` `[C, A]` float32; `action_is_pad` `[C]` bool, True after the episode's end, where the
    last action is repeated.
Optional (`OPTIONAL_FIELDS`), in all samples of a source or in none:
    `response`, `robot_type`, `control_mode`, `past_memory`, `next_memory`: texts; empty is absent.
    `speed`, `quality`, `fps` int64 and `mistake` bool with `<name>_is_pad`; absent is 0 with True.
    `subgoal`: a goal image `[3, H, W]` in [0, 1] per camera, `subgoal0` for `camera0`, and
    `subgoal_is_pad`; absent is black with True, for all cameras or for none.
If samples may lack cameras (`empty_cameras`):
    `<camera>_is_pad` bool, True for a camera that the sample lacks, whose frames are black; with
    goal images `<goal>_is_pad`, True for those that a sample with goals lacks of such cameras.
Drawn for training:
    `noise` `[C, max_action_dim]` float32; `time` float32; `delay` int64.

Values are raw; the policy normalizes them. The configuration, not the samples, determines the
fields of a source, so every rank and every batch has the same entries.

A draw is a function of seed, epoch and sample number, independent of batch, rank and worker. Every
purpose has its own stream, so a setting of one does not change the draws of another.

What a sample is and what may be dropped from it must agree.

Source: the drops of OpenTau's dataset mixture. Its `subgoal_end_of_segment_prob`, which chooses the
goal frame in an episode, is left to the source of the demonstrations.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.policy.features import DropProbabilities, ImageTransforms

Demonstration = dict[str, Any]

# Numbers of the metadata with their types.
NUMBER_TYPES: Mapping[str, type] = {
    "speed": np.int64,
    "quality": np.int64,
    "mistake": np.bool_,
    "fps": np.int64,
}
OPTIONAL_TEXTS = ("response", "robot_type", "control_mode", "past_memory", "next_memory")
OPTIONAL_FIELDS = (*OPTIONAL_TEXTS, *NUMBER_TYPES, "subgoal")


@dataclass(frozen=True)
class DemonstrationShapes:
    """Cameras and sizes that a policy needs, from its configuration.

    Attributes:
        image_size: (height, width) of images, `resize_imgs_with_padding`.
        chunk_size, action_dim: C and A; None if no actions are needed, as for the planner.
    """

    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    state_dim: int
    n_obs_steps: int = 1
    chunk_size: int | None = None
    action_dim: int | None = None
    # Not in the representation, which fingerprints of earlier checkpoints contain.
    history_interval: int = field(default=1, repr=False)
    empty_cameras: int = field(default=0, repr=False)

    @property
    def history_length(self) -> int:
        """Consecutive steps of the data that one observation reaches over, the current included."""
        return (self.n_obs_steps - 1) * self.history_interval + 1

    def observed(self, num_steps: int) -> slice:
        """The frames of an observation among `num_steps` consecutive steps: `history_interval`
        apart, the last the current one; fewer than `n_obs_steps` if these do not reach back far.

        Source: the delta timestamps of OpenTau's data sets, -(F - 1 - i) * history_interval steps
        for frame i, and the observation buffer of its `select_action`.
        """
        current = num_steps - 1
        first = max(current % self.history_interval, num_steps - self.history_length)
        return slice(first, num_steps, self.history_interval)

    @property
    def goals(self) -> dict[str, str]:
        """Name of each camera's goal image."""
        return {camera: camera.replace("camera", "subgoal") for camera in self.cameras}


class DemonstrationSource(ABC):
    """A `paddle_vl.data.samples.SampleSource` of demonstrations: files or a formula.

    Attributes:
        shapes: of the samples.
        fields: whether samples have each of `OPTIONAL_FIELDS`.
        group_names: of the groups, in the order of `dataset_index`.
    """

    shapes: DemonstrationShapes
    fields: dict[str, bool]
    group_names: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def place(self, number: int) -> str:
        """Origin of a sample for messages: `file:line`, or its number."""

    def __getitem__(self, number: int) -> Demonstration:
        return self.demonstration(number)

    def in_epoch(self, epoch: int) -> "DemonstrationSource":
        """The same source, with the draws of that epoch."""
        return self

    @abstractmethod
    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        """A sample; without history, past frames are black, and without subgoals absent, and they
        are not read.

        Raises:
            BadSampleError: the sample cannot be used; says `file:line: reason`.
        """

    @abstractmethod
    def check_history(self) -> None:
        """Refuse samples of which none can fill an observation, see `dataset.check_history`."""

    @abstractmethod
    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Real frames of the state `[at most F, S]`, real steps of the actions `[at most C, A]` or
        None, and the `dataset_index`. Reads no images.
        """


def chosen_fields(names: Sequence[str], shapes: DemonstrationShapes) -> dict[str, bool]:
    """Whether each optional field is among the names, which are checked."""
    if unknown := sorted(set(names) - set(OPTIONAL_FIELDS)):
        raise ValueError(
            f"fields {unknown} are not known; choose from {', '.join(OPTIONAL_FIELDS)}"
        )
    nameless = [camera for camera, goal in shapes.goals.items() if goal == camera]
    if "subgoal" in names and nameless:
        raise ValueError(
            f"cameras {nameless} can have no goal images: a goal is named after its camera, "
            "subgoal0 after camera0; rename them, or leave 'subgoal' out of the fields"
        )
    return {name: name in names for name in OPTIONAL_FIELDS}


def finished_sample(
    given: Mapping[str, Any], shapes: DemonstrationShapes, fields: Mapping[str, bool]
) -> Demonstration:
    """A sample from the entries of a moment, padded to the shapes.

    Args:
        given: `prompt`, `dataset_index`; `state` `[R, S]` of the newest frames, at most F, and per
            camera `[<= R, 3, H, W]`, absent if the sample lacks it; `actions` `[N, A]` of the first
            steps, if needed; optional fields, absent if missing or None. Further entries are
            ignored.
    """
    num_frames, num_real = shapes.n_obs_steps, len(given["state"])
    sample: Demonstration = {
        "state": _front_padded(np.asarray(given["state"], dtype=np.float32), num_frames),
        "obs_history_is_pad": np.arange(num_frames) < num_frames - num_real,
        "prompt": given["prompt"],
        "dataset_index": np.int64(given["dataset_index"]),
    }
    black = np.zeros((3, *shapes.image_size), dtype=np.float32)
    # `KeyError` for a camera that must be there.
    lacking = [name for name in shapes.cameras if shapes.empty_cameras and name not in given]
    for camera in shapes.cameras:
        frames = black[None] if camera in lacking else given[camera]
        sample[camera] = _front_padded(frames, num_frames)
        if shapes.empty_cameras:
            sample[f"{camera}_is_pad"] = np.bool_(camera in lacking)
    if shapes.chunk_size is not None:
        actions = np.asarray(given["actions"], dtype=np.float32)
        missing = shapes.chunk_size - len(actions)
        sample["actions"] = np.pad(actions, ((0, missing), (0, 0)), mode="edge")
        sample["action_is_pad"] = np.arange(shapes.chunk_size) >= len(actions)
    for name in OPTIONAL_TEXTS:
        if fields[name]:
            sample[name] = given.get(name) or ""
    for name, kind in NUMBER_TYPES.items():
        if fields[name]:
            value = given.get(name)
            sample[name] = kind(0 if value is None else value)
            sample[f"{name}_is_pad"] = np.bool_(value is None)
    if fields["subgoal"]:
        goals = {camera: given.get(goal) for camera, goal in shapes.goals.items()}
        # A camera that the sample has needs a goal.
        is_pad = any(goal is None and name not in lacking for name, goal in goals.items())
        is_pad = is_pad or all(goal is None for goal in goals.values())
        for camera, goal in goals.items():
            name = shapes.goals[camera]
            sample[name] = black if is_pad or goal is None else goal
            if shapes.empty_cameras:
                sample[f"{name}_is_pad"] = np.bool_(is_pad or goal is None)
        sample["subgoal_is_pad"] = np.bool_(is_pad)
    return sample


def _front_padded(frames: np.ndarray, num_frames: int) -> np.ndarray:
    return np.pad(frames, [(num_frames - len(frames), 0)] + [(0, 0)] * (frames.ndim - 1))


def collate_demonstrations(samples: Sequence[Demonstration]) -> dict[str, Any]:
    """A raw batch of samples of one source: texts as lists, arrays and numbers stacked."""
    return {
        name: [sample[name] for sample in samples]
        if isinstance(value, str)
        else np.stack([sample[name] for sample in samples])
        for name, value in sorted(samples[0].items())
    }


class Stream(IntEnum):
    """Purposes of random numbers."""

    DROPS = 0
    FLOW = 1
    CONTENT = 2
    MIXTURE = 3
    MOMENT = 4
    SPLIT = 5
    IMAGES = 6


def sample_rng(seed: int, stream: Stream, *place: int) -> np.random.Generator:
    """The random generator of one purpose and place: epoch and sample, or the like."""
    # A spawn key, since entropy [seed, epoch] equals [seed, epoch, 0], which draws the sample
    # order.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, *place)))


@dataclass(frozen=True)
class FlowDraws:
    """Draws noise, time and delay of a sample for the flow loss, see the policy's configuration."""

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
    """What to drop from a sample; the response only if it keeps its goal images."""

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


def drop_fields(sample: Demonstration, drops: Drops) -> Demonstration:
    """The sample, read without a dropped past and goals, with all dropped fields marked as absent;
    entries and shapes stay."""
    sample = dict(sample)
    has_goal = "subgoal_is_pad" in sample and not sample["subgoal_is_pad"]
    if drops.history:
        sample["obs_history_is_pad"] = np.ones_like(sample["obs_history_is_pad"])
    if has_goal and drops.response and "response" in sample:
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
    """Samples of a source with the drops, image changes and flow draws of one epoch.

    For evaluation leave out `probabilities` and `transforms`: nothing is dropped or changed, and
    since every evaluation is epoch 0, its draws are always the same.

    Attributes:
        flow: draws for the flow loss; None for none, as for the planner.
    """

    source: DemonstrationSource
    probabilities: DropProbabilities = NO_DROPS
    flow: FlowDraws | None = None
    seed: int = 0
    epoch: int = 0
    transforms: ImageTransforms | None = None

    def in_epoch(self, epoch: int) -> "DrawnDemonstrations":
        return replace(self, epoch=epoch, source=self.source.in_epoch(epoch))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Demonstration:
        place = (self.epoch, number)
        drops = draw_drops(self.probabilities, sample_rng(self.seed, Stream.DROPS, *place))
        sample = self.source.demonstration(
            number, with_history=not drops.history, with_subgoals=not drops.subgoal
        )
        sample = drop_fields(sample, drops)
        if self.transforms is not None:
            from paddle_vl.families.policy.image_transforms import transformed

            rng = sample_rng(self.seed, Stream.IMAGES, *place)
            sample = transformed(sample, self.shapes.cameras, self.transforms, rng)
        if self.flow is not None:
            sample |= self.flow.draw(sample_rng(self.seed, Stream.FLOW, *place))
        return sample

    files, contents = _of_source("files"), _of_source("contents")
    shapes, fields = _of_source("shapes"), _of_source("fields")
    group_names, place = _of_source("group_names"), _of_source("place")
    on_bad_sample, skipped = _of_source("on_bad_sample"), _of_source("skipped")
    fingerprint = _of_source("fingerprint")
    positions_fingerprint = _of_source("positions_fingerprint")
