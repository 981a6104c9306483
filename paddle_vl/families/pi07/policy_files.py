"""A policy's files: OpenTau's and LeRobot's `model.safetensors`, and the tokenizers beside it.

Keys are those of the model behind `model.`, and the statistics behind their normalisers' names.
"""

import fnmatch
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paddle_vl.checkpoint.reading import check_keys, checkpoint_tensors, stored_values
from paddle_vl.checkpoint.safetensors_io import (
    FileWriter,
    StoredTensor,
    TensorToWrite,
    write_file,
)
from paddle_vl.checkpoint.writing import parameters_to_write, write_tensors
from paddle_vl.families.pi07 import group_rows
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS, engine_keys
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.config_files import CONFIG_FILES, read_config
from paddle_vl.families.pi07.inputs.feature_statistics import Statistics
from paddle_vl.families.pi07.inputs.normalize import Normalizer
from paddle_vl.families.pi07.placed_model import PlacedModel
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.nn.master_weights import ParameterStore

MODEL_PREFIX = "model."
# The four normalisers of a policy, as its attributes and in its checkpoint.
NORMALIZERS = (
    "normalize_inputs",
    "normalize_targets",
    "normalize_discrete_actions",
    "unnormalize_outputs",
)
ACTION_TOKENIZER_FOLDER = "action_tokenizer"
_EMBEDDING_KEY = "gemma3_with_expert.gemma3.model.language_model.embed_tokens.weight"
_HEAD_KEY = "gemma3_with_expert.gemma3.lm_head.weight"
_DISCRETE_HEAD_KEY = "gemma3_with_expert.da_head.bias"


class StatisticsPlace(NamedTuple):
    """A statistic of a normaliser with its place in the checkpoint."""

    key: str
    normalizer: Normalizer
    name: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.normalizer.tensors[self.name].shape


class PolicyCheckpoint:
    """The tensors of a policy's folder, unread.

    Attributes:
        model: by the model's keys, whatever their older names were.
        statistics: by their keys, `normalize_inputs.buffer_state.mean`.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            RuntimeError: files are missing or damaged.
        """
        stored = checkpoint_tensors(folder)
        self.folder = folder
        self.statistics = {key: t for key, t in stored.items() if _is_statistic(key)}
        self.model = engine_keys({k: t for k, t in stored.items() if k not in self.statistics})
        # The head is the embedding; writers that store tied tensors once may keep either name.
        if _EMBEDDING_KEY not in self.model and _HEAD_KEY in self.model:
            self.model[_EMBEDDING_KEY] = self.model[_HEAD_KEY]

    def num_groups(self, normalizers: Mapping[str, Normalizer]) -> int:
        """Rows of the statistics; 1 where there are none, or as before there were groups."""
        for place in _statistics_places(normalizers):
            stored = self.statistics.get(place.key)
            if stored is not None and len(stored.shape) == len(place.stored_shape):
                return stored.shape[0]
        return 1

    @property
    def discrete_vocabulary(self) -> int | None:
        """Entries of the discrete-action vocabulary that the model was trained with."""
        head = self.model.get(_DISCRETE_HEAD_KEY)
        return None if head is None else head.shape[0]

    @property
    def groups(self) -> list[str] | None:
        """Names of the groups that the rows are for; None where none are told."""
        if not any((self.folder / name).is_file() for name in CONFIG_FILES):
            return None
        return read_config(self.folder)[1].get("dataset_names")

    def regroup(
        self, config: PI07Config | PI07PlannerConfig, normalizers: Mapping[str, Normalizer]
    ) -> None:
        """Bring projections and statistics into the order of the configuration's groups.

        Args:
            normalizers: empty when the checkpoint's statistics do not count.

        Raises:
            ValueError: the groups do not tell which row belongs to which.
        """
        groups = group_rows.Groups(self.groups, config.dataset_names)
        if config.per_group_projection:
            self.model |= group_rows.projections(self.model, groups, config.num_groups)
        if normalizers:
            shapes = {place.key: place.stored_shape for place in _statistics_places(normalizers)}
            self.statistics |= group_rows.statistics(self.statistics, groups, shapes)

    def fill(
        self,
        model: PlacedModel,
        normalizers: Mapping[str, Normalizer],
        fresh: Sequence[str],
        ignore: Sequence[str],
        takes_statistics: bool,
    ) -> None:
        """Give every statistic its stored value, and every parameter when the model is filled.

        Args:
            model: its parameters, which may be a part of the checkpoint's, are still without
                storage; those that stay fresh are drawn.
            fresh: patterns of the model's keys that the checkpoint need not have.
            ignore: patterns of keys that it may have beyond the model's.
            takes_statistics: the checkpoint's statistics count; otherwise they are left alone.

        Raises:
            ValueError: keys are missing, unexpected or misshapen, all named at once.
        """
        whole = model.whole().stored_parameters()
        drawn = {p.key for p in whole if p.key not in self.model and _matches(p.key, fresh)}
        wanted = [p for p in whole if p.key not in drawn]
        places = list(_statistics_places(normalizers)) if takes_statistics else []
        stored = self.model | (self.statistics if takes_statistics else {})
        ignored = UNUSED_KEYS | {key for key in stored if _matches(key, ignore)}
        check_keys(self.folder, stored, [*wanted, *places], ignored, "the policy")
        model.materialize_later(
            lambda: [
                *model.fresh_values(drawn),
                *stored_values(
                    (p for p in model.stored_parameters() if p.key not in drawn), self.model
                ),
            ]
        )
        for place in places:
            place.normalizer.tensors[place.name] = _as_float32(self.statistics[place.key])
        for owner, normalizer in normalizers.items() if takes_statistics else ():
            normalizer.check(f"{self.folder}: {owner}")


def takes_statistics(
    skips: bool, stored: PolicyCheckpoint, statistics: Sequence[Statistics] | None
) -> bool:
    """Whether the checkpoint's statistics count, not those that are given.

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
    model: PlacedModel,
    normalizers: Mapping[str, Normalizer],
    write: FileWriter = write_file,
    store: ParameterStore | None = None,
) -> None:
    """Write `model.safetensors`, one file as OpenTau reads it.

    Where ranks hold parts, all of them call this together and share the writing, so that a large
    model is in several files, as HF has them.
    """
    tensors = parameters_to_write(model.stored_parameters(), MODEL_PREFIX, store)
    if model.placement.stage_layers.embedding:
        tensors += [
            TensorToWrite(place.key, place.stored_shape, "F32", lambda place=place: _value(place))
            for place in _statistics_places(normalizers)
        ]
    write_tensors(folder, "model", tensors, sys.maxsize, model.placement.checkpoint_ranks, write)


def _statistics_places(normalizers: Mapping[str, Normalizer]) -> Iterable[StatisticsPlace]:
    for owner, normalizer in normalizers.items():
        for name in normalizer.tensors:
            yield StatisticsPlace(f"{owner}.{name}", normalizer, name)


def _value(place: StatisticsPlace) -> np.ndarray:
    return place.normalizer.tensors[place.name]


def _is_statistic(key: str) -> bool:
    return key.startswith(tuple(f"{name}." for name in NORMALIZERS))


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _as_float32(tensor: StoredTensor) -> np.ndarray:
    # Infinite ones were never given, which is told when they are needed.
    return tensor.read(must_be_finite=False).astype(np.float32)
