"""Raw demonstrations and observations to the planner's inputs, on the host.

It needs no model and no Paddle, so that worker processes can do it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_vl.families.pi07.inputs.groups import group_index
from paddle_vl.families.pi07.inputs.images import prepare_videos
from paddle_vl.families.pi07.inputs.model_inputs import as_arrays, cameras_of
from paddle_vl.families.pi07.inputs.normalize import Normalizer
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer, metadata_texts, words_of
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig

EOS = "<eos>"
_NUM_BINS = 256


class PlannerInputs:
    """What stands between raw batches and the planner's model: normalisation, texts, images.

    Args:
        normalizer: of the state.
    """

    def __init__(
        self, config: PI07PlannerConfig, tokenizer: PromptTokenizer, normalizer: Normalizer
    ):
        self.config, self.tokenizer, self.normalizer = config, tokenizer, normalizer

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs for raw demonstrations, as arrays.

        Raises:
            ValueError: what is missing or does not fit, named.
        """
        inputs, batch = self.observation_inputs(batch), as_arrays(batch)
        size = len(batch["state"])
        for name, source, length in (
            ("memory", "next_memory", self.config.memory_max_length),
            ("response", "response", self.config.response_max_length),
        ):
            texts = [text + EOS for text in _required(batch, source, size)]
            ids, mask = self.tokenizer.padded(texts, length, add_special_tokens=True)
            inputs |= {f"{name}_tokens": ids, f"{name}_masks": mask}
        return inputs

    def observation_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs for raw observations, as arrays.

        Raises:
            ValueError: what is missing or does not fit, named.
        """
        config, batch = self.config, as_arrays(batch)
        states = state_texts(self._normalized_state(batch))
        size = len(states)
        tasks, memories = (_required(batch, name, size) for name in ("prompt", "past_memory"))
        prompts = [
            f"Task: {task}, Past Memory: {memory}, State: {state}, "
            for task, memory, state in zip(tasks, memories, states, strict=True)
        ]
        cameras = cameras_of(config.input_features)
        frames = prepare_videos(
            batch, cameras, config.resize_imgs_with_padding, 1, config.empty_cameras
        )
        inputs: dict[str, Any] = {
            "images": [video[:, 0] * 2.0 - 1.0 for video in frames.images],
            "img_masks": frames.masks,
        }
        for name, texts, length, has_special in (
            ("lang", prompts, config.prompt_max_length, True),
            ("metadata", metadata_texts(batch, size), config.metadata_max_length, False),
        ):
            ids, mask = self.tokenizer.padded(texts, length, has_special)
            inputs |= {f"{name}_tokens": ids, f"{name}_masks": mask}
        return inputs

    def _normalized_state(self, batch: dict[str, Any]) -> np.ndarray:
        if "state" not in batch:
            raise ValueError(f"the batch has no 'state'; its entries are {sorted(batch)}")
        state = np.asarray(batch["state"], dtype=np.float32)
        state = state[:, 0] if state.ndim == 3 and state.shape[1] == 1 else state
        if state.ndim != 2 or state.shape[1] > self.config.max_state_dim:
            raise ValueError(
                f"'state' has shape {list(state.shape)}; [batch, dims] with at most "
                f"{self.config.max_state_dim} dims (max_state_dim) is needed"
            )
        index_B = group_index(batch, len(state), self.config, self.normalizer.num_groups)
        return self.normalizer.normalize({"state": state}, index_B)["state"]


def state_texts(state_BS: np.ndarray) -> list[str]:
    """Normalised states in words: each value from -1 to 1 as the number of one of 256 bins."""
    scaled = (np.clip(state_BS, -1.0, 1.0) + 1.0) * (_NUM_BINS / 2)
    bins = np.minimum(scaled.astype(np.int64), _NUM_BINS - 1)
    return [" ".join(map(str, row)) for row in bins.tolist()]


def _required(batch: Mapping[str, Any], name: str, size: int) -> list[str]:
    if name not in batch:
        raise ValueError(f"the batch has no {name!r}; its entries are {sorted(batch)}")
    return words_of(batch, name, size)
