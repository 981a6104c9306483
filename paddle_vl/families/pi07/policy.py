"""The low-level policy: from raw observations to raw actions, from demonstrations to losses; and
what it has in common with the planner: fresh weights, loading and saving.

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

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import UnreadParameters, chosen_dtype
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.config.families import FamilyEntry
from paddle_vl.families.hf_interface import SizedModel, loads_like_hf
from paddle_vl.families.pi07.checkpoint_map import (
    PolicyCheckpoint,
    is_statistic,
    statistics_to_write,
    write_policy,
)
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, PolicyModel
from paddle_vl.families.pi07.prefix import labels_of
from paddle_vl.families.policy.acting import ActingPolicy
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.model_inputs import PolicyInputs
from paddle_vl.families.policy.normalize import (
    Normalizer,
    Statistics,
    new_normalizers,
    set_by_key,
)
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import Placement

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

# Folder of the action tokenizer in a policy's folder.
ACTION_TOKENIZER_FOLDER = "action_tokenizer"


Policy = TypeVar("Policy", bound="BasePolicy")


class BasePolicy(SizedModel, nn.Layer, ABC):
    """A policy and its model, which may be sharded; its normalizers are by name in a checkpoint."""

    config: PI07Config | PI07PlannerConfig
    model: PolicyModel
    normalizers: Mapping[str, Normalizer]
    config_class: ClassVar[Any]
    model_class: ClassVar[Any]
    # Patterns of checkpoint keys that the model never reads.
    unused_keys: ClassVar[Sequence[str]] = ()
    # Such tensors, and dtypes by key, of the folder that was loaded; both are saved again.
    _kept: Mapping[str, TensorToWrite] = {}
    _stored_dtypes: Mapping[str, str] = {}

    def __init__(
        self,
        config: Any,
        tokenizer: PromptTokenizer | str | Path,
        statistics: Sequence[Statistics] | None = None,
        placement: Placement | None = None,
    ):
        """A policy with fresh weights; for a shard of one use `from_config`.

        Args:
            tokenizer: the backbone's, or its file or folder.
            statistics: of each group of data, in the order of `config.dataset_names`.
            placement: None for the full model on a single device.

        Raises:
            ValueError: settings, statistics and tokenizer do not fit together.
            RuntimeError: the tokenizer's files are missing or damaged.
        """
        super().__init__()
        if isinstance(tokenizer, (str, Path)):
            tokenizer = PromptTokenizer.from_pretrained(tokenizer)
            size = config.vlm_config.gemma3_config.text_config.vocab_size
            if tokenizer.highest_id >= size:
                raise ValueError(
                    f"the tokenizer has the id {tokenizer.highest_id}, text_config.vocab_size is "
                    f"{size}: give the tokenizer that the policy was trained with"
                )
        self.config, self.tokenizer = config, tokenizer
        labels = {label: tokenizer.encode(label) for label in labels_of(self.model_class.blocks)}
        self.model = self.model_class(config, labels, placement)
        groups = config.num_groups if statistics is None else len(statistics)
        self.normalizers = self.make_normalizers(groups)
        if statistics is not None:
            for normalizer in self.normalizers.values():
                normalizer.set_statistics(statistics)

    @classmethod
    @loads_like_hf
    def from_pretrained(
        cls: type[Policy],
        path: str | Path,
        *,
        config: Any = None,
        statistics: Sequence[Statistics] | None = None,
        base: str | Path | None = None,
        dtype: str = "float32",
        fresh: Sequence[str] = (),
        ignore: Sequence[str] = (),
        placement: Placement | None = None,
        materialize: bool = True,
        **tokenizers: Any,
    ) -> Policy:
        """Load a policy's folder, or adapters in PEFT's format with their base; one tensor at a
        time.

        Of a folder of Gemma 3 the backbone is loaded, and the rest is drawn from Paddle's global
        random state. The positions of its vision tower are resampled to the policy's images.

        Args:
            config: instead of the folder's; required for Gemma 3, see
                `paddle_vl.families.pi07.gemma.with_backbone`. Rows of groups are found by name, see
                `paddle_vl.families.pi07.checkpoint_map`.
            statistics: for a checkpoint without statistics, or with `skip_normalization_weights`.
            base: folder of the base policy, instead of the one that the adapters name.
            dtype: of the weights; "auto" for the widest of the folder's, in which each of them is
                saved again.
            fresh: patterns of the model's keys that the checkpoint may lack; these are drawn.
            ignore: patterns of the checkpoint's keys that the model may lack.
            materialize: read the weights now; False leaves that to the model's `materialize()`.
            tokenizers: `tokenizer`, and `action_tokenizer` of the low-level policy; None for those
                in the folder. OpenTau saves none.

        Raises:
            ValueError: keys are missing, unexpected or misshapen; or both the checkpoint and the
                caller give statistics; or `base` is given for a full policy.
            RuntimeError: files are missing or damaged.
        """
        from paddle_vl.checkpoint.adapter_files import StoredAdapter, base_folder, is_adapter

        folder, adapter, own = Path(path), None, {}
        if is_adapter(folder):
            adapter = StoredAdapter.read(folder)
            own = {
                key: adapter.tensors.pop(key) for key in filter(is_statistic, [*adapter.tensors])
            }
            weights = base_folder(folder, base)
        elif base is not None:
            raise ValueError(f"{folder} is a full policy, not an adapter of {base}: leave it out")
        else:
            weights = folder
        stored = PolicyCheckpoint(weights)
        if own:
            stored.statistics = dict(own)
        if config is None and stored.is_backbone:
            raise ValueError(
                f"{folder} is Gemma 3, the backbone of a policy, and says nothing of the policy: "
                f"pass its config, a {cls.config_class.__name__}"
            )
        config = cls.config_class.from_pretrained(folder) if config is None else config
        skips, takes = config.skip_normalization_weights, statistics is None
        takes = takes and not stored.is_backbone
        if skips and takes:
            raise ValueError(
                "skip_normalization_weights leaves the checkpoint's statistics out, so others must "
                "be given: pass statistics, or set it to False"
            )
        if stored.statistics and not skips and not takes:
            raise ValueError(
                f"{folder} holds statistics, and others were given: leave them out, or set "
                "skip_normalization_weights to take the given ones"
            )
        if isinstance(config, PI07Config) and not config.vlm_config.discrete_action_vocab_size:
            config = _with_vocabulary(config, stored.discrete_vocabulary)
        if config.config_version is None and not stored.is_backbone:
            # Checkpoints from before the convention changed have no version.
            config = replace(config, config_version=0)
        given = {name: one for name, one in tokenizers.items() if one is not None}
        parts = cls.stored_tokenizers(folder) | given
        try:
            with default_dtype(chosen_dtype(dtype, stored.widest)), paddle.LazyGuard():
                policy = cls(config, **parts, statistics=statistics, placement=placement)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if takes and config.dataset_names is None:
            policy.normalizers = policy.make_normalizers(stored.num_groups(policy.normalizers))
        # Statistics of adapters have the rows of the policy's groups.
        normalizers = policy.normalizers if takes and not own else {}
        stored.fill(policy.model, normalizers, fresh, [*ignore, *cls.unused_keys])
        if takes and own:
            found = {key: tensor.read(must_be_finite=False) for key, tensor in own.items()}
            set_by_key(policy.normalizers, found)
        policy.model.name_or_path = str(weights.resolve())
        if adapter is not None:
            policy.model.load_adapter(adapter)
        policy._kept = stored.kept()
        same = (stored.statistics if takes else {}) | (stored.model if dtype == "auto" else {})
        policy._stored_dtypes = {key: tensor.dtype for key, tensor in same.items()}
        if materialize:
            policy.model.materialize_all()
        # The policy now has other statistics, which its checkpoints must keep.
        policy.config = replace(policy.config, skip_normalization_weights=False)
        policy.eval()
        return policy

    @classmethod
    def stored_tokenizers(cls, folder: Path) -> dict[str, Any]:
        return {"tokenizer": folder / TOKENIZER_FILE}

    @classmethod
    def from_config(
        cls: type[Policy],
        config: PI07Config | PI07PlannerConfig,
        *parts: Any,
        placement: Placement | None = None,
        materialize: bool = True,
        **named_parts: Any,
    ) -> Policy:
        """A policy with fresh weights, drawn from Paddle's global random state.

        A rank gets its shards of what a single device draws with the same seed.

        Args:
            parts, named_parts: tokenizers and statistics, as the class takes them.
            materialize: draw the weights now; False leaves that to the model's `materialize()`.
        """
        with paddle.LazyGuard():
            policy = cls(config, *parts, placement=placement, **named_parts)
        policy.model.materialize_later(policy.model.fresh_values)
        if materialize:
            policy.model.materialize_all()
        return policy

    def save_pretrained(
        self,
        path: str | Path,
        write: FileWriter = write_file,
        store: "ParameterStore | None" = None,
    ) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers into a folder, with adapters
        merged into the weights. All checkpoint ranks call it.

        Args:
            write: writes the weight files.
            store: of the model in training, see `paddle_vl.checkpoint.writing`.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        keeps = self.normalizers if self.config.save_normalization_stats else {}
        kept, dtypes = self._kept, self._stored_dtypes
        write_policy(folder, self.model, keeps, write, store, kept, dtypes)
        self._save_rest(folder)

    def save_adapter(
        self,
        path: str | Path,
        write: FileWriter = write_file,
        store: "ParameterStore | None" = None,
    ) -> None:
        """As `save_pretrained`, but the model's adapters with the statistics, in PEFT's format."""
        keeps = self.normalizers if self.config.save_normalization_stats else {}
        self.model.save_adapter(path, write, store, statistics_to_write(keeps))
        self._save_rest(Path(path))

    def _save_rest(self, folder: Path) -> None:
        if self.model.placement.checkpoint_ranks.is_first:
            version = self.config.normalization_version
            replace(self.config, config_version=version).save_pretrained(folder)
            self.save_tokenizers(folder)

    def save_tokenizers(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def make_normalizers(self, num_groups: int) -> dict[str, Normalizer]:
        """Normalizers without statistics, of as many groups as the configuration names."""
        config, names = self.config, self.config.dataset_names
        if (names or config.per_group_projection) and num_groups != config.num_groups:
            raise ValueError(
                f"there are statistics of {num_groups} groups, dataset_names has {names}: name "
                "every group there, in the order of the statistics"
            )
        return new_normalizers(config, num_groups)

    @property
    @abstractmethod
    def inputs(self) -> Any:
        """Makes the model's inputs from raw batches: `PolicyInputs` or `PlannerInputs`."""


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

    def __init__(
        self,
        config: PI07Config,
        tokenizer: PromptTokenizer | str | Path,
        action_tokenizer: ActionTokenizer | str | Path | None = None,
        statistics: Sequence[Statistics] | None = None,
        placement: Placement | None = None,
    ):
        """See `BasePolicy`.

        Args:
            action_tokenizer: FAST, or its folder; None for the folder that the configuration
                names, if it exists. Needed for training only.
        """
        if action_tokenizer is None and Path(config.discrete_action_tokenizer_path).is_dir():
            action_tokenizer = config.discrete_action_tokenizer_path
        if isinstance(action_tokenizer, (str, Path)):
            action_tokenizer = ActionTokenizer.from_pretrained(action_tokenizer)
        check_features(config)
        if action_tokenizer is not None:
            size, named = action_tokenizer.vocab_size, config.vlm_config.discrete_action_vocab_size
            if named not in (None, size):
                raise ValueError(
                    f"the action tokenizer has {size} entries, vlm_config."
                    f"discrete_action_vocab_size is {named}: give the tokenizer that the policy "
                    "was trained with"
                )
            config = _with_vocabulary(config, size)
        super().__init__(config, tokenizer, statistics, placement)
        self.action_tokenizer = action_tokenizer
        self.begin(config)

    @classmethod
    def stored_tokenizers(cls, folder: Path) -> dict[str, Any]:
        actions = folder / ACTION_TOKENIZER_FOLDER
        found = super().stored_tokenizers(folder)
        return found | ({"action_tokenizer": actions} if actions.is_dir() else {})

    def save_tokenizers(self, folder: Path) -> None:
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
        """The losses of raw demonstrations, see `PI07LowLevelFlowMatching`; `noise`, `time` and
        `delay` are drawn if None."""
        inputs = self.inputs.training_inputs(batch)
        drawn = {"noise": noise, "time": time, "delay": delay}
        inputs |= {name: value for name, value in drawn.items() if value is not None}
        return self.model(inputs, per_sample=per_sample)

    @property
    def inputs(self) -> PolicyInputs:
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


def open_policy(family: FamilyEntry, folder: Path) -> PI07LowLevelPolicy:
    """The policy in a folder, for acting."""
    return family.model_class().from_pretrained(folder)


def merge_adapter(family: FamilyEntry, folder: Path, out: Path, base: str | None) -> Path:
    """Write base and adapter as one policy; returns the folder of the base."""
    policy = family.model_class().from_pretrained(
        folder, base=base, dtype="auto", materialize=False
    )
    unread: Any = UnreadParameters(policy.model)
    policy.save_pretrained(out, store=unread)
    return Path(str(policy.model.name_or_path))


def check_features(config: PI07Config | PI07PlannerConfig) -> None:
    """Refuse state or action features of another name, which would not be normalized."""
    wanted = [("input_features", "STATE", ["state"])]
    if isinstance(config, PI07Config):
        wanted.append(("output_features", "ACTION", ["actions"]))
    for where, kind, names in wanted:
        features = getattr(config, where)
        if (found := [n for n, feature in features.items() if feature.type == kind]) != names:
            raise ValueError(
                f"{where} has {found or 'no feature'} of type {kind}; pi07 has one, {names[0]!r}: "
                "name it so, there and in the data"
            )
    if not cameras_of(config.input_features):
        raise ValueError("input_features has no feature of type VISUAL: name the cameras")


def _with_vocabulary(config: PI07Config, size: int | None) -> PI07Config:
    return config.changed(vlm_config=replace(config.vlm_config, discrete_action_vocab_size=size))
