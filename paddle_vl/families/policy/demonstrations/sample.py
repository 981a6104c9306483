"""One demonstration, a moment of an episode: its entries and shapes, and batches of them.

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
Drawn for training, see `training_set.py`:
    `noise` `[C, max_action_dim]` float32; `time` float32; `delay` int64.

Values are raw; the policy normalizes them. The configuration, not the samples, determines the
fields of a source, so every rank and every batch has the same entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paddle_vl.data.worker_pool import SampleSource

Demonstration = dict[str, Any]

# Numbers of the metadata with their types.
NUMBER_TYPES: Mapping[str, type] = {
    "speed": np.int64,
    "quality": np.int64,
    "mistake": np.bool_,
    "fps": np.int64,
}
OPTIONAL_TEXTS = ("response", "robot_type", "control_mode", "past_memory", "next_memory")
METADATA = (*NUMBER_TYPES, "robot_type", "control_mode")
OPTIONAL_FIELDS = (*OPTIONAL_TEXTS, *NUMBER_TYPES, "subgoal")


@dataclass(frozen=True)
class DemonstrationShapes:
    """Cameras and sizes that a policy needs, from its configuration.

    Attributes:
        cameras: names of the cameras.
        image_size: (height, width) of images, `resize_imgs_with_padding`.
        state_dim: S.
        n_obs_steps: F.
        chunk_size, action_dim: C and A; None if no actions are needed, as for the planner.
        history_interval: steps of the data between two frames of an observation.
        empty_cameras: most cameras that a sample may lack.
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

    def __post_init__(self):
        """Check the numbers.

        Raises:
            ValueError: names what is wrong.
        """
        object.__setattr__(self, "cameras", tuple(self.cameras))
        object.__setattr__(self, "image_size", tuple(self.image_size))
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise ValueError(f"cameras are {list(self.cameras)}; at least one is needed, each once")
        if (self.chunk_size is None) != (self.action_dim is None):
            raise ValueError(
                f"chunk_size is {self.chunk_size} and action_dim {self.action_dim}; give both, or "
                "None for both where no actions are read"
            )
        numbers = (*self.image_size, self.state_dim, self.n_obs_steps, *self.action_shape)
        if min(*numbers, self.history_interval) < 1 or self.empty_cameras < 0:
            raise ValueError(
                f"{self}, history_interval={self.history_interval}, "
                f"empty_cameras={self.empty_cameras}: sizes must be at least 1, empty_cameras 0"
            )

    @property
    def action_shape(self) -> tuple[int, ...]:
        """`(C, A)`, or empty without actions."""
        if self.chunk_size is None or self.action_dim is None:
            return ()
        return (self.chunk_size, self.action_dim)

    @property
    def history_length(self) -> int:
        """Consecutive steps of the data that one observation reaches over, the current included."""
        return (self.n_obs_steps - 1) * self.history_interval + 1

    def observed(self, num_steps: int) -> slice:
        """The frames of an observation among `num_steps` consecutive steps, the last the current.

        They are `history_interval` steps apart and end with the current one; at most `n_obs_steps`,
        fewer if the steps do not reach back far enough.

        Example: 6 steps with `n_obs_steps` 4 and `history_interval` 2 give the steps 1, 3 and 5;
        the frame at step -1 lies before the episode.

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


class DemonstrationSource(SampleSource, Protocol):
    """A source of demonstrations: files or a formula.

    Attributes:
        shapes: of the samples.
        fields: whether samples have each of `OPTIONAL_FIELDS`.
        group_names: of the groups, in the order of `dataset_index`.
        files: of the samples; none for a formula.
        contents, positions_fingerprint: see `paddle_vl.data.worker_pool.SampleSource`; no contents
            of a formula.
    """

    @property
    def shapes(self) -> DemonstrationShapes: ...

    @property
    def fields(self) -> Mapping[str, bool]: ...

    @property
    def group_names(self) -> tuple[str, ...]: ...

    def place(self, number: int) -> str:
        """Origin of a sample for messages: `file:line`, or its number."""
        ...

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        """A sample; without history or subgoals, these may be absent from it.

        Raises:
            BadSampleError: the sample cannot be used; says `file:line: reason`.
        """
        ...

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Real frames of the state `[at most F, S]`, real steps of the actions `[at most C, A]` or
        None, and the `dataset_index`. Reads no images.
        """
        ...


def chosen_fields(names: Sequence[str], shapes: DemonstrationShapes) -> dict[str, bool]:
    """Whether each optional field is among the names.

    Raises:
        ValueError: an unknown name, or goal images for cameras not named `camera...`.
    """
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
    """A raw batch: texts as lists, arrays and numbers stacked; without entries that are all None.

    Raises:
        RuntimeError: samples differ in entries, types or shapes. The samples of one source never
            do, those of joined sources may.
    """
    batch: dict[str, Any] = {}
    for name in sorted({name for sample in samples for name in sample}):
        values: list[Any] = [sample.get(name) for sample in samples]
        kinds = {_kind(value) for value in values}
        if len(kinds) > 1:
            raise RuntimeError(
                f"samples of one batch differ in {name!r}: {', '.join(sorted(kinds))}; sources "
                "that are joined need the same optional fields and shapes"
            )
        if isinstance(values[0], str):
            batch[name] = values
        elif values[0] is not None:
            batch[name] = np.stack(values)
    return batch


def _kind(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, str):
        return "text"
    return f"{value.dtype} {list(value.shape)}"
