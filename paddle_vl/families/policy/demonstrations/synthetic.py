"""Synthetic demonstrations: an arm moves to a mark whose position depends on its colour.

The images show the colour and the response names it, so a policy can learn the actions only from
the images or the response.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.jsonl import FileContent
from paddle_vl.families.policy.demonstrations.sample import (
    OPTIONAL_FIELDS,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
    Stream,
    chosen_fields,
    finished_sample,
    sample_rng,
)

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}
_PROMPTS = ("move to the mark", "reach the mark", "go where the mark tells")
# Samples of an episode, and how many of the last lack actions for a full chunk.
EPISODE_LENGTH = 12
_CUT_CHUNKS = 4
# Fraction of the distance that remains after each step.
_LEFT = 0.8
_BACKGROUND = 60


class _Episode(NamedTuple):
    """Constants of an episode. Vectors have max(S, A) values."""

    colour: str
    start: np.ndarray
    target: np.ndarray
    words: dict[str, Any]

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Positions of the arm after these numbers of steps, `[steps, max(S, A)]` float64."""
        left = _LEFT ** np.asarray(steps, dtype=np.float64)[:, None]
        return self.target + (self.start - self.target) * left


class SyntheticDemonstrations(DemonstrationSource):
    """A source of demonstrations without files (`data.synthetic_samples`)."""

    on_bad_sample = "fail"
    files: Sequence[Path] = ()
    contents: Sequence[FileContent] = ()

    def __init__(
        self,
        num_samples: int,
        shapes: DemonstrationShapes,
        fields: Sequence[str] = OPTIONAL_FIELDS,
        seed: int = 0,
        group_names: Sequence[str] = ("arm::joint",),
    ):
        """
        Args:
            fields: the optional fields of every sample; none is ever absent.
            group_names: `robot::control mode`; episodes take them in turn.
        """
        if wrong := [name for name in group_names if name.count("::") != 1] or not group_names:
            raise ValueError(f"groups are {wrong or 'none'}; name them 'robot::control mode'")
        self.num_samples, self.seed = num_samples, seed
        self.shapes, self.fields = shapes, chosen_fields(fields, shapes)
        self.group_names = tuple(group_names)
        self.skipped: Counter[str] = Counter()
        self._width = max(shapes.state_dim, shapes.action_dim or 0)
        rng = sample_rng(seed, Stream.CONTENT, 0)
        self._targets = rng.uniform(-1, 1, (len(COLOURS), shapes.state_dim))

    def __len__(self) -> int:
        return self.num_samples

    def place(self, number: int) -> str:
        return f"made-up demonstration {number}"

    def demonstration(
        self, number: int, *, with_history: bool = True, with_subgoals: bool = True
    ) -> Demonstration:
        episode, steps = self._episode(number), self._frames(number)
        given = episode.words | {"past_memory": episode.words["next_memory"]}
        if number % EPISODE_LENGTH == 0:
            given["past_memory"] = ""
        given |= dict(zip(("state", "actions", "dataset_index"), self.motion(number), strict=True))
        for index, camera in enumerate(self.shapes.cameras):
            places = episode.at(steps if with_history else steps[-1:])
            given[camera] = np.stack([self._picture(episode, p, index) for p in places])
        if with_subgoals:
            for index, goal in enumerate(self.shapes.goals.values()):
                given[goal] = self._picture(episode, episode.target, index)
        return finished_sample(given, self.shapes, self.fields)

    def motion(self, number: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        episode, steps = self._episode(number), self._frames(number)
        state = episode.at(steps)[:, : self.shapes.state_dim].astype(np.float32)
        actions = None
        if self.shapes.chunk_size is not None:
            chunk = self.shapes.chunk_size
            cut = max(0, number % EPISODE_LENGTH + 1 + _CUT_CHUNKS - EPISODE_LENGTH)
            ahead = episode.at(steps[-1] + 1 + np.arange(max(1, chunk - cut)))
            actions = ahead[:, : self.shapes.action_dim].astype(np.float32)
        return state, actions, number // EPISODE_LENGTH % len(self.group_names)

    @property
    def fingerprint(self) -> int:
        settings = [self.num_samples, self.seed, self.shapes, self.fields, self.group_names]
        if self.shapes.history_interval > 1:
            settings.append(self.shapes.history_interval)
        return zlib.crc32(repr(tuple(settings)).encode())

    def check_history(self) -> None:
        """Every observation begins with as many frames as there are."""

    def _frames(self, number: int) -> np.ndarray:
        """Steps of the frames of an observation; fewer than F at the beginning of the episode."""
        steps = np.arange(number % EPISODE_LENGTH + 1)
        return steps[self.shapes.observed(len(steps))]

    def _episode(self, number: int) -> _Episode:
        rng = sample_rng(self.seed, Stream.CONTENT, 1, number // EPISODE_LENGTH)
        colour = int(rng.integers(len(COLOURS)))
        # Actions with more values than states repeat them, so that states determine all.
        start, target = (
            np.resize(values, self._width)
            for values in (rng.uniform(-1, 1, self.shapes.state_dim), self._targets[colour])
        )
        # The numbers are drawn in the order of the words.
        words: dict[str, Any] = {
            "prompt": _PROMPTS[rng.integers(len(_PROMPTS))],
            "speed": int(rng.integers(11)) * 10,
            "quality": int(rng.integers(1, 6)),
            "mistake": bool(rng.random() < 0.2),
            "fps": 10,
        }
        name = list(COLOURS)[colour]
        group = self.group_names[number // EPISODE_LENGTH % len(self.group_names)]
        words["robot_type"], words["control_mode"] = group.split("::")
        words |= {"response": f"move to the {name} mark", "next_memory": f"saw {name}"}
        return _Episode(name, start, target, words)

    def _picture(self, episode: _Episode, place: np.ndarray, camera: int) -> np.ndarray:
        """A square of the mark's colour at the first two values; `[3, H, W]` float32 in [0, 1].

        Every second camera sees it mirrored. Values are multiples of 1/255, so PNG files keep them.
        """
        height, width = self.shapes.image_size
        side = max(1, min(height, width) // 3)
        pixels = np.full((height, width, 3), _BACKGROUND, dtype=np.uint8)
        down, right = np.clip((np.resize(place, 2) + 1) / 2, 0, 1)
        top, left = round(down * (height - side)), round(right * (width - side))
        pixels[top : top + side, left : left + side] = COLOURS[episode.colour]
        pixels = pixels[:, ::-1] if camera % 2 else pixels
        return (pixels.astype(np.float32) / np.float32(255)).transpose(2, 0, 1)
