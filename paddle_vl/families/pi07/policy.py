"""The low-level policy: from raw observations to raw actions, from demonstrations to losses.

A raw batch is a mapping of NumPy arrays or tensors, with texts as lists of strings. Shapes: B
batch, F frames of an observation (the current one last), S state dims, C steps of a chunk, A action
dims.

Observation: `state` `[B, F, S]`; frames by camera name, `[B, F, 3, H, W]` float in [0, 1];
    `prompt`. With a single frame the F axis may be omitted.
Optional: `obs_history_is_pad` `[B, F]` (without it, the past is padding); `response`; `subgoal0`...
    with `subgoal_is_pad`; `speed`, `quality`, `mistake`, `fps`, each with `<name>_is_pad`;
    `robot_type`, `control_mode`; `dataset_index`, `dataset_repo_id`; `<camera>_is_pad` and
    `<goal>_is_pad` `[B]`, True for samples that lack this image.
Training: also `actions` `[B, C, A]`, optionally with `action_is_pad` and `real_action_dim`.

Source: PI07LowLevelPolicy of OpenTau.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paddle import Tensor

from paddle_vl.families.pi07.base_policy import BasePolicy, PolicyCheckpoint
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.prefix_layout import LABELS
from paddle_vl.families.policy.acting import ActingPolicy
from paddle_vl.families.policy.discrete_actions import ActionTokenizer
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.model_inputs import PolicyInputs
from paddle_vl.families.policy.normalize import Statistics
from paddle_vl.families.policy.normalizers import policy_normalizers
from paddle_vl.families.policy.prompt import PromptTokenizer
from paddle_vl.nn.placement import Placement

# Folder of the action tokenizer in a policy's folder.
ACTION_TOKENIZER_FOLDER = "action_tokenizer"


class PI07LowLevelPolicy(ActingPolicy, BasePolicy):
    """The model with its tokenizers, normalizers and the state of an episode.

    Attributes:
        normalizers: the four of `NORMALIZERS`.
        action_tokenizer: None for a policy that only acts.
    """

    config: PI07Config
    model: PI07LowLevelFlowMatching
    config_class = PI07Config
    model_class = PI07LowLevelFlowMatching
    labels = LABELS
    new_normalizers = staticmethod(policy_normalizers)

    def __init__(
        self,
        config: PI07Config,
        tokenizer: PromptTokenizer | str | Path,
        action_tokenizer: ActionTokenizer | str | Path | None = None,
        statistics: Sequence[Statistics] | None = None,
        placement: Placement | None = None,
    ):
        """A policy with fresh weights; on several ranks use `from_config`.

        Args:
            tokenizer: the backbone's, or its file or folder.
            action_tokenizer: FAST, or its folder; None for the folder that the configuration
                names, if it exists. Needed for training only.
            statistics: of each group of data, in the order of `config.dataset_names`.
            placement: None for the full model on a single device.

        Raises:
            ValueError: settings, statistics and tokenizers do not fit together.
            RuntimeError: files of a tokenizer are missing or damaged.
        """
        if action_tokenizer is None and Path(config.discrete_action_tokenizer_path).is_dir():
            action_tokenizer = config.discrete_action_tokenizer_path
        if isinstance(action_tokenizer, (str, Path)):
            action_tokenizer = ActionTokenizer.from_pretrained(action_tokenizer)
        _check_features(config)
        config = _with_vocabulary(config, action_tokenizer)
        super().__init__(config, tokenizer, statistics, placement)
        self.action_tokenizer = action_tokenizer
        self.begin(config)

    @classmethod
    def config_of_weights(cls, config: PI07Config, stored: PolicyCheckpoint) -> PI07Config:
        if config.vlm_config.discrete_action_vocab_size is not None:
            return config
        return _with_vocabulary_size(config, stored.discrete_vocabulary)

    @classmethod
    def stored_tokenizers(cls, folder: Path) -> dict[str, Any]:
        actions = folder / ACTION_TOKENIZER_FOLDER
        found = super().stored_tokenizers(folder)
        return found | ({"action_tokenizer": actions} if actions.is_dir() else {})

    def save_tokenizers(self, folder: Path) -> None:
        """Write the prompt tokenizer, and the action tokenizer in a folder of its own."""
        super().save_tokenizers(folder)
        if self.action_tokenizer is not None:
            self.action_tokenizer.save_pretrained(folder / ACTION_TOKENIZER_FOLDER)

    def forward(
        self,
        batch: Mapping[str, Any],
        noise: Any = None,
        time: Any = None,
        delay: Any = None,
        per_sample: bool = False,
    ) -> dict[str, Any]:
        """The losses of raw demonstrations: `MSE` of the flow, `CE` of the discrete actions.

        Args:
            noise, time, delay: see `PI07LowLevelFlowMatching.forward`; drawn if None.
            per_sample: add sums and counts per sample.
        """
        inputs = self.training_inputs(batch)
        drawn = {"noise": noise, "time": time, "delay": delay}
        inputs |= {name: value for name, value in drawn.items() if value is not None}
        return self.model(inputs, per_sample=per_sample)

    @property
    def inputs(self) -> PolicyInputs:
        """Makes the model's inputs from raw batches."""
        return PolicyInputs(
            self.config, self.tokenizer, self.action_tokenizer, dict(self.normalizers)
        )

    def sample_chunk(
        self,
        inputs: Mapping[str, Any],
        noise: np.ndarray | Tensor | None,
        delay: int,
        action_prefix: np.ndarray | None,
    ) -> np.ndarray:
        return self.model.sample_actions(inputs, noise, delay, action_prefix).numpy()

    def select_action(
        self, batch: Mapping[str, Any], noise: np.ndarray | Tensor | None = None
    ) -> np.ndarray:
        self.eval()
        return super().select_action(batch, noise)


def _check_features(config: PI07Config) -> None:
    """Refuse state or action features of another name, which would not be normalized."""
    for where, features, kind, name in (
        ("input_features", config.input_features, "STATE", "state"),
        ("output_features", config.output_features, "ACTION", "actions"),
    ):
        found = [key for key, feature in features.items() if feature.type == kind]
        if found != [name]:
            raise ValueError(
                f"{where} has {found or 'no feature'} of type {kind}; a pi07 policy has one, "
                f"{name!r}: name it so, there and in the data"
            )
    if not cameras_of(config.input_features):
        raise ValueError("input_features has no feature of type VISUAL: name the cameras")


def _with_vocabulary(config: PI07Config, action_tokenizer: ActionTokenizer | None) -> PI07Config:
    if action_tokenizer is None:
        return config
    size, named = action_tokenizer.vocab_size, config.vlm_config.discrete_action_vocab_size
    if named not in (None, size):
        raise ValueError(
            f"the action tokenizer has {size} entries, vlm_config.discrete_action_vocab_size is "
            f"{named}: give the tokenizer that the policy was trained with"
        )
    return _with_vocabulary_size(config, size)


def _with_vocabulary_size(config: PI07Config, size: int | None) -> PI07Config:
    return config.changed(vlm_config=replace(config.vlm_config, discrete_action_vocab_size=size))
