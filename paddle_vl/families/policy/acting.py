"""Acting: raw actions for raw observations, and the state of an episode between them. Planning: the
next memory and then the next subtask, written greedily.

NumPy only; what computes actions and tokens is a model, or its exported programs. Shapes: B batch,
F frames of an observation, C steps of a chunk, A action dims, n new tokens. A ValueError names
entries that are missing or do not fit.

Source: the observation buffers and the action queue of OpenTau's `select_action`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from paddle_vl.families.policy.features import PolicyConfig
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.model_inputs import (
    PolicyInputs,
    as_arrays,
    padded_action_prefix,
)
from paddle_vl.families.policy.normalize import required
from paddle_vl.families.policy.tokenizers import PromptTokenizer

BOS = "<bos>"


class ObservationHistory:
    """Keeps past observations and adds earlier ones, `interval` environment steps apart, to the
    current one, which is the last of `num_frames`."""

    def __init__(self, num_frames: int, interval: int):
        self.num_frames, self.interval = num_frames, interval
        self._steps: deque[dict[str, np.ndarray]] = deque(maxlen=(num_frames - 1) * interval + 1)

    def clear(self) -> None:
        self._steps.clear()

    def extended(self, batch: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Keep the current values and return the batch with the past frames added.

        The entries of these names, each `[B, ...]`, come back as `[B, F, ...]`. Frames from before
        the episode are zero, and `obs_history_is_pad` `[B, F]` is True there.
        """
        current = {name: np.asarray(batch[name]) for name in names}
        if self._steps:
            for name, value in current.items():
                before = self._steps[-1].get(name)
                if before is None or before.shape != value.shape:
                    was = "absent" if before is None else f"of shape {list(before.shape)}"
                    raise ValueError(
                        f"{name!r} has shape {list(value.shape)}, but was {was} a step ago: call "
                        "reset() before another environment or batch size"
                    )
        self._steps.append(current)
        assert self._steps.maxlen is not None, "__init__ limits the length"
        missing = self._steps.maxlen - len(self._steps)
        places = [i * self.interval - missing for i in range(self.num_frames)]
        result = dict(batch)
        for name, value in current.items():
            nothing = np.zeros_like(value)
            frames = [nothing if i < 0 else self._steps[i][name] for i in places]
            result[name] = np.stack(frames, axis=1)
        is_pad = np.array([i < 0 for i in places])
        batch_size = len(next(iter(current.values())))
        result["obs_history_is_pad"] = np.tile(is_pad, (batch_size, 1))
        return result


class ChunkInputs(NamedTuple):
    """What a chunk is computed of.

    Attributes:
        inputs: of the model, see `PolicyInputs.observed`: arrays `[B, ...]` and lists of them.
        delay: number of known first steps.
        action_prefix: these, normalized, `[B, C, max_action_dim]` float32; None without.
    """

    inputs: dict[str, Any]
    delay: int
    action_prefix: np.ndarray | None

    @property
    def layout(self) -> Hashable:
        """Equal for inputs that may run as one batch: the same fields, shapes and delay.

        A block that one sample has is laid out for its whole batch, so a mask that is True nowhere
        is another layout.
        """
        found: list[Hashable] = [self.delay, self.action_prefix is None]
        for name, value in self.inputs.items():
            for array in value if isinstance(value, list) else [value]:
                is_mask = name.endswith("_masks")
                found.append((name, array.shape[1:], bool(array.any()) if is_mask else None))
        return tuple(found)

    @classmethod
    def joined(cls, parts: Sequence["ChunkInputs"]) -> "ChunkInputs":
        """Inputs of one layout as one batch."""
        first, inputs = parts[0], {}
        for name, value in first.inputs.items():
            columns = [part.inputs[name] for part in parts]
            inputs[name] = (
                [np.concatenate(arrays) for arrays in zip(*columns, strict=True)]
                if isinstance(value, list)
                else np.concatenate(columns)
            )
        prefixes = [part.action_prefix for part in parts if part.action_prefix is not None]
        return cls(inputs, first.delay, np.concatenate(prefixes) if prefixes else None)


class ActingPolicy(ABC):
    """What a policy does around its model when it acts.

    Attributes:
        history: past observations of the episode.
        action_queue: predicted actions that are not yet executed, each `[B, A]`.
        max_delay: actions that may run while the next chunk is computed. A prediction is due when
            no more are left, and its chunk begins with them.
    """

    config: Any

    def begin(self, config: PolicyConfig) -> None:
        self.history = ObservationHistory(config.n_obs_steps, config.history_interval)
        self.action_queue: deque[np.ndarray] = deque(maxlen=config.n_action_steps)
        self.max_delay = config.max_delay

    @property
    @abstractmethod
    def inputs(self) -> PolicyInputs:
        """Makes the model's inputs from raw batches."""

    @abstractmethod
    def sample_chunk(
        self,
        inputs: Mapping[str, Any],
        noise: Any,
        delay: int,
        action_prefix: np.ndarray | None,
    ) -> np.ndarray:
        """The model's actions, `[B, C, max_action_dim]` float32.

        Args:
            inputs: of the model, see `PolicyInputs.observed`.
            noise: of the same shape; drawn if None.
            delay: number of known steps, the first of `action_prefix` `[B, C, max_action_dim]`.
        """

    def sample_actions(
        self, batch: Mapping[str, Any], noise: Any = None, delay: int = 0, action_prefix: Any = None
    ) -> np.ndarray:
        """A chunk of raw actions for raw observations, `[B, C, action dims]` float32.

        Args:
            batch: see `paddle_vl.families.pi07.policy`.
            noise: `[B, C, max_action_dim]`, array or tensor; drawn if None.
            delay: number of first actions of the chunk that are already known, at most `max_delay`.
            action_prefix: these actions, raw, `[B, delay, action dims]`.
        """
        return self.raw_chunk(self.chunk_inputs(batch, delay, action_prefix), noise)

    def chunk_inputs(
        self, batch: Mapping[str, Any], delay: int = 0, action_prefix: Any = None
    ) -> ChunkInputs:
        """What the model needs for a chunk, without running it; see `sample_actions`."""
        if not 0 <= delay <= self.config.max_delay:
            raise ValueError(f"delay is {delay}; max_delay allows 0 to {self.config.max_delay}")
        if delay and action_prefix is None:
            raise ValueError(f"delay is {delay}: action_prefix must give these first steps")
        maker = self.inputs
        inputs, _ = maker.observed(as_arrays(batch))
        if action_prefix is not None:
            raw = as_arrays({"actions": action_prefix})
            if (known := np.shape(raw["actions"])[1]) < delay:
                raise ValueError(f"delay is {delay}, and action_prefix has only {known} steps")
            targets = maker.normalizers["normalize_targets"]
            given = targets.normalize(raw, inputs["group_index"])["actions"]
            action_prefix = padded_action_prefix(given, self.config)
        return ChunkInputs(inputs, int(delay), action_prefix)

    def raw_chunk(self, given: ChunkInputs, noise: Any = None) -> np.ndarray:
        """The model's chunk of raw actions, `[B, C, action dims]` float32."""
        chunk = self.sample_chunk(given.inputs, noise, given.delay, given.action_prefix)
        dims = self.config.output_features["actions"].shape[0]
        outputs = self.inputs.normalizers["unnormalize_outputs"]
        actions = {"actions": chunk[:, :, :dims]}
        return outputs.unnormalize(actions, given.inputs["group_index"])["actions"]

    def select_action(self, batch: Mapping[str, Any], noise: Any = None) -> np.ndarray:
        """The next raw action, `[B, action dims]`, for the current raw observation.

        Keeps past observations and the rest of the predicted chunk: call it at every step of an
        episode, and `reset` before each episode.

        Args:
            batch: one step; entries have no F axis.
            noise: see `sample_actions`; used at steps that predict a chunk.
        """
        batch = as_arrays(batch)
        required(batch, "state")
        present = [name for name in cameras_of(self.config.input_features) if name in batch]
        batch = self.history.extended(batch, ["state", *present])
        queue = self.action_queue
        if len(queue) <= self.max_delay:
            running = list(queue)
            committed = np.stack(running, axis=1) if running else None
            chunk_BCA = self.sample_actions(batch, noise, len(running), committed)
            # The queue has the first ones, and drops what is beyond `n_action_steps`.
            ahead_BCA = chunk_BCA[:, len(running) :]
            queue.extend(ahead_BCA[:, : queue.maxlen].swapaxes(0, 1))
        return queue.popleft()

    def reset(self) -> None:
        """Begin a new episode."""
        self.history.clear()
        self.action_queue.clear()


class TokenReader(Protocol):
    """A model that has read a prompt and the tokens written so far."""

    def read(self, ids_Bn: np.ndarray, is_real_Bn: np.ndarray) -> None:
        """Append tokens int64, of which some are padding; each sees all real ones before it."""
        ...

    def next_tokens(self) -> np.ndarray:
        """The likeliest token after them, int64 `[B, 1]`."""
        ...


class WritingRules(NamedTuple):
    """Token ids of a plan, and the lengths of its segments, padding among them."""

    memory_length: int
    response_length: int
    response_label: Sequence[int]
    bos_id: int
    eos_id: int
    pad_id: int

    @property
    def num_tokens(self) -> int:
        """All tokens that are read after the prompt."""
        return self.memory_length + len(self.response_label) + self.response_length


def write_plan(
    reader: TokenReader, batch_size: int, rules: WritingRules
) -> tuple[np.ndarray, np.ndarray]:
    """Memory and response, each int64 `[B, length]`: BOS, the text, EOS, padding."""
    memory = _written(reader, batch_size, rules.memory_length, rules)
    label_Bn = np.tile(np.array(rules.response_label, dtype=np.int64), (batch_size, 1))
    reader.read(label_Bn, np.ones(label_Bn.shape, dtype=bool))
    return memory, _written(reader, batch_size, rules.response_length, rules)


def _written(reader: TokenReader, batch_size: int, length: int, rules: WritingRules) -> np.ndarray:
    tokens = np.full((batch_size, 1), rules.bos_id, dtype=np.int64)
    reader.read(tokens, np.ones((batch_size, 1), dtype=bool))
    while tokens.shape[1] < length:
        token = reader.next_tokens()
        # Not after BOS alone: the first token after it is always decoded.
        ended = np.isin(tokens, (rules.eos_id, rules.pad_id)).any(axis=1, keepdims=True)
        ended &= tokens.shape[1] > 1
        token = np.where(ended, rules.pad_id, token)
        tokens = np.concatenate([tokens, token], axis=1)
        reader.read(token, np.asarray(~ended))
    return tokens


class Plan(NamedTuple):
    """The planner's texts, one per sample.

    Attributes:
        memory: the next step's `past_memory`.
        response: the next subtask, the low-level policy's `response`.
    """

    memory: list[str]
    response: list[str]


def plan_of(written: Sequence[np.ndarray], tokenizer: PromptTokenizer, eos_id: int) -> Plan:
    """The texts of memory and response, before their first EOS or padding."""

    def text(ids: np.ndarray) -> str:
        end = np.flatnonzero((ids == eos_id) | (ids == tokenizer.pad_id))
        return tokenizer.decode(ids[: end[0] if end.size else None])

    return Plan(*([text(row) for row in ids_Bn] for ids_Bn in written))
