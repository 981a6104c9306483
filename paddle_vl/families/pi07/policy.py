"""The low-level policy: raw observations in, raw actions out; raw demonstrations in, losses out.

Batches are mappings of arrays or tensors, with texts as lists: `state` `[B, T, S]`, a camera's
frames under its name `[B, T, 3, H, W]` in [0, 1], `prompt`, and what there is of `response`,
`subgoal0`... with `subgoal_is_pad`, `speed`, `quality`, `mistake`, `fps` with `<name>_is_pad`,
`robot_type`, `control_mode`, `obs_history_is_pad` (absent: the past is taken for padding),
`dataset_index`, `dataset_repo_id`; to learn from also `actions` `[B, C, A]` with `action_is_pad`
and `real_action_dim`. Where one frame is asked for, T may be left out.

Source: PI07LowLevelPolicy of OpenTau.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import FileWriter, write_file
from paddle_vl.families.pi07.action_queue import ActionQueue
from paddle_vl.families.pi07.config import CURRENT_CONFIG_VERSION, PI07Config
from paddle_vl.families.pi07.flow_matching import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.inputs.discrete_actions import ActionTokenizer
from paddle_vl.families.pi07.inputs.feature_statistics import Statistics
from paddle_vl.families.pi07.inputs.history import ObservationHistory
from paddle_vl.families.pi07.inputs.model_inputs import (
    as_arrays,
    cameras_of,
    whole_action_prefix,
)
from paddle_vl.families.pi07.inputs.normalize import Normalizer
from paddle_vl.families.pi07.inputs.policy_inputs import PolicyInputs
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer, check_vocabulary
from paddle_vl.families.pi07.placed_policy import PlacedPolicy
from paddle_vl.families.pi07.policy_files import (
    ACTION_TOKENIZER_FOLDER,
    NORMALIZERS,
    PolicyCheckpoint,
    takes_statistics,
    write_policy,
)
from paddle_vl.families.pi07.prefix_layout import LABELS
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.placement import Placement


class PI07LowLevelPolicy(PlacedPolicy):
    """The model with all that stands between it and a robot.

    Attributes:
        model: `PI07LowLevelFlowMatching`.
        normalizers: the four of `NORMALIZERS`, which hold the statistics.
        action_tokenizer: None where the policy only acts.
    """

    def __init__(
        self,
        config: PI07Config,
        tokenizer: PromptTokenizer | str | Path,
        action_tokenizer: ActionTokenizer | str | Path | None = None,
        statistics: Sequence[Statistics] | None = None,
        placement: Placement | None = None,
    ):
        """Weights are fresh; a rank that holds parts is built with `from_config`.

        Args:
            tokenizer: the backbone's, or its file or folder.
            action_tokenizer: FAST, or its folder; None for the folder that the configuration
                names, if it is there. Acting does not need one.
            statistics: of each group of data, in the order of `config.dataset_names`.
            placement: what this process has of the model; None for all of it.

        Raises:
            ValueError: settings, statistics and tokenizers that do not fit each other.
            RuntimeError: files of a tokenizer are missing or damaged.
        """
        super().__init__()
        if not hasattr(tokenizer, "encode"):
            tokenizer = PromptTokenizer.from_pretrained(tokenizer)
            check_vocabulary(tokenizer, config.vlm_config)
        if action_tokenizer is None and Path(config.discrete_action_tokenizer_path).is_dir():
            action_tokenizer = config.discrete_action_tokenizer_path
        if isinstance(action_tokenizer, (str, Path)):
            action_tokenizer = ActionTokenizer.from_pretrained(action_tokenizer)
        _check_features(config)
        self.config = _with_vocabulary(config, action_tokenizer)
        self.tokenizer, self.action_tokenizer = tokenizer, action_tokenizer
        labels = {label: tokenizer.encode(label) for label in LABELS}
        self.model = PI07LowLevelFlowMatching(self.config, labels, placement)
        groups = config.num_groups if statistics is None else len(statistics)
        self.normalizers = make_normalizers(self.config, groups)
        if statistics is not None:
            for normalizer in self.normalizers.values():
                normalizer.set_statistics(statistics)
        self.history = ObservationHistory(config.n_obs_steps, config.history_interval)
        self.action_queue = ActionQueue(config.n_action_steps, config.max_delay)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        config: PI07Config | None = None,
        tokenizer: PromptTokenizer | str | Path | None = None,
        action_tokenizer: ActionTokenizer | str | Path | None = None,
        statistics: Sequence[Statistics] | None = None,
        dtype: str = "float32",
        fresh: Sequence[str] = (),
        ignore: Sequence[str] = (),
        placement: Placement | None = None,
        materialize: bool = True,
    ) -> "PI07LowLevelPolicy":
        """Load a policy's folder, one tensor at a time.

        Args:
            config: instead of the folder's. Rows of groups that it names in another order, or
                others, are found by name, see `paddle_vl.families.pi07.group_rows`.
            tokenizer, action_tokenizer: None for those in the folder; OpenTau saves none.
            statistics: for a checkpoint without any, or one whose are not to be taken
                (`skip_normalization_weights`).
            fresh: patterns of keys that the checkpoint need not have; they are drawn.
            ignore: patterns of keys that it may have beyond the model's.
            placement: what this process has of the model; None for all of it.
            materialize: read the weights now; otherwise the model's `materialize` does.

        Raises:
            ValueError: keys are missing, unexpected or misshapen, all named at once; statistics
                were given beside those of the checkpoint.
            RuntimeError: files are missing or damaged.
        """
        folder = Path(path)
        config = PI07Config.from_pretrained(folder) if config is None else config
        stored = PolicyCheckpoint(folder)
        takes = takes_statistics(config.skip_normalization_weights, stored, statistics)
        if config.config_version is None:
            # Checkpoints did not say before the convention changed.
            config = config.changed(config_version=0)
        if config.vlm_config.discrete_action_vocab_size is None:
            config = _with_vocabulary_size(config, stored.discrete_vocabulary)
        own_actions = folder / ACTION_TOKENIZER_FOLDER
        if action_tokenizer is None and own_actions.is_dir():
            action_tokenizer = own_actions
        if tokenizer is None:
            tokenizer = folder / TOKENIZER_FILE
        try:
            with default_dtype(dtype), paddle.LazyGuard():
                policy = cls(config, tokenizer, action_tokenizer, statistics, placement)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if takes and config.dataset_names is None:
            groups = stored.num_groups(policy.normalizers)
            policy.normalizers = make_normalizers(config, groups)
        stored.regroup(config, policy.normalizers if takes else {})
        stored.fill(policy.model, policy.normalizers, fresh, ignore, takes)
        if materialize:
            policy.model.materialize_all()
        # Once left out, the statistics in use are this policy's own.
        policy.config = policy.config.changed(skip_normalization_weights=False)
        policy.eval()
        return policy

    def save_pretrained(
        self,
        path: str | Path,
        write: FileWriter = write_file,
        store: ParameterStore | None = None,
    ) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers into a folder.

        Where ranks hold parts, all of them call this together.

        Args:
            write: takes the files of weights.
            store: of the model in training, see `paddle_vl.checkpoint.writing`.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config
        if config.config_version is None:
            config = config.changed(config_version=CURRENT_CONFIG_VERSION)
        keeps = self.normalizers if config.save_normalization_stats else {}
        write_policy(folder, self.model, keeps, write, store)
        if not self.model.placement.checkpoint_ranks.is_first:
            return
        config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
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
            noise, time, delay: as `PI07LowLevelFlowMatching.forward` takes them; drawn if None.
            per_sample: add sums and counts of every sample.
        """
        inputs = self.training_inputs(batch)
        drawn = {"noise": noise, "time": time, "delay": delay}
        inputs |= {name: value for name, value in drawn.items() if value is not None}
        return self.model(inputs, per_sample=per_sample)

    @property
    def inputs(self) -> PolicyInputs:
        """What makes the model's inputs of raw batches."""
        return PolicyInputs(
            self.config, self.tokenizer, self.action_tokenizer, dict(self.normalizers)
        )

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `PolicyInputs.training_inputs`."""
        return self.inputs.training_inputs(batch)

    @paddle.no_grad()
    def sample_actions(
        self,
        batch: Mapping[str, Any],
        noise: np.ndarray | Tensor | None = None,
        delay: int = 0,
        action_prefix: np.ndarray | Tensor | None = None,
    ) -> np.ndarray:
        """A chunk of raw actions for raw observations, `[B, C, action dims]` float32.

        Args:
            noise: `[B, C, max_action_dim]`; drawn if None.
            delay: so many first actions of the chunk are settled already, at most `max_delay`.
            action_prefix: those, raw, `[B, delay, action dims]`.

        Raises:
            ValueError: what is missing or does not fit, named.
        """
        if not 0 <= delay <= self.config.max_delay:
            raise ValueError(f"delay is {delay}; max_delay allows 0 to {self.config.max_delay}")
        inputs, _, index_B = self.inputs.observed(as_arrays(batch))
        if action_prefix is not None:
            raw = as_arrays({"actions": action_prefix})
            settled = self.normalizers["normalize_targets"].normalize(raw, index_B)["actions"]
            action_prefix = whole_action_prefix(settled, self.config)
        chunk = self.model.sample_actions(inputs, noise, int(delay), action_prefix)
        dims = self.config.output_features["actions"].shape[0]
        actions = {"actions": chunk[:, :, :dims].numpy()}
        return self.normalizers["unnormalize_outputs"].unnormalize(actions, index_B)["actions"]

    def select_action(
        self, batch: Mapping[str, Any], noise: np.ndarray | Tensor | None = None
    ) -> np.ndarray:
        """The next raw action, `[B, action dims]`, for the current raw observation.

        Remembers observations for those to come, and actions until they are executed: call it at
        every step of an episode, and `reset` before each episode.

        Args:
            batch: one step, no entry has T.
            noise: as in `sample_actions`, for steps at which a chunk is predicted.
        """
        self.eval()
        batch = as_arrays(batch)
        if "state" not in batch:
            raise ValueError(f"the batch has no 'state'; its entries are {sorted(batch)}")
        present = [name for name in cameras_of(self.config.input_features) if name in batch]
        batch = self.history.extended(batch, ["state", *present])
        if self.action_queue.is_due:
            committed = self.action_queue.committed()
            delay = 0 if committed is None else committed.shape[1]
            self.action_queue.refill(self.sample_actions(batch, noise, delay, committed), delay)
        return self.action_queue.pop()

    def reset(self) -> None:
        """Forget observations and actions: a new episode begins."""
        self.history.clear()
        self.action_queue.clear()


def make_normalizers(config: PI07Config, num_groups: int) -> dict[str, Normalizer]:
    """The four normalisers, their statistics not given yet.

    Raises:
        ValueError: another number of groups than the configuration has names, or projections.
    """
    names = config.dataset_names
    if (names or config.per_group_projection) and num_groups != config.num_groups:
        raise ValueError(
            f"there are statistics of {num_groups} groups, dataset_names has {names}: name every "
            "group there, in the order of the statistics"
        )
    inputs, outputs = config.input_features, config.output_features
    modes, version = config.normalization_mapping, config.normalization_version
    discrete = {"ACTION": "MIN_MAX"}
    made = ((inputs, modes), (outputs, modes), (outputs, discrete), (outputs, modes))
    return {
        name: Normalizer(features, of_kind, version, num_groups)
        for name, (features, of_kind) in zip(NORMALIZERS, made, strict=True)
    }


def _check_features(config: PI07Config) -> None:
    """A state or action of another name would be left as it is without a word."""
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
