"""Base of the low-level policy and the planner: fresh weights, loading and saving.

A policy's folder is in OpenTau's and LeRobot's format, `config.json` and `model.safetensors`, plus
the tokenizers. Checkpoint keys are those of the model with the prefix `model.`; statistics have the
name of their normalizer as prefix, such as `normalize_inputs.buffer_state.mean`.

Over 350 lines, since a policy and its files are one format.
"""

import fnmatch
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import paddle
from paddle import nn

from paddle_vl.checkpoint.reading import (
    ReadableTensor,
    check_keys,
    checkpoint_tensors,
    chosen_dtype,
    stored_values,
)
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.checkpoint.writing import parameters_to_write, write_one_file, write_tensors
from paddle_vl.families.hf_interface import SizedModel, loads_like_hf
from paddle_vl.families.pi07.checkpoint_map import (
    UNUSED_KEYS,
    Groups,
    engine_keys,
    grouped_projections,
    grouped_statistics,
)
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.policy_model import PolicyModel
from paddle_vl.families.policy.features import CONFIG_FILES, CURRENT_CONFIG_VERSION, read_config
from paddle_vl.families.policy.normalize import Normalizer, Statistics
from paddle_vl.families.policy.normalizers import NORMALIZERS
from paddle_vl.families.policy.prompt import PromptTokenizer, check_vocabulary
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import Placement

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

MODEL_PREFIX = "model."
_EMBEDDING_KEY = "gemma3_with_expert.gemma3.model.language_model.embed_tokens.weight"
_HEAD_KEY = "gemma3_with_expert.gemma3.lm_head.weight"
_DISCRETE_HEAD_KEY = "gemma3_with_expert.da_head.bias"

Policy = TypeVar("Policy", bound="BasePolicy")


class BasePolicy(SizedModel, nn.Layer, ABC):
    """A policy and its model, which may be sharded.

    Attributes:
        normalizers: by name in a checkpoint; they have the statistics.
        labels: texts whose token ids the model needs.
        new_normalizers: makes normalizers for a configuration and a number of groups.
    """

    config: PI07Config | PI07PlannerConfig
    model: PolicyModel
    normalizers: Mapping[str, Normalizer]
    config_class: ClassVar[Any]
    model_class: ClassVar[Any]
    labels: ClassVar[Sequence[str]]
    new_normalizers: ClassVar[Callable[[Any, int], dict[str, Normalizer]]]
    # Patterns of checkpoint keys that the model never reads.
    unused_keys: ClassVar[Sequence[str]] = ()

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
            check_vocabulary(tokenizer, config.vlm_config.gemma3_config.text_config.vocab_size)
        self.config, self.tokenizer = config, tokenizer
        labels = {label: tokenizer.encode(label) for label in self.labels}
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
        dtype: str = "float32",
        fresh: Sequence[str] = (),
        ignore: Sequence[str] = (),
        placement: Placement | None = None,
        materialize: bool = True,
        **tokenizers: Any,
    ) -> Policy:
        """Load a policy's folder, one tensor at a time.

        Args:
            config: instead of the folder's. Rows of groups are found by name, see
                `paddle_vl.families.pi07.checkpoint_map`.
            statistics: for a checkpoint without statistics, or with `skip_normalization_weights`.
            dtype: of the weights.
            fresh: patterns of the model's keys that the checkpoint may lack; these are drawn.
            ignore: patterns of the checkpoint's keys that the model may lack.
            placement: None for the full model on a single device.
            materialize: read the weights now; False leaves that to the model's `materialize()`.
            tokenizers: `tokenizer`, and `action_tokenizer` of the low-level policy; None for those
                in the folder. OpenTau saves none.

        Raises:
            ValueError: keys are missing, unexpected or misshapen; or both the checkpoint and the
                caller give statistics.
            RuntimeError: files are missing or damaged.
        """
        folder = Path(path)
        config = cls.config_class.from_pretrained(folder) if config is None else config
        stored = PolicyCheckpoint(folder)
        takes = takes_statistics(config.skip_normalization_weights, stored, statistics)
        config = cls.config_of_weights(config, stored)
        if config.config_version is None:
            # Checkpoints from before the convention changed have no version.
            config = replace(config, config_version=0)
        given = {name: one for name, one in tokenizers.items() if one is not None}
        parts = cls.stored_tokenizers(folder) | given
        try:
            with default_dtype(chosen_dtype(dtype, stored.model)), paddle.LazyGuard():
                policy = cls(config, **parts, statistics=statistics, placement=placement)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if takes and config.dataset_names is None:
            policy.normalizers = policy.make_normalizers(stored.num_groups(policy.normalizers))
        stored.regroup(config, policy.normalizers if takes else {})
        ignore = [*ignore, *cls.unused_keys]
        stored.fill(policy.model, policy.normalizers, fresh, ignore, takes)
        if materialize:
            policy.model.materialize_all()
        # The policy now has other statistics, which its checkpoints must keep.
        policy.config = replace(policy.config, skip_normalization_weights=False)
        policy.eval()
        return policy

    @classmethod
    def config_of_weights(cls, config: Any, stored: "PolicyCheckpoint") -> Any:
        """The configuration with what only the weights tell."""
        return config

    @classmethod
    def stored_tokenizers(cls, folder: Path) -> dict[str, Any]:
        """The tokenizers of a policy's folder."""
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
            placement: None for the full model on a single device.
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
        one_file: bool = True,
    ) -> None:
        """Write `config.json`, `model.safetensors` and the tokenizers into a folder.

        All checkpoint ranks call this together.

        Args:
            write: writes the weight files.
            store: of the model in training, see `paddle_vl.checkpoint.writing`.
            one_file: the first rank writes all weights, one tensor in memory at a time: OpenTau
                reads no index. False: ranks divide a large model into several files.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config
        if config.config_version is None:
            config = replace(config, config_version=CURRENT_CONFIG_VERSION)
        keeps = self.normalizers if config.save_normalization_stats else {}
        write_policy(folder, self.model, keeps, write, store, one_file)
        if not self.model.placement.checkpoint_ranks.is_first:
            return
        config.save_pretrained(folder)
        self.save_tokenizers(folder)

    def save_tokenizers(self, folder: Path) -> None:
        """Write the files of the tokenizers."""
        self.tokenizer.save_pretrained(folder)

    def make_normalizers(self, num_groups: int) -> dict[str, Normalizer]:
        """Normalizers without statistics.

        Raises:
            ValueError: the configuration names another number of groups.
        """
        config, names = self.config, self.config.dataset_names
        if (names or config.per_group_projection) and num_groups != config.num_groups:
            raise ValueError(
                f"there are statistics of {num_groups} groups, dataset_names has {names}: name "
                "every group there, in the order of the statistics"
            )
        return type(self).new_normalizers(config, num_groups)

    @property
    @abstractmethod
    def inputs(self) -> Any:
        """Makes the model's inputs from raw batches: `PolicyInputs` or `PlannerInputs`."""

    def training_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs and targets from raw demonstrations, as arrays."""
        return self.inputs.training_inputs(batch)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shapes of all parameters by checkpoint key, without `model.`."""
        return self.model.whole_shapes()


class StatisticsEntry(NamedTuple):
    """A statistic of a normalizer and its checkpoint key."""

    key: str
    normalizer: Normalizer
    name: str

    def value(self) -> np.ndarray:
        return self.normalizer.tensors[self.name]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.value().shape


class PolicyCheckpoint:
    """The tensors of a policy's folder, not yet read.

    Attributes:
        model: by the model's keys, old names replaced.
        statistics: by their keys.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            RuntimeError: files are missing or damaged.
        """
        stored = checkpoint_tensors(folder)
        self.folder = folder
        self.statistics: dict[str, ReadableTensor] = {
            key: t for key, t in stored.items() if _is_statistic(key)
        }
        weights = {key: t for key, t in stored.items() if key not in self.statistics}
        self.model: dict[str, ReadableTensor] = dict(engine_keys(weights))
        # Head and embedding are tied; files with tied tensors stored once may have either name.
        if _EMBEDDING_KEY not in self.model and _HEAD_KEY in self.model:
            self.model[_EMBEDDING_KEY] = self.model[_HEAD_KEY]

    def num_groups(self, normalizers: Mapping[str, Normalizer]) -> int:
        """Number of groups of the stored statistics; 1 without statistics or a group axis."""
        for entry in _statistics_entries(normalizers):
            stored = self.statistics.get(entry.key)
            if stored is not None and len(stored.shape) == len(entry.stored_shape):
                return stored.shape[0]
        return 1

    @property
    def discrete_vocabulary(self) -> int | None:
        """Size of the discrete-action vocabulary that the model was trained with."""
        head = self.model.get(_DISCRETE_HEAD_KEY)
        return None if head is None else head.shape[0]

    @property
    def groups(self) -> list[str] | None:
        """Names of the groups in the order of the rows; None if the folder does not have them."""
        if not any((self.folder / name).is_file() for name in CONFIG_FILES):
            return None
        return read_config(self.folder)[1].get("dataset_names")

    def regroup(
        self, config: PI07Config | PI07PlannerConfig, normalizers: Mapping[str, Normalizer]
    ) -> None:
        """Bring projections and statistics into the order of the configuration's groups.

        Args:
            normalizers: empty if the checkpoint's statistics are not used.

        Raises:
            ValueError: the checkpoint does not name the groups of its rows.
        """
        groups = Groups(self.groups, config.dataset_names)
        if config.per_group_projection:
            self.model |= grouped_projections(self.model, groups, config.num_groups)
        if normalizers:
            shapes = {entry.key: entry.stored_shape for entry in _statistics_entries(normalizers)}
            self.statistics |= grouped_statistics(self.statistics, groups, shapes)

    def fill(
        self,
        model: PolicyModel,
        normalizers: Mapping[str, Normalizer],
        fresh: Sequence[str],
        ignore: Sequence[str],
        takes_statistics: bool,
    ) -> None:
        """Set the normalizers' statistics now, and the model's weights when it is materialized.

        Args:
            model: its parameters, which may be shards, have no storage yet.
            fresh: patterns of the model's keys that the checkpoint may lack; these are drawn.
            ignore: patterns of the checkpoint's keys that the model may lack.
            takes_statistics: use the checkpoint's statistics.

        Raises:
            ValueError: keys are missing, unexpected or misshapen; names all of them.
        """
        whole = model.whole().stored_parameters()
        drawn = {p.key for p in whole if p.key not in self.model and _matches(p.key, fresh)}
        wanted = [p for p in whole if p.key not in drawn]
        entries = list(_statistics_entries(normalizers)) if takes_statistics else []
        stored = self.model | (self.statistics if takes_statistics else {})
        ignored = UNUSED_KEYS | {key for key in stored if _matches(key, ignore)}
        check_keys(self.folder, stored, [*wanted, *entries], ignored, "the policy")
        model.materialize_later(
            lambda: [
                *model.fresh_values(drawn),
                *stored_values(
                    (p for p in model.stored_parameters() if p.key not in drawn), self.model
                ),
            ]
        )
        for entry in entries:
            # Infinite statistics mark absent ones; `Normalizer.normalize` raises if it needs them.
            value = self.statistics[entry.key].read(must_be_finite=False)
            entry.normalizer.tensors[entry.name] = value.astype(np.float32)
        for owner, normalizer in normalizers.items() if takes_statistics else ():
            normalizer.check(f"{self.folder}: {owner}")


def takes_statistics(
    skips: bool, stored: PolicyCheckpoint, statistics: Sequence[Statistics] | None
) -> bool:
    """Whether to use the checkpoint's statistics instead of given ones.

    Args:
        skips: `skip_normalization_weights`.

    Raises:
        ValueError: there are both, or none.
    """
    if skips and statistics is None:
        raise ValueError(
            "skip_normalization_weights leaves the checkpoint's statistics out, so others must be "
            "given: pass statistics, or set it to False"
        )
    if statistics is None:
        return True
    if stored.statistics and not skips:
        raise ValueError(
            f"{stored.folder} holds statistics, and others were given: leave them out, or set "
            "skip_normalization_weights to take the given ones"
        )
    return False


def write_policy(
    folder: Path,
    model: PolicyModel,
    normalizers: Mapping[str, Normalizer],
    write: FileWriter = write_file,
    store: "ParameterStore | None" = None,
    one_file: bool = True,
) -> None:
    """Write weights and statistics, see `BasePolicy.save_pretrained`."""
    tensors = parameters_to_write(model.stored_parameters(), MODEL_PREFIX, store)
    if model.placement.stage_layers.embedding:
        tensors += [
            TensorToWrite(entry.key, entry.stored_shape, "F32", entry.value)
            for entry in _statistics_entries(normalizers)
        ]
    ranks = model.placement.checkpoint_ranks
    if one_file:
        write_one_file(folder, "model", tensors, ranks, write)
    else:
        write_tensors(folder, "model", tensors, sys.maxsize, ranks, write)


def _statistics_entries(normalizers: Mapping[str, Normalizer]) -> Iterable[StatisticsEntry]:
    for owner, normalizer in normalizers.items():
        for name in normalizer.tensors:
            yield StatisticsEntry(f"{owner}.{name}", normalizer, name)


def _is_statistic(key: str) -> bool:
    return key.startswith(tuple(f"{name}." for name in NORMALIZERS))


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
