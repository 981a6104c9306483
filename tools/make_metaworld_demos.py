"""Record Meta-World's scripted experts as a LeRobot 3.0 dataset, with tokenizers for a policy that
is trained from scratch.

Names, prompts and camera are lerobot's; an action is held for four steps of the simulator, so the
data have 20 Hz, and images are small and without shadows: see paddle_vl/simulation/metaworld.py.
Needs `pip install 'paddle-vl[sim]'` and the Debian package libosmesa6.
"""

import argparse
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from make_demonstrations import fit_tokenizers
from paddle_vl.data.lerobot.statistics import QUANTILES, image_statistics
from paddle_vl.simulation.environment import FIRST_UNSEEN_SEED
from paddle_vl.simulation.metaworld import (
    ACTION_NAMES,
    CAMERA,
    CAMERA_PLACE,
    FPS,
    STATE_NAMES,
    STEPS_PER_ACTION,
    MetaWorld,
)

_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
# Columns besides images, with their types in info.json and their number of values.
_COLUMNS = {
    "observation.state": ("float32", len(STATE_NAMES)),
    "action": ("float32", len(ACTION_NAMES)),
    "next.success": ("bool", 1),
    "timestamp": ("float32", 1),
    "frame_index": ("int64", 1),
    "episode_index": ("int64", 1),
    "index": ("int64", 1),
    "task_index": ("int64", 1),
}
# Of a pixel; lerobot's statistics of images are in 0..1.
_LEVELS = np.arange(256) / 255
_NAMES = {"observation.state": list(STATE_NAMES), "action": list(ACTION_NAMES)}


class Recording(NamedTuple):
    """An episode of an expert: N images `[H, W, 3]` uint8, N states, actions and successes."""

    prompt: str
    seed: int
    images: list[np.ndarray]
    states: np.ndarray
    actions: np.ndarray
    is_success: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where to write; must not exist")
    parser.add_argument("--tasks", nargs="+", default=["reach-v3"], metavar="TASK")
    parser.add_argument("--episodes", type=int, default=300, help="of each task")
    parser.add_argument("--first-seed", type=int, default=0, help="of each task's episodes")
    parser.add_argument("--image-size", type=int, default=64, help="side in pixels")
    parser.add_argument(
        "--action-noise", type=float, default=1.0,
        help="standard deviation of what is added to an executed movement, not to the recorded "
        "one; without it a hand's place tells where its straight way leads, and a policy learns to "
        "follow that instead of the image",
    )  # fmt: skip
    parser.add_argument("--hide-goal", action="store_true", help="leave the goal's marks out")
    parser.add_argument("--black-images", action="store_true", help="for a control without images")
    parser.add_argument("--chunk-size", type=int, default=8, help="of the action tokenizer")
    parser.add_argument("--vocab-size", type=int, default=320, help="of the prompts")
    parser.add_argument("--action-vocab-size", type=int, default=256, help="of discrete actions")
    given = parser.parse_args()
    if given.directory.exists():
        parser.error(f"{given.directory} exists: name a new folder")
    warnings.filterwarnings("ignore", module="metaworld")
    writer = DatasetWriter(given.directory, given.image_size)
    chunks = []
    for task in given.tasks:
        environment = MetaWorld(task, given.image_size, given.hide_goal)
        for recording in record(environment, given.episodes, given.first_seed, given.action_noise):
            if given.black_images:
                recording = recording._replace(images=[0 * image for image in recording.images])
            writer.add(recording)
            chunks += chunks_of(recording.actions, given.chunk_size)
        environment.close()
        print(f"{task}: {given.episodes} episodes, {writer.num_frames} frames until here")
    keys = ("tasks", "action_noise", "hide_goal", "black_images")
    writer.finish({key: getattr(given, key) for key in keys})
    sizes = given.vocab_size, given.action_vocab_size
    fit_tokenizers(writer.tasks, np.stack(chunks), given.directory / "processor", *sizes)
    print(f"the dataset is in {given.directory}, tokenizers are in its folder processor")


def record(
    environment: MetaWorld, num_episodes: int, first_seed: int, noise: float
) -> Iterator[Recording]:
    """Episodes in which the expert succeeds, of the seeds from the first one on.

    Raises:
        ValueError: the seeds reach those of evaluations, or the expert fails in most episodes.
    """
    found, seed = 0, first_seed
    while found < num_episodes:
        if seed >= FIRST_UNSEEN_SEED or seed - first_seed > 2 * num_episodes + 10:
            raise ValueError(
                f"{environment.task}: {found} of {seed - first_seed} episodes succeeded until seed "
                f"{seed}; seeds from {FIRST_UNSEEN_SEED} on are for evaluations: choose another "
                "first seed, or less noise"
            )
        recording = _recorded(environment, seed, noise)
        if recording.is_success[-1]:
            found += 1
            yield recording
        seed += 1


def _recorded(environment: MetaWorld, seed: int, noise: float) -> Recording:
    rng = np.random.default_rng(seed)
    observation, seen, actions, successes, is_over = environment.reset(seed), [], [], [], False
    while not is_over:
        seen.append(observation)
        actions.append(environment.expert_action())
        # The gripper's effort stays as it is.
        disturbance = noise * rng.standard_normal(len(ACTION_NAMES)) * (1, 1, 1, 0)
        observation, is_success, is_over, _ = environment.step(actions[-1] + disturbance)
        successes.append(is_success)
    images, states = [each.image for each in seen], np.stack([each.state for each in seen])
    return Recording(
        environment.prompt, seed, images, states, np.stack(actions), np.array(successes)
    )


def chunks_of(actions_NA: np.ndarray, size: int) -> list[np.ndarray]:
    """The chunk from each step on, `[size, A]`; the last action repeats behind the end."""
    padded = np.pad(actions_NA, ((0, size - 1), (0, 0)), mode="edge")
    return [padded[first : first + size] for first in range(len(actions_NA))]


class DatasetWriter:
    """Writes a LeRobot 3.0 dataset, an episode at a time, with images in its one Parquet file.

    Attributes:
        tasks: sentences in the order of `task_index`.
    """

    def __init__(self, folder: Path, image_size: int):
        self.folder, self.tasks, self.num_frames = folder, [], 0
        self._episodes: list[dict[str, Any]] = []
        self._seeds: list[int] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        # Of images: per episode the number of pixels of each value, `[3, 256]`.
        self._histograms: list[np.ndarray] = []
        self._shape = [image_size, image_size, 3]
        self._file: Any = None

    def add(self, recording: Recording) -> None:
        """Append an episode."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if recording.prompt not in self.tasks:
            self.tasks.append(recording.prompt)
        count, number = len(recording.images), len(self._episodes)
        frames = np.arange(count)
        columns = {
            "observation.state": recording.states,
            "action": recording.actions,
            "next.success": recording.is_success,
            "timestamp": (frames / FPS).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(count, number),
            "index": self.num_frames + frames,
            "task_index": np.full(count, self.tasks.index(recording.prompt)),
        }
        images = [
            {"bytes": _png(image), "path": f"frame-{frame:06d}.png"}
            for frame, image in enumerate(recording.images)
        ]
        arrays = {"observation.image": pa.array(images)} | {
            name: pa.array(values)
            if values.ndim == 1
            else pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
            for name, values in columns.items()
        }
        table = pa.table(arrays).replace_schema_metadata(
            {"huggingface": json.dumps(_hf_features())}
        )
        if self._file is None:
            path = self.folder / _DATA.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True)
            self._file = pq.ParquetWriter(path, table.schema)
        self._file.write_table(table)
        pixels = np.stack(recording.images).reshape(-1, 3)
        self._histograms.append(
            np.stack([np.bincount(channel, minlength=256) for channel in pixels.T])
        )
        for name, values in columns.items():
            self._columns[name].append(values)
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": [recording.prompt],
                "length": count,
                "data/chunk_index": 0,
                "data/file_index": 0,
                "dataset_from_index": self.num_frames,
                "dataset_to_index": self.num_frames + count,
                **{
                    f"stats/{feature}/{name}": value
                    for feature, found in self._statistics(slice(number, None), count).items()
                    for name, value in found.items()
                },
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self._seeds.append(recording.seed)
        self.num_frames += count

    def finish(self, origin: dict[str, Any]) -> None:
        """Write what the folder meta has; `origin` goes into its metaworld.json."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file.close()
        meta = self.folder / "meta"
        (self.folder / _EPISODES).parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), self.folder / _EPISODES)
        # pandas makes the sentences the index, as lerobot expects.
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": kind}
            for name, kind in (("task_index", "int64"), ("task", "unicode"))
        ]
        index = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
        tasks = pa.table({"task_index": list(range(len(self.tasks))), "task": self.tasks})
        pq.write_table(
            tasks.replace_schema_metadata({"pandas": json.dumps(index)}), meta / "tasks.parquet"
        )
        image = {"dtype": "image", "shape": self._shape, "names": ["height", "width", "channels"]}
        vectors = {
            name: {"dtype": kind, "shape": [size], "names": _NAMES.get(name)}
            for name, (kind, size) in _COLUMNS.items()
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": "metaworld_sawyer",
            "total_episodes": len(self._episodes),
            "total_frames": self.num_frames,
            "total_tasks": len(self.tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": FPS,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": _DATA,
            "video_path": None,
            "features": {"observation.image": image} | vectors,
        }
        origin |= {
            "seeds": self._seeds,
            "camera": CAMERA,
            "camera_place": CAMERA_PLACE,
            "steps_per_action": STEPS_PER_ACTION,
        }
        statistics = self._statistics(slice(None), self.num_frames)
        for name, values in (("info", info), ("stats", statistics), ("metaworld", origin)):
            (meta / f"{name}.json").write_text(json.dumps(values, indent=4) + "\n")

    def _statistics(self, episodes: slice, count: int) -> dict[str, dict[str, Any]]:
        """Statistics of every feature over some episodes; quantiles are those of all values."""
        found = {
            name: _of_values(np.concatenate(values[episodes]).reshape(count, -1))
            for name, values in self._columns.items()
        }
        of_images = image_statistics(np.sum(self._histograms[episodes], 0), _LEVELS, count)
        return found | {"observation.image": {stat: v.tolist() for stat, v in of_images.items()}}


def _of_values(values_NS: np.ndarray) -> dict[str, list]:
    values = values_NS.astype(np.float64)
    low, high = values_NS.min(axis=0), values_NS.max(axis=0)
    found = {"min": low, "max": high, "mean": values.mean(axis=0), "std": values.std(axis=0)}
    found |= {name: np.quantile(values, share, axis=0) for name, share in QUANTILES.items()}
    return {name: value.tolist() for name, value in found.items()} | {"count": [len(values)]}


def _png(image_HWC: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image_HWC).save(data, format="PNG")
    return data.getvalue()


def _hf_features() -> dict[str, Any]:
    """The features as Hugging Face's `datasets` keeps them in a Parquet file."""
    found: dict[str, Any] = {"observation.image": {"_type": "Image"}}
    for name, (kind, size) in _COLUMNS.items():
        one = {"dtype": kind, "_type": "Value"}
        found[name] = one if size == 1 else {"feature": one, "length": size, "_type": "List"}
    return {"info": {"features": found}}


if __name__ == "__main__":
    main()
