"""A robot policy behind a server: observations of clients to the policy's batches, and to chunks.

Shapes: F frames of an observation, H x W pixels, S state dims, C steps of a chunk, A action dims.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.config.families import family_of_folder
from paddle_vl.export import load
from paddle_vl.families.policy.acting import ActingPolicy, ChunkInputs, ObservationHistory
from paddle_vl.families.policy.demonstrations.dataset import number_entry, number_rows
from paddle_vl.families.policy.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_TEXTS,
    Stream,
    sample_rng,
)
from paddle_vl.families.policy.images import cameras_of, letterbox
from paddle_vl.families.policy.normalize import text_of
from paddle_vl.serving.batching import ActorRequest
from paddle_vl.serving.msgpack_numpy import MOST_TEXT

# The others are the planner's.
_TEXTS = ("prompt", "dataset_repo_id", *(n for n in OPTIONAL_TEXTS if "memory" not in n))
# The actions that run while a chunk is computed, and how many they are.
PREFIX, DELAY = "prefix_action", "delay"
_INDEX, _HISTORY_IS_PAD = "dataset_index", "obs_history_is_pad"


def open_policy(folder: Path, runtime: str = "paddle") -> ActingPolicy:
    """A saved policy, or the programs of an export folder.

    Args:
        runtime: of an export folder, see `paddle_vl.export.load`.

    Raises:
        ValueError, RuntimeError: no policy, or a damaged one.
    """
    policy: Any
    if runtime != "paddle" or (folder / "export.json").is_file():
        policy = load(folder, runtime)  # pyright: ignore[reportArgumentType]
    else:
        policy = family_of_folder(folder).ask("act", folder)
    if not isinstance(policy, ActingPolicy):
        raise ValueError(f"{folder} has the programs of {type(policy).__name__}, which do not act")
    return policy


class _Item(NamedTuple):
    """Inputs of one sample, and noise `[1, C, max_action_dim]` float32."""

    inputs: ChunkInputs
    noise: np.ndarray


class PolicyActor:
    """Answers the requests of all clients with one policy.

    An observation has the entries of `paddle_vl.families.pi07.policy` without the B axis, and
    `prefix_action` `[at least delay, A]` with `delay`. Images are uint8 `[H, W, 3]` or floats from
    0 to 1, with the channels last or first, of any size; cameras, state and `obs_history_is_pad`
    may have several frames. Numbers such as `speed` need no `_is_pad`; a text may have any of the
    forms of `text_of`. Nested maps are flattened with "/".

    Args:
        usual_keys: gives the policy's names by the keys of this kind of clients, for its cameras.
        features: the clients' keys of some entries in place of the usual ones, by the policy's
            names.
        ignored: keys that are left out.
        values: entries of every observation that does not have them, by the policy's names.
        seed: of the noise.

    Raises:
        ValueError: `features` or `values` has a name that the policy does not read.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        usual_keys: Callable[[Sequence[str]], Mapping[str, str]],
        features: Mapping[str, str] | None = None,
        ignored: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        self.policy, self.config, self._seed = policy, policy.config, seed
        self._ignored, self._values, own_keys = ignored, dict(values or {}), features or {}
        inputs = self.config.input_features
        self.cameras, self.state_dim = cameras_of(inputs), inputs["state"].shape[0]
        self.action_dim = self.config.output_features["actions"].shape[0]
        goals = {name: name.replace("camera", "subgoal") for name in self.cameras}
        self._goals = {name: goal for name, goal in goals.items() if goal != name}
        names = ["state", *self.cameras, *self._goals.values(), *_TEXTS, *NUMBER_TYPES]
        names += [_INDEX, _HISTORY_IS_PAD, PREFIX, DELAY]
        if unknown := sorted({*own_keys, *self._values} - {*names}):
            raise ValueError(
                f"the policy reads no {', '.join(unknown)}; it reads {', '.join(names)}"
            )
        self._name_of = dict(usual_keys(self.cameras))
        self._name_of |= {name: name for name in names}
        for name, key in own_keys.items():
            others = {k: own for k, own in self._name_of.items() if own != name}
            self._name_of = others | {key: name}

    def description(self) -> dict[str, Any]:
        """What clients are told of the policy."""
        features = self.config.input_features
        return {
            "action_horizon": self.config.chunk_size,
            "action_dim": self.action_dim,
            "state_dim": self.state_dim,
            "cameras": {name: list(features[name].shape) for name in self.cameras},
            "n_obs_steps": self.config.n_obs_steps,
        }

    def extensions(self) -> dict[str, Any]:
        """What observations may have beyond the protocol: by name, its keys and limits."""
        most = self.config.max_delay
        return {"real_time_chunking": {"keys": [PREFIX, DELAY], "max_delay": most}} if most else {}

    def new_history(self) -> ObservationHistory | None:
        """For the past frames of an episode; None for a policy that sees the present only."""
        frames = self.config.n_obs_steps
        return None if frames == 1 else ObservationHistory(frames, self.config.history_interval)

    def observe(
        self, observation: Mapping[str, Any], history: ObservationHistory | None = None
    ) -> dict[str, Any]:
        """The batch of one that an observation is, kept in the history and with the frames before
        it; it raises as `request`."""
        batch = self._batch(self._named(observation))
        if history is None:
            return batch
        names = ["state", *(name for name in self.cameras if name in batch)]
        # The history adds the axis of frames itself.
        return history.extended(batch | {name: batch[name][:, -1] for name in names}, names)

    def request(
        self,
        observation: Mapping[str, Any],
        number: int,
        history: ObservationHistory | None = None,
    ) -> ActorRequest:
        """The request for a chunk; the answer is a map with `actions` `[C, A]` float32.

        Args:
            number: of the request on its connection; the noise depends on it and the seed.
            history: keeps the observation, and gives the frames before it.

        Raises:
            ValueError: names the entry and the remedy.
        """
        return self._request(self.observe(observation, history), number)

    def run(self, items: Sequence[_Item]) -> list[Any]:
        """Chunks of one layout; an error in the place of a chunk that is not finite."""
        begin = time.monotonic()
        inputs = ChunkInputs.joined([item.inputs for item in items])
        chunks_BCA = self.policy.raw_chunk(inputs, np.concatenate([item.noise for item in items]))
        timing = {"infer_ms": (time.monotonic() - begin) * 1000, "batch_size": len(items)}
        return [
            {"actions": chunk_CA, "policy_timing": timing}
            if np.isfinite(chunk_CA).all()
            else ValueError("the policy's actions for this observation are not finite")
            for chunk_CA in chunks_BCA
        ]

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run the policy on black images, once with each number of samples."""
        black = np.zeros((*self.config.resize_imgs_with_padding, 3), np.uint8)
        blank: dict[str, Any] = dict.fromkeys(self.cameras, black)
        blank |= {"state": np.zeros(self.state_dim), "prompt": "", _INDEX: 0}
        item = self._request(self._batch(blank | self._values), 0).item
        for size in batch_sizes:
            self.run([item] * size)

    def _named(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The entries by the policy's names; none is unknown, twice there, or missing."""
        found: dict[str, Any] = {}
        for key, value in _flat(observation):
            if value is None or key in self._ignored:
                continue
            if (name := self._name_of.get(key)) is None:
                raise ValueError(
                    f"the observation has {key!r}, and the policy reads "
                    f"{', '.join(sorted(self._name_of))}: leave it out, or start the server with "
                    f"--feature NAME={key} or --ignore {key}"
                )
            if name in found:
                raise ValueError(f"the observation has {name!r} twice, once as {key!r}")
            found[name] = value
        found = self._values | found
        missing = [name for name in ("state", "prompt") if name not in found]
        lacking = [name for name in self.cameras if name not in found]
        if len(lacking) > min(self.config.empty_cameras, len(self.cameras) - 1):
            missing += lacking
        if missing:
            keys = [key for key, name in self._name_of.items() if name in missing]
            raise ValueError(
                f"the observation lacks {', '.join(missing)} (under one of the keys "
                f"{', '.join(keys)}); it has {', '.join(map(str, observation))}"
            )
        return found

    def _batch(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A raw batch of one; cameras, state and `obs_history_is_pad` have an F axis."""
        batch: dict[str, Any] = {}
        names = ["state", *self.cameras]
        goals = [goal for goal in self._goals.values() if goal in entries]
        if goals and goals != [self._goals[name] for name in self._goals if name in entries]:
            raise ValueError(f"the observation has {', '.join(goals)}: give each camera its goal")
        for name, value in entries.items():
            if name in self.cameras or name in goals:
                images = _images(name, value, self.config.resize_imgs_with_padding)
                batch[name] = images[-1:] if name in goals else images[None]
            elif name in ("state", PREFIX):
                width = self.state_dim if name == "state" else self.action_dim
                batch[name] = number_rows(entries, name, width)[None]
            elif name in _TEXTS:
                batch[name] = [text_of(name, value)]
                if len(batch[name][0]) > MOST_TEXT:
                    raise ValueError(f"{name!r} has more than {MOST_TEXT} characters: shorten it")
            elif name == _HISTORY_IS_PAD:
                batch[name] = np.asarray(value)[None]
                if batch[name].dtype != bool or batch[name].ndim != 2:
                    raise ValueError(f"{name!r} is no array [frames] of bool")
            else:
                # A client sends NumPy's numbers, or arrays of one.
                number = value.item() if getattr(value, "size", 0) == 1 else value
                batch[name] = np.array([number_entry({name: number}, name)])
                if name in NUMBER_TYPES:
                    batch[f"{name}_is_pad"] = np.array([False])
        if goals:
            batch["subgoal_is_pad"] = np.array([False])
        if (num_frames := batch["state"].shape[1]) > 1:
            # Without it the past would be padding.
            batch.setdefault(_HISTORY_IS_PAD, np.zeros((1, num_frames), bool))
        frames = {name: batch[name].shape[1] for name in (*names, _HISTORY_IS_PAD) if name in batch}
        if len({*frames.values()}) > 1 or num_frames > self.config.n_obs_steps:
            raise ValueError(
                f"the numbers of frames are {frames}: all must be the same, at most n_obs_steps "
                f"{self.config.n_obs_steps}"
            )
        return batch

    def _request(self, batch: dict[str, Any], number: int) -> ActorRequest:
        if (PREFIX in batch) != (DELAY in batch):
            raise ValueError(
                f"the observation has one of {PREFIX} and {DELAY}: both belong together"
            )
        delay = int(batch.pop(DELAY, [0])[0])
        inputs = self.policy.chunk_inputs(batch, delay, batch.pop(PREFIX, None))
        shape = (1, self.config.chunk_size, self.config.max_action_dim)
        rng = sample_rng(self._seed, Stream.FLOW, number)
        noise = rng.standard_normal(shape, dtype=np.float32)
        return ActorRequest(self.run, _Item(inputs, noise), inputs.layout)


def _flat(observation: Mapping[Any, Any], above: str = "") -> list[tuple[str, Any]]:
    """The entries of nested maps, with their keys joined by "/"."""
    found = []
    for key, value in observation.items():
        name = f"{above}{key}"
        found += _flat(value, f"{name}/") if isinstance(value, Mapping) else [(name, value)]
    return found


def _images(name: str, value: Any, size: tuple[int, int]) -> np.ndarray:
    """`[F, 3, *size]` float32 from 0 to 1, of one image or of several."""
    images = value[None] if isinstance(value, np.ndarray) and value.ndim == 3 else value
    if (
        not isinstance(images, np.ndarray)
        or not (images.dtype == np.uint8 or images.dtype.kind == "f")
        or images.ndim != 4
        or 3 not in (images.shape[1], images.shape[3])
        or not images.size
    ):
        kind = type(value).__name__
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else kind
        raise ValueError(
            f"{name!r} is {found}; an image is an array [height, width, 3], uint8 or floats from 0 "
            "to 1"
        )
    if images.dtype != np.uint8:
        low, high = images.min(), images.max()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"{name!r} has values from {low:g} to {high:g}; floats from 0 to 1 are needed: "
                "divide by 255, or send uint8"
            )
    pixels = images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)
    is_last = pixels.shape[3] == 3
    return letterbox(pixels.transpose(0, 3, 1, 2) if is_last else pixels, size)
