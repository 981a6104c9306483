"""Frames and windows of a LeRobot dataset, at random, with bounded memory.

    dataset = LeRobotDataset("pusht", episodes=[0, 3])
    frame = dataset[5]          # every feature of the sixth frame of episodes 0 and 3, and "task"
    window = dataset.window(5, {"action": [0.0, 0.05, 0.1], "observation.state": [-0.05, 0.0]})

Values are those of lerobot's `dataset[5]`, but images: uint8 `[height, width, 3]`. Depth maps are
float32 `[1, height, width]`. Frames are numbered over the chosen episodes; their `index` is that of
the whole dataset.

Reading needs the packages pyarrow, and for videos PyAV.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError, sample_at
from paddle_vl.data.lerobot.depth import VIDEO_FORM, DepthUnit, of_codes, of_image
from paddle_vl.data.lerobot.language import language_rows
from paddle_vl.data.lerobot.metadata import Episode, read_metadata
from paddle_vl.data.lerobot.tables import as_array, read_rows, version_of
from paddle_vl.data.lerobot.videos import read_frames
from paddle_vl.data.media_file import load_rgb

# As lerobot and OpenTau have it.
TOLERANCE_S = 1e-4


class LeRobotDataset:
    """The frames of a dataset's folder. It can be pickled; files are opened when they are needed.

    Attributes:
        metadata: what the folder says of itself.
        episodes: the chosen ones.
        fps: frames per second: `fps`, or what the dataset declares.
        tolerance_s: most seconds by which a timestamp may differ from its frame's time, but for
            the rounding of float32.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        episodes: Iterable[int] | None = None,
        excluded_episodes: Iterable[int] = (),
        fps: float | None = None,
        tolerance_s: float = TOLERANCE_S,
        skip_timestamp_check: bool = False,
        depth_unit: DepthUnit = "mm",
    ):
        """Open a dataset; only its `meta` is read, and in version 3.0 the lengths of its files.

        Args:
            episodes: numbers of the episodes to read; None for all.
            excluded_episodes: left out of them.
            fps: the true rate of a dataset that declares a wrong one.
            skip_timestamp_check: accept timestamps that do not follow one another at a rate.
            depth_unit: of depth maps.

        Raises:
            RuntimeError: it is no dataset, or its `meta` is damaged.
            ValueError: there are no such episodes, or none is left.
        """
        self.metadata = read_metadata(root)
        self.root, self.features = self.metadata.root, self.metadata.features
        numbers = {episode.number for episode in self.metadata.episodes}
        wanted, left_out = numbers if episodes is None else {*episodes}, {*excluded_episodes}
        if unknown := sorted((wanted | left_out) - numbers):
            raise ValueError(
                f"{self.root} has no episodes {unknown[:10]}: it has {len(numbers)}, from "
                f"{min(numbers)} to {max(numbers)}"
            )
        chosen = wanted - left_out
        self.episodes = [each for each in self.metadata.episodes if each.number in chosen]
        if not self.episodes:
            raise ValueError(f"{self.root}: no episode is left; choose others")
        self._starts = np.cumsum([0, *(episode.length for episode in self.episodes)])
        self.fps = self.metadata.fps if fps is None else fps
        self.tolerance_s, self._skips_check = tolerance_s, skip_timestamp_check
        self.depth_unit: DepthUnit = depth_unit
        self._numbers = tuple(name for name, f in self.features.items() if f.is_number)
        self._checked: set[int] = set()
        # A sample reads several features of one episode: the one that was read last is kept.
        self._last: tuple[Any, Any, dict[str, np.ndarray]] = None, None, {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, number: int) -> tuple[Episode, int]:
        """The episode of a frame, and the frame's number in it."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.root} has frames 0 to {len(self) - 1}, not {number}")
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.episodes[place], number - int(self._starts[place])

    def owners(self) -> np.ndarray:
        """Number of each frame's episode, int64."""
        lengths = np.diff(self._starts)
        return np.repeat([episode.number for episode in self.episodes], lengths)

    def first(self, place: int) -> int:
        """Number of the first frame of the episode at that place in `episodes`."""
        return int(self._starts[place])

    def place(self, number: int) -> str:
        """Where a frame lies, for messages: `folder: episode 3, frame 12`."""
        episode, row = self.locate(number)
        return f"{self.root}: episode {episode.number}, frame {row}"

    def at_place(self, number: int) -> AbstractContextManager[None]:
        """Add a frame's place to what is raised, see `sample_at`."""
        return sample_at(lambda: self.place(number))

    def __getitem__(self, number: int) -> dict[str, Any]:
        """All features of a frame, and its `task`.

        Raises:
            BadSampleError: it cannot be read; says `folder: episode, frame: reason`.
        """
        episode, row = self.locate(number)
        with self.at_place(number):
            item = {name: self.values(episode, name, [row])[0] for name in self.features}
            item["task"] = self.task(episode, row)
            return item

    def window(
        self, number: int, delta_timestamps: Mapping[str, Sequence[float]]
    ) -> dict[str, np.ndarray]:
        """Values of features around a frame, and which of them lie outside of its episode.

        Args:
            delta_timestamps: per feature seconds from the frame on, multiples of 1 / fps.

        Returns:
            Per feature `[times, ...]`, those outside repeated from the nearest frame inside, and
            under `<feature>_is_pad` `[times]` bool, True for these.

        Raises:
            ValueError: a time lies between frames.
            BadSampleError: as `__getitem__`.
        """
        episode, row = self.locate(number)
        found = {}
        for name, deltas in delta_timestamps.items():
            steps = np.rint(np.multiply(deltas, self.fps)).astype(np.int64)
            if (far := np.abs(steps / self.fps - deltas)).max(initial=0) > self.tolerance_s:
                raise ValueError(
                    f"delta_timestamps of {name!r}: {deltas[int(far.argmax())]} s is no multiple "
                    f"of 1/{self.fps:g} s, the time between frames"
                )
            rows = row + steps
            clipped = np.clip(rows, 0, episode.length - 1)
            with self.at_place(number):
                found[name] = np.stack([*self.values(episode, name, clipped)])
            found[f"{name}_is_pad"] = rows != clipped
        return found

    def task(self, episode: Episode, row: int) -> str:
        """The task of a frame.

        Raises:
            BadSampleError: its `task_index` is not in the dataset's tasks.
        """
        number = int(self.values(episode, "task_index", [row])[0])
        if number not in self.metadata.tasks:
            raise BadSampleError(
                "unknown_task",
                f"task_index is {number}; meta has tasks {sorted(self.metadata.tasks)[:10]}",
            )
        return self.metadata.tasks[number]

    def values(self, episode: Episode, name: str, rows: Sequence[int] | np.ndarray) -> Any:
        """Values of a feature at some frames of an episode: an array of numbers, otherwise a list.

        Raises:
            BadSampleError: they cannot be read.
        """
        feature = self.features[name]
        if feature.dtype == "video":
            return self._frames(episode, name, rows)
        if feature.is_number:
            return self._column(episode, name)[np.asarray(rows)]
        # Images are large, and few of them are needed.
        read = [self._read(episode, (name,), int(row), 1)[name][0].as_py() for row in rows]
        if feature.dtype == "language":
            return [language_rows(value) for value in read]
        if feature.dtype == "image":
            return [self._image(name, value) for value in read]
        return read

    def _column(self, episode: Episode, name: str) -> np.ndarray:
        """A feature of numbers of an episode, which is checked once. Not to be written to."""
        key = episode.number, version_of(self.root / episode.file)
        last, table, arrays = self._last
        if last != key:
            table, arrays = self._read(episode, self._numbers, 0, episode.length), {}
            if episode.number not in self._checked:
                self._check(episode, table)
                self._checked.add(episode.number)
            self._last = key, table, arrays
        if name not in arrays:
            arrays[name] = as_array(table[name], self.features[name].shape)
        return arrays[name]

    def _read(self, episode: Episode, columns: tuple[str, ...], row: int, count: int) -> Any:
        return read_rows(self.root / episode.file, columns, episode.first_row + row, count)

    def _check(self, episode: Episode, table: Any) -> None:
        """Refuse rows of another episode, and timestamps that contradict the rate."""
        own = np.arange(episode.length)
        for name, wanted in (("episode_index", episode.number), ("frame_index", own)):
            found = table[name].to_numpy()
            if len(wrong := np.flatnonzero(found != wanted)):
                raise BadSampleError(
                    "wrong_rows",
                    f"{episode.file} has {name} {found[wrong[0]]} in row "
                    f"{episode.first_row + wrong[0]}, where frame {wrong[0]} of episode "
                    f"{episode.number} must be: fetch or convert the dataset again",
                )
        if self._skips_check:
            return
        stamps = table["timestamp"].to_numpy().astype(np.float64)
        steps = np.diff(stamps)
        # Timestamps follow the declared rate where only that is wrong, or the true one.
        rates = {self.metadata.fps, self.fps}
        far = np.min([np.abs(steps - 1 / rate) for rate in rates], axis=0)
        allowed: Any = self.tolerance_s
        if np.array_equal(single := stamps.astype(np.float32), stamps):
            # Both stamps of a step are rounded, after 1,024 s to 0.12 ms.
            allowed = allowed + np.minimum(np.spacing(np.abs(single[1:])), 0.5 / max(rates))
        if len(wrong := np.flatnonzero(~(far <= allowed))):
            named = " or ".join(f"{rate:g}" for rate in sorted(rates))
            raise BadSampleError(
                "frame_time",
                f"{episode.file}: frame {wrong[0] + 1} of episode {episode.number} comes "
                f"{steps[wrong[0]]:g} s after the one before, which contradicts {named} frames per "
                f"second (tolerance_s {self.tolerance_s:g}): set fps to the true rate, or "
                "skip_timestamp_check",
            )

    def _frames(
        self, episode: Episode, name: str, rows: Sequence[int] | np.ndarray
    ) -> list[np.ndarray]:
        file, start = episode.videos[name]
        stamps = self._column(episode, "timestamp")[np.asarray(rows)]
        times = [start + float(stamp) for stamp in stamps]
        info, is_depth = self.features[name].info, self.features[name].is_depth
        form = VIDEO_FORM if is_depth else "rgb24"
        frames = read_frames(self.root / file, times, self.tolerance_s, form)
        if not is_depth:
            return frames
        return [of_codes(frame, info, self.depth_unit)[None] for frame in frames]

    def _image(self, name: str, stored: Mapping[str, Any] | None) -> np.ndarray:
        content = (stored or {}).get("bytes")
        if content is None:
            raise BadSampleError("missing_image", f"{name!r} has no image in this row")
        feature = self.features[name]
        if feature.is_depth:
            return of_image(content, feature.info, self.depth_unit)[None]
        try:
            return np.asarray(load_rgb(content))
        except BadSampleError as error:
            raise BadSampleError(error.kind, f"{name!r}: {error.reason}") from error

    def file_sizes(self) -> dict[str, int]:
        """Bytes of every file of the chosen episodes; 0 for those that do not exist."""
        files = sorted({file for episode in self.episodes for file in episode.files})
        paths = {file: self.root / file for file in files}
        return {f: path.stat().st_size if path.is_file() else 0 for f, path in paths.items()}
