"""One LeRobot dataset as moments of demonstrations.

A frame of the dataset is a moment: its past is read `history_interval` steps back at a time, its
chunk ahead, at the rate of the mixture. Between two frames of the dataset lies the nearer of them,
or a blend of both. A ValueError names a dataset or feature that does not fit; a BadSampleError says
`folder: episode, frame: reason` of a moment that cannot be read.

Source: OpenTau's datasets, with their optional columns (`response`, `memory`, `mistake`), entries
of episodes (`quality`, `segments`, `success`) and speed percentiles; and the language columns of
LeRobot 0.6. Differs: past frames from before the episode are zeros, as everywhere here; `mistake`
does not follow from the mean in an episode's statistics of `success`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot.dataset import LeRobotDataset
from paddle_vl.data.lerobot.language import PERSISTENT, active_row
from paddle_vl.data.lerobot.metadata import Episode, lines
from paddle_vl.data.lerobot.statistics import FeatureStatistics, read_statistics, statistics
from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.policy.images import letterbox
from paddle_vl.families.policy.model_inputs import metadata_problem
from paddle_vl.families.policy.normalize import group_name
from paddle_vl.families.policy.robot_settings import DatasetMixtureConfig, RobotDatasetConfig
from paddle_vl.files.hub import local_folder
from paddle_vl.files.names import nearest

# Columns of standard names, where a dataset has them; cameras follow its own order.
_DEFAULTS = {
    "state": "observation.state", "actions": "action", "prompt": "task", "response": "response",
    "memory": "memory", "mistake": "mistake", "success": "success",
}  # fmt: skip
_IDENTITY = ("robot_type", "control_mode")
_GOAL_S = 4.0
# Of positions between frames.
_ROUNDING = 1e-6
_PERCENTILES = (5, 15, 25, 35, 45, 55, 65, 75, 85, 95)
# Of episodes whose task has no ten lengths to compare with.
_MIDDLE_SPEED = 50


class RobotDataset:
    """Moments of one dataset. It can be pickled.

    Attributes:
        data: the dataset.
        columns: its columns by standard name.
        robot_type, control_mode: empty if unknown.
        step: frames of the dataset from one step of the policy to the next, a fraction.
    """

    def __init__(
        self, config: RobotDatasetConfig, mixture: DatasetMixtureConfig, shapes: DemonstrationShapes
    ):
        """Open the dataset and check that it has what the policy reads."""
        self.config, self.mixture, self.shapes = config, mixture, shapes
        root = config.root
        if root is None:
            assert config.repo_id is not None, "RobotDatasetConfig demands one of them"
            root = local_folder(config.repo_id, revision=config.revision, kind="dataset")
        self.data = LeRobotDataset(
            root,
            episodes=config.episodes,
            excluded_episodes=config.excluded_episodes,
            fps=config.fps,
            tolerance_s=mixture.setting(config, "tolerance_s"),
            skip_timestamp_check=mixture.setting(config, "skip_timestamp_check"),
        )
        stated = {"control_mode": "unknown", **self.data.metadata.info}
        self.robot_type, self.control_mode = (
            (stated.get(name) or "") if getattr(config, name) is None else getattr(config, name)
            for name in _IDENTITY
        )
        demands = mixture.require_non_empty_robot_type, mixture.require_non_empty_control_mode
        for name, is_demanded in zip(_IDENTITY, demands, strict=True):
            found = getattr(self, name)
            if is_demanded and found in ("", "unknown"):
                raise ValueError(f"{root} has {name} {found!r}: set {name} of this dataset")
        self.step = self.data.fps / (mixture.action_freq or self.data.fps)
        self.columns = self._columns()
        self.is_delta = config.use_delta_joint_actions
        deltas = config.delta_action_state_map
        self._check_dims("state", config.state_index, deltas.values(), shapes.state_dim)
        if shapes.chunk_size is not None:
            self._check_dims("actions", config.action_index, deltas, shapes.action_dim)

    @property
    def group(self) -> str:
        """Name of the group of data: robot type and control mode, or the dataset's."""
        return group_name(self.robot_type, self.control_mode) or self.config.label

    @property
    def longest_history(self) -> int:
        """Steps of the policy in the longest episode."""
        frames = max(episode.length for episode in self.data.episodes)
        return int((frames - 1) / self.step + _ROUNDING) + 1

    def fields(self) -> set[str]:
        """The optional fields that its moments have."""
        features, extra = self.data.features, self._entries()
        found = {"speed", "subgoal", *(name for name in _IDENTITY if getattr(self, name))}
        has_language = PERSISTENT in features
        if "response" in self.columns or has_language:
            found.add("response")
        if "memory" in self.columns or has_language:
            found |= {"past_memory", "next_memory"}
        if {"mistake", "success"} & self.columns.keys() or "success" in extra:
            found.add("mistake")
        if "quality" in extra:
            found.add("quality")
        if self.mixture.emit_fps:
            found.add("fps")
        return found

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Real frames of the state `[at most F, S]` float32, and real steps of the actions
        `[at most C, A]` or None.
        """
        episode, row = self.data.locate(number)
        is_linear = self.mixture.vector_resample_strategy == "linear"
        states = self._vectors(episode, "state", self._past(row), is_linear)
        actions = None
        if self.shapes.chunk_size is not None:
            ahead = row + np.arange(self.shapes.chunk_size) * self.step
            ahead = np.minimum(ahead[ahead < episode.length - _ROUNDING], episode.length - 1)
            actions = self._vectors(episode, "actions", ahead, is_linear)
            for dim, other in self.config.delta_action_state_map.items():
                actions[:, dim] -= states[-1, other]
            actions = actions[:, self.config.action_index or slice(None)]
        return states[:, self.config.state_index or slice(None)], actions

    def moment(
        self, number: int, names: set[str], rng: np.random.Generator, *,
        substitutes: bool, with_history: bool, with_subgoals: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Entries of a moment, as `finished_sample` takes them.

        Args:
            names: the optional fields to read.
            rng: draws the goal frame, then the text of the prompt.
            substitutes: replace prompts by the dataset's `prompt_substitutions`.
        """
        episode, row = self.data.locate(number)
        goal, draw = self._goal(episode, row, rng), rng.random()
        with self.data.at_place(number):
            state, actions = self.motion(number)
            given: dict[str, Any] = {"state": state, "prompt": self._prompt(episode, row)}
            if actions is not None:
                given["actions"] = actions
            if substitutes and (texts := self.config.prompt_substitutions.get(given["prompt"])):
                given["prompt"] = texts[int(draw * len(texts))]
            past = self._past(row)[0 if with_history else -1 :]
            for camera in self.shapes.cameras:
                if (column := self.columns.get(camera)) is not None:
                    given[camera] = self._images(episode, column, past)
                    if with_subgoals and "subgoal" in names:
                        image = self._images(episode, column, np.array([float(goal)]))
                        given[self.shapes.goals[camera]] = image[0]
            given |= {name: self._word(name, episode, row) for name in names - {"subgoal"}}
            for name in ("speed", "quality"):
                problem = None if given.get(name) is None else metadata_problem(name, given[name])
                if problem is not None:
                    raise BadSampleError("out_of_range", problem)
        return given

    def statistics(self) -> dict[str, FeatureStatistics]:
        """Of `state` and `actions` as samples have them, but differences to the state."""
        file = self.config.stats
        found = statistics(self.data.metadata) if file is None else read_statistics(Path(file))
        chosen = {"state": self.config.state_index, "actions": self.config.action_index}
        if self.shapes.chunk_size is None or self.is_delta:
            del chosen["actions"]
        result = {}
        for name, index in chosen.items():
            if (column := self.columns[name]) not in found:
                raise ValueError(
                    f"{self.data.root} has no statistics of {column!r}: compute them with "
                    f"paddle-vl compute-stats {self.data.root}"
                )
            result[name] = {
                stat: values if stat == "count" or index is None else values[index]
                for stat, values in found[column].items()
            }
        return result

    def _entries(self) -> set[str]:
        """Names of the further entries that any episode has."""
        return set().union(*(episode.extra for episode in self.data.episodes))

    def _columns(self) -> dict[str, str]:
        features, root = self.data.features, self.data.root
        given = self.config.data_features_name_mapping
        cameras = dict(zip(self.shapes.cameras, self.data.metadata.cameras, strict=False))
        if any(name.startswith("camera") for name in given):
            cameras = {}
        for name, column in given.items():
            if name not in _DEFAULTS and not name.startswith("camera"):
                raise ValueError(
                    f"data_features_name_mapping of {root} has {name!r}, which is no standard "
                    f"name; {nearest(name, [*_DEFAULTS, *self.shapes.cameras])}"
                )
            others = {"prompt": ["task"], "success": self._entries()}.get(name, ())
            if column not in features and column not in others:
                raise ValueError(
                    f"data_features_name_mapping of {root} maps {name!r} to {column!r}, which it "
                    f"has not; {nearest(column, features)}"
                )
            if name.startswith("camera") and column not in self.data.metadata.cameras:
                raise ValueError(
                    f"{column!r} of {root}, which is mapped to {name!r}, holds no colour images"
                )
        found = {n: column for n, column in _DEFAULTS.items() if column in features} | cameras
        found |= given
        needed = ["state"] if self.shapes.chunk_size is None else ["state", "actions"]
        absent = [name for name in needed if name not in found]
        lacking = [name for name in self.shapes.cameras if name not in found]
        if len(lacking) > min(self.shapes.empty_cameras, len(self.shapes.cameras) - 1):
            absent += lacking
        if absent:
            raise ValueError(
                f"{root} has no column for {', '.join(absent)} (it has {', '.join(features)}): "
                "name them in data_features_name_mapping, or for cameras set "
                f"model.policy.empty_cameras, which is {self.shapes.empty_cameras}"
            )
        return found

    def _check_dims(
        self, name: str, index: list[int] | None, deltas: Iterable[int], wanted: int | None
    ) -> None:
        column, used = self.columns[name], [*(index or ()), *deltas]
        shape = self.data.features[column].shape
        if len(shape) != 1 or not all(0 <= dim < shape[0] for dim in used):
            raise ValueError(
                f"{column!r} of {self.data.root} has shape {list(shape)}, and dims {used} are "
                "wanted: a vector with these dims is needed"
            )
        if (found := len(index or range(shape[0]))) != wanted:
            setting = {"state": "state_index", "actions": "action_index"}[name]
            raise ValueError(
                f"{column!r} of {self.data.root} has {found} dims, the policy's {name} {wanted}: "
                f"choose dims with {setting}, or change the policy's features"
            )

    def _past(self, row: int) -> np.ndarray:
        """Positions of the real frames of an observation, the current one last."""
        back = np.arange(self.shapes.n_obs_steps)[::-1] * self.shapes.history_interval
        positions = row - back * self.step
        return np.maximum(positions[positions > -_ROUNDING], 0)

    def _vectors(
        self, episode: Episode, name: str, positions: np.ndarray, is_linear: bool
    ) -> np.ndarray:
        column = self.columns[name]

        def read(rows: np.ndarray) -> np.ndarray:
            values = np.asarray(self.data.values(episode, column, rows), dtype=np.float32)
            values = values.reshape([len(rows), -1])
            if len(wrong := np.argwhere(~np.isfinite(values))):
                at, dim = wrong[0]
                raise BadSampleError(
                    "not_finite",
                    f"{column!r} of frame {rows[at]}, dim {dim} is {values[at, dim]}: correct it, "
                    f"or leave episode {episode.number} out (excluded_episodes)",
                )
            return values

        return _between(read, positions, is_linear)

    def _images(self, episode: Episode, column: str, positions: np.ndarray) -> np.ndarray:
        """Frames `[positions, 3, H, W]` float32 in [0, 1], fitted into the image size."""

        def read(rows: np.ndarray) -> np.ndarray:
            pixels = np.stack(self.data.values(episode, column, rows)).astype(np.float32)
            return (pixels / np.float32(255)).transpose(0, 3, 1, 2)

        is_linear = self.mixture.image_resample_strategy == "linear"
        return letterbox(_between(read, positions, is_linear), self.shapes.image_size)

    def _value(self, episode: Episode, column: str, row: int) -> Any:
        return self.data.values(episode, column, [row])[0]

    def _prompt(self, episode: Episode, row: int) -> str:
        if (column := self.columns.get("prompt", "task")) != "task":
            return self._value(episode, column, row)
        return self.data.task(episode, row)

    def _word(self, name: str, episode: Episode, row: int) -> Any:
        """An optional field but the goal; None if it is absent."""
        if name in _IDENTITY:
            return getattr(self, name)
        if name == "fps":
            return int(self.mixture.action_freq or self.data.fps)
        if name == "speed":
            return self._speed(episode, row)
        if name == "quality":
            return episode.extra.get("quality")
        if name == "mistake":
            return self._mistake(episode, row)
        if name == "response":
            return self._text("response", "subtask", episode, row)
        if name == "past_memory":
            return self._text("memory", "memory", episode, row)
        following = min(row + 1, episode.length - 1)
        if "memory" in self.columns and (starts := episode.extra.get("segments")):
            following = _segment(starts, episode.length, following)[0]
        return self._text("memory", "memory", episode, following)

    def _text(self, name: str, style: str, episode: Episode, row: int) -> str | None:
        if (column := self.columns.get(name)) is not None:
            return self._value(episode, column, row)
        if PERSISTENT not in self.data.features:
            return None
        time = float(self._value(episode, "timestamp", row))
        found = active_row(self._value(episode, PERSISTENT, row), style, time)
        return None if found is None else found["content"]

    def _mistake(self, episode: Episode, row: int) -> bool | None:
        if (column := self.columns.get("mistake")) is not None:
            return bool(self._value(episode, column, row))
        column = self.columns.get("success", "success")
        if column in self.data.features:
            return not self._value(episode, column, row)
        success = episode.extra.get(column, episode.extra.get("success"))
        return None if success is None else not success

    def _goal(self, episode: Episode, row: int, rng: np.random.Generator) -> int:
        """Frame of the goal image."""
        is_end, place = rng.random() < self.mixture.subgoal_end_of_segment_prob, rng.random()
        ahead = row + round(_GOAL_S * self.data.fps)
        if not (starts := episode.extra.get("segments")):
            return min(ahead, episode.length - 1)
        last = _segment(starts, episode.length, row)[1] - 1
        return last if is_end else row + int(place * (min(ahead, last) - row + 1))

    def _speed(self, episode: Episode, row: int) -> int:
        limits = self._percentiles.get(int(self._value(episode, "task_index", row)))
        if limits is None:
            return _MIDDLE_SPEED
        return 10 * int(np.searchsorted(limits, episode.length, side="right"))

    @cached_property
    def _percentiles(self) -> Mapping[int, Any]:
        """Percentiles of the lengths of a task's episodes, by its number."""
        file = self.data.root / "meta" / "speed_percentiles.jsonl"
        if file.is_file():
            return {line["task_index"]: line["percentiles"] for line in lines(file)}
        numbers = {task: number for number, task in self.data.metadata.tasks.items()}
        lengths: dict[int, list[int]] = {}
        for episode in self.data.metadata.episodes:
            if episode.tasks and episode.tasks[0] in numbers:
                lengths.setdefault(numbers[episode.tasks[0]], []).append(episode.length)
        return {
            number: np.percentile(found, _PERCENTILES)
            if len({*found}) >= len(_PERCENTILES)
            else None
            for number, found in lengths.items()
        }


def _segment(starts: list[int], length: int, row: int) -> tuple[int, int]:
    """First frame of the segment that has a frame, and of the next."""
    ends = [*starts, length]
    place = int(np.searchsorted(starts, row, side="right"))
    return ends[place - 1], ends[place]


def _between(
    read: Callable[[np.ndarray], np.ndarray], positions: np.ndarray, is_linear: bool
) -> np.ndarray:
    """Values at positions between rows."""
    if not is_linear:
        return read(np.rint(positions).astype(np.int64))
    low = np.floor(positions).astype(np.int64)
    share = (positions - low).astype(np.float32)
    if not share.any():
        return read(low)
    values, above = read(low), read(np.ceil(positions).astype(np.int64))
    share = share.reshape([-1] + [1] * (values.ndim - 1))
    return values * (1 - share) + above * share
