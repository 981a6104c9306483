"""pi07's parameters: which are trained, their keys in OpenTau's checkpoints (without `model.`), and
the files of a policy's folder with weights and statistics, in OpenTau's and LeRobot's format.

In these files keys of the model have the prefix `model.`; statistics have the name of their
normalizer as prefix, such as `normalize_inputs.buffer_state.mean`.

A checkpoint may have been trained on other groups of data than the policy's. The projection of a
single group is used for all groups; an unknown group starts from the first group's projection.
Statistics are measured data, so they are matched by name only.

A file has exactly the tensors that OpenTau writes, those among them that nothing reads.
"""

import fnmatch
import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paddle_vl.checkpoint.reading import (
    ChangedTensor,
    ReadableTensor,
    check_keys,
    checkpoint_tensors,
    stored_values,
)
from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same, low_rank_rules
from paddle_vl.checkpoint.safetensors_io import (
    FLOATING,
    FileWriter,
    StoredTensor,
    TensorToWrite,
    encoded,
    write_file,
)
from paddle_vl.checkpoint.writing import (
    STORED_DTYPES,
    parameters_to_write,
    write_tensors,
)
from paddle_vl.families.pi07.config import (
    Gemma3Config,
    Gemma3WithExpertConfig,
    PI07Config,
    PI07PlannerConfig,
)
from paddle_vl.families.pi07.gemma import engine_key, fit_backbone
from paddle_vl.families.policy.features import CONFIG_FILES, read_config
from paddle_vl.families.policy.normalize import (
    NORMALIZERS,
    Normalizer,
    set_by_key,
    statistics_by_key,
)

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

# Not read, as in OpenTau: the expert predicts no tokens, and the backbone's head is tied to its
# token embedding.
_EXPERT_HEAD_KEY = "gemma3_with_expert.gemma_expert.lm_head.weight"
_HEAD_KEY = "gemma3_with_expert.gemma3.lm_head.weight"
UNUSED_KEYS = frozenset({_EXPERT_HEAD_KEY, _HEAD_KEY})
_RENAMES = (
    ("action_time_mlp_", "time_mlp_"),
    ("paligemma_with_expert.", "gemma3_with_expert."),
)


@dataclass(frozen=True)
class GroupWeights(Same):
    """Weights of groups are `[G, out, in]` in the checkpoint and `[G, in, out]` here."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *shape[:0:-1])

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.swapaxes(1, -1))

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.swapaxes(1, -1))


def checkpoint_rules(config: Gemma3WithExpertConfig, is_grouped: bool = False) -> tuple[Rule, ...]:
    """Rules from parameter names to checkpoint keys, special cases first.

    Args:
        is_grouped: whether projections of states and actions have a group axis.
    """
    size = config.gemma3_config.vision_config.patch_size
    engine, video = "gemma3_with_expert", "prefix.video_encoder"
    backbone, expert = f"{engine}.gemma3.model", f"{engine}.gemma_expert.model"
    tower, actions = f"{backbone}.vision_tower.vision_model", f"{engine}.discrete_action_embedding"
    tables, tokens = f"{tower}.embeddings", f"{backbone}.language_model.embed_tokens"
    projection = GroupWeights() if is_grouped else LinearWeights()
    kernel, linear, same = PatchKernel((3, size, size)), LinearWeights(), Same()
    rows = (
        (f"{video}.tower.patch_embedding.weight", f"{tables}.patch_embedding.weight", kernel),
        (f"{video}.tower.patch_embedding.bias", f"{tables}.patch_embedding.bias", same),
        (f"{video}.tower.position_embedding.*", f"{tables}.position_embedding.*", same),
        (f"{video}.tower.layers.*", f"{tower}.encoder.layers.*", linear),
        (f"{video}.tower.post_layernorm.*", f"{tower}.post_layernorm.*", same),
        (f"{video}.projector.*", f"{backbone}.multi_modal_projector.*", same),
        ("prefix.embed_tokens.table.*", f"{tokens}.*", same),
        ("prefix.discrete_action_embedding.table.*", f"{actions}.*", same),
        ("prefix.state_proj.linear.*", "state_proj.*", projection),
        ("suffix.action_in_proj.linear.*", "action_in_proj.*", projection),
        ("action_out_proj.linear.*", "action_out_proj.*", projection),
        ("suffix.time_mlp_*", "time_mlp_*", linear),
        ("decoder.layers.*", f"{engine}.interleaved_layers.*", linear),
        ("decoder.norm.*", f"{backbone}.language_model.norm.*", same),
        ("decoder.expert_norm.*", f"{expert}.norm.*", linear),
        ("da_head.*", f"{engine}.da_head.*", linear),
        # The planner's head on a pipeline stage without the tied token embedding.
        ("lm_head.*", f"{tokens}.*", same),
    )
    rules = tuple(Rule(*row) for row in rows)
    return (*low_rank_rules(rules), *rules)


def engine_keys(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A checkpoint's tensors by key without `model.`; old names are replaced.

    Weights of the expert's norms are left out: adaptive norms have none.

    Source: the key renames of OpenTau's `from_pretrained`.
    """
    found = {}
    for key, tensor in stored.items():
        key = key.removeprefix("model.")
        for old, new in _RENAMES:
            key = key.replace(old, new)
        is_expert = ".expert_layer." in key or ".gemma_expert." in key
        if not (is_expert and key.endswith(("layernorm.weight", "model.norm.weight"))):
            found[key] = tensor
    return found


logger = logging.getLogger(__name__)
_EMBEDDING_KEY = "gemma3_with_expert.gemma3.model.language_model.embed_tokens.weight"
_DISCRETE_HEAD_KEY = "gemma3_with_expert.da_head.bias"
# The planner has no discrete actions.
_DISCRETE_KEYS = (
    "gemma3_with_expert.discrete_action_embedding.weight",
    "gemma3_with_expert.da_head.weight",
    _DISCRETE_HEAD_KEY,
)
# Entries of the action tokenizer physical-intelligence/fast.
_FAST_ENTRIES = 2048
_VALUES_DRAWN = 1 << 20
_PROJECTIONS = ("state_proj.", "action_in_proj.", "action_out_proj.")


_TOWER = "prefix.video_encoder.tower."
# Parameters of images and language alone.
_BACKBONE = (
    "prefix.video_encoder.",
    "prefix.embed_tokens.",
    "prefix.discrete_action_embedding.",
    "decoder.norm.",
    "da_head.",
)
_REPRESENTATION = (
    "prefix.discrete_action_embedding.",
    "prefix.state_proj.",
    "suffix.action_in_proj.",
    "action_out_proj.",
    "da_head.",
)
# Parameters that only the flow loss reaches, and those that only the token loss reaches.
_FLOW = ("suffix.", "action_out_proj.", "decoder.expert_norm.")
_TOKENS = ("decoder.norm.", "da_head.")
# The parameters of the last backbone layer whose outputs the expert reads.
_KEYS_AND_VALUES = (
    "input_layernorm",
    "self_attn.k_norm",
    "self_attn.qkv_proj.k_proj",
    "self_attn.qkv_proj.v_proj",
)


def is_trained(name: str, config: Gemma3WithExpertConfig) -> bool:
    """Whether the configuration trains the parameter of this name.

    `freeze_vision_encoder` leaves the projector trainable; `train_expert_only` also the projections
    of states, actions and time.

    Source: the training settings of OpenTau's Gemma3WithExpertModel.
    """
    if config.train_state_action_representation_only:
        return name.startswith(_REPRESENTATION)
    if config.train_vision_encoder_only:
        return name.startswith("prefix.video_encoder.")
    if config.train_expert_only and (name.startswith(_BACKBONE) or ".backbone_layer." in name):
        return False
    return not (config.freeze_vision_encoder and name.startswith(_TOWER))


def is_reached(name: str, config: PI07Config | PI07PlannerConfig, losses: Collection[str]) -> bool:
    """Whether a gradient of these losses reaches the parameter of this name.

    As in OpenTau, a gradient that is always zero counts: that of the embedding of discrete actions,
    whose rows the expert does not see. All losses of the planner reach all of its parameters.
    """
    if isinstance(config, PI07PlannerConfig):
        return True
    if name.startswith(_FLOW) or ".expert_layer." in name:
        return "MSE" in losses
    if "CE" in losses:
        return True
    if config.knowledge_insulation or "MSE" not in losses or name.startswith(_TOKENS):
        return False
    last = config.vlm_config.gemma3_config.text_config.num_hidden_layers - 1
    end = name.removeprefix(f"decoder.layers.{last}.backbone_layer.")
    return end == name or end.startswith(_KEYS_AND_VALUES)


class _Wanted(NamedTuple):
    key: str
    stored_shape: tuple[int, ...]


def group_rows(stored: ReadableTensor, rows: Sequence[int], has_groups: bool) -> ReadableTensor:
    """A tensor with or without a group axis as `[groups, ...]` of the policy, from the stored row
    of each of its groups."""

    def chosen(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray((array if has_groups else array[None])[list(rows)])

    return ChangedTensor(stored, (len(rows), *stored.shape[1 if has_groups else 0 :]), chosen)


def is_statistic(key: str) -> bool:
    """Whether the key is of a normalizer's statistics."""
    return key.startswith(tuple(f"{name}." for name in NORMALIZERS))


class PolicyCheckpoint:
    """The tensors of a policy's folder, or of one of Gemma 3, not yet read.

    Attributes:
        is_backbone: whether it is Gemma 3, which has the backbone only.
        model: by the model's keys, old names replaced.
        statistics: by their keys.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            RuntimeError: files are missing or damaged.
        """
        stored = checkpoint_tensors(folder)
        self.folder, self.is_backbone = folder, Gemma3Config.is_folder(folder)
        if self.is_backbone:
            stored = {engine_key(key): tensor for key, tensor in stored.items()}
        self.statistics: dict[str, ReadableTensor] = {
            key: t for key, t in stored.items() if is_statistic(key)
        }
        weights = {key: t for key, t in stored.items() if key not in self.statistics}
        self.model: dict[str, ReadableTensor] = dict(engine_keys(weights))
        # Head and embedding are tied; files with tied tensors stored once may have either name.
        if _EMBEDDING_KEY not in self.model and _HEAD_KEY in self.model:
            self.model[_EMBEDDING_KEY] = self.model[_HEAD_KEY]

    def num_groups(self, normalizers: Mapping[str, Normalizer]) -> int:
        """Number of groups of the stored statistics; 1 without statistics or a group axis."""
        for key, value in statistics_by_key(normalizers).items():
            stored = self.statistics.get(key)
            if stored is not None and len(stored.shape) == value.ndim:
                return stored.shape[0]
        return 1

    @property
    def discrete_vocabulary(self) -> int | None:
        """Size of the discrete-action vocabulary that the model was trained with."""
        head = self.model.get(_DISCRETE_HEAD_KEY)
        return None if head is None else head.shape[0]

    @property
    def widest(self) -> dict[str, ReadableTensor]:
        """The model's tensors of the widest floating point dtype."""
        found = {tensor.dtype for tensor in self.model.values()}
        widest = next((dtype for dtype in FLOATING if dtype in found), None)
        return {key: tensor for key, tensor in self.model.items() if tensor.dtype == widest}

    def kept(self) -> dict[str, TensorToWrite]:
        """The tensors that nothing reads, for another file."""
        names = (_EXPERT_HEAD_KEY, *_DISCRETE_KEYS)
        found = {key: self.model[key] for key in names if key in self.model}
        return {k: t.copied(f"model.{k}") for k, t in found.items() if isinstance(t, StoredTensor)}

    def _regroup(
        self, config: PI07Config | PI07PlannerConfig, wanted: Mapping[str, np.ndarray]
    ) -> None:
        """Bring projections and statistics into the order of the configuration's groups."""
        names, stored = config.dataset_names, None
        if any((self.folder / name).is_file() for name in CONFIG_FILES):
            stored = read_config(self.folder)[1].get("dataset_names")
        keeps_order = names is None or list(stored or ()) == list(names)
        for key, tensor in self.model.items() if config.per_group_projection else ():
            if not key.startswith(_PROJECTIONS):
                continue
            has_groups = len(tensor.shape) > (2 if key.endswith(".weight") else 1)
            if not has_groups or tensor.shape[0] == 1:
                self.model[key] = group_rows(tensor, (0,) * config.num_groups, has_groups)
            elif not keeps_order:
                rows = _rows(key, stored, names, may_be_new=True)
                self.model[key] = group_rows(tensor, rows, has_groups=True)
        for key, tensor in self.statistics.items() if wanted else ():
            if key in wanted and wanted[key].shape == (1, *tensor.shape):
                # Older checkpoints have no group axis.
                self.statistics[key] = group_rows(tensor, (0,), has_groups=False)
            elif not keeps_order and (tensor.shape[:1] != (1,) or len(names or ()) > 1):
                rows = _rows(key, stored, names, may_be_new=False)
                self.statistics[key] = group_rows(tensor, rows, has_groups=True)

    def fill(
        self,
        model: Any,
        normalizers: Mapping[str, Normalizer],
        fresh: Sequence[str],
        ignore: Sequence[str],
    ) -> None:
        """Set the normalizers' statistics now, and the model's weights when it is materialized.

        Args:
            model: a `PolicyModel`; its parameters, which may be shards, have no storage yet.
            normalizers: empty if the checkpoint's statistics are not used.
            fresh: patterns of the model's keys that the checkpoint may lack; these are drawn.
            ignore: patterns of the checkpoint's keys that the model may lack.

        Raises:
            ValueError: keys are missing, unexpected or misshapen; names all of them. Or the
                checkpoint does not name the groups of its rows, or lacks statistics of one.
        """
        by_key = statistics_by_key(normalizers)
        if self.is_backbone:
            fresh = [*fresh, *fit_backbone(self.model, model.config, self.folder)]
        self._regroup(model.config, by_key)
        whole = model.whole().stored_parameters()
        drawn = {p.key for p in whole if p.key not in self.model and _matches(p.key, fresh)}
        wanted = [p for p in whole if p.key not in drawn]
        entries = [_Wanted(key, value.shape) for key, value in by_key.items()]
        stored = self.model | (self.statistics if normalizers else {})
        ignored = UNUSED_KEYS | {key for key in stored if _matches(key, ignore)}
        check_keys(self.folder, stored, [*wanted, *entries], ignored, "the policy")
        model.materialize_later(
            lambda: [
                *model.fresh_values(drawn),
                *stored_values(
                    (p for p in model.base_parameters() if p.key not in drawn), self.model
                ),
            ]
        )
        # Infinite statistics mark absent ones; `Normalizer.normalize` raises if it needs them.
        found = {key: self.statistics[key].read(must_be_finite=False) for key in by_key}
        set_by_key(normalizers, found)
        for owner, normalizer in normalizers.items():
            normalizer.check(f"{self.folder}: {owner}")


def _rows(
    key: str, stored: Sequence[str] | None, names: Sequence[str] | None, may_be_new: bool
) -> tuple[int, ...]:
    """Stored row of each of the policy's groups."""
    assert names is not None, "groups without names keep their order"
    numbers = {name: number for number, name in enumerate(stored or ())}
    new = [name for name in names if name not in numbers]
    if new and not may_be_new:
        raise ValueError(
            f"the checkpoint has statistics of {stored or 'groups without names'}, not of "
            f"{new}: give statistics of every group, and set skip_normalization_weights"
        )
    if not numbers:
        raise ValueError(
            f"{key} of the checkpoint has rows of several groups, and its configuration has no "
            f"dataset_names to tell which is which of the policy's {names}"
        )
    if new:
        logger.info("%s: new groups %s begin as %r", key, new, next(iter(numbers)))
    return tuple(numbers.get(name, 0) for name in names)


def write_policy(
    folder: Path,
    model: Any,
    normalizers: Mapping[str, Normalizer],
    write: FileWriter = write_file,
    store: "ParameterStore | None" = None,
    kept: Mapping[str, TensorToWrite] = {},
    dtypes: Mapping[str, str] = {},
) -> None:
    """Write weights and statistics, see `BasePolicy.save_pretrained`.

    Args:
        kept: see `PolicyCheckpoint.kept`.
        dtypes: by keys; of others, those of parameters, and float32 of statistics.
    """
    if model.adapter is None:
        tensors = parameters_to_write(model.stored_parameters(), "model.", store)
    else:
        from paddle_vl.families.adapter import merged_tensors

        tensors = merged_tensors(model, store)
    tensors = [_as_stored(tensor, dtypes) for tensor in tensors]
    if model.placement.stage_layers.embedding:
        unread = _unread_shapes(model.config)
        dtype = STORED_DTYPES[model.prefix.embed_tokens.weight.dtype]
        tensors += [kept.get(k) or _drawn_tensor(f"model.{k}", unread[k], dtype) for k in unread]
        tensors += statistics_to_write(normalizers, dtypes)
    ranks = model.placement.checkpoint_ranks
    # OpenTau reads no index.
    write_tensors(folder, "model", tensors, sys.maxsize, ranks, write)


def statistics_to_write(
    normalizers: Mapping[str, Normalizer], dtypes: Mapping[str, str] = {}
) -> list[TensorToWrite]:
    """The statistics of normalizers under their keys in a checkpoint; `dtypes` as above."""
    tensors = []
    for key, value in statistics_by_key(normalizers).items():
        dtype = dtypes.get(key, "F32")
        tensors.append(TensorToWrite(key, value.shape, dtype, partial(encoded, value, dtype)))
    return tensors


def _as_stored(tensor: TensorToWrite, dtypes: Mapping[str, str]) -> TensorToWrite:
    """A parameter under OpenTau's name, in its dtype of `dtypes`."""
    key = tensor.name.removeprefix("model.")
    if key == _EMBEDDING_KEY:
        # torch writes the first name of a tied tensor.
        tensor = tensor._replace(name=f"model.{_HEAD_KEY}")
    dtype = dtypes.get(key, tensor.dtype)
    if dtype == tensor.dtype:
        return tensor
    return tensor._replace(dtype=dtype, arrange=lambda array: encoded(tensor.arrange(array), dtype))


def _unread_shapes(config: PI07Config | PI07PlannerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of OpenTau's parameters that no model reads."""
    vlm = config.vlm_config
    expert, width = vlm.gemma_expert_config, vlm.gemma3_config.text_config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if not vlm.disable_action_expert:
        shapes[_EXPERT_HEAD_KEY] = (expert.vocab_size, expert.hidden_size)
    if isinstance(config, PI07PlannerConfig):
        entries = vlm.discrete_action_vocab_size or _FAST_ENTRIES
        shapes |= dict.fromkeys(_DISCRETE_KEYS, (entries, width))
        shapes[_DISCRETE_HEAD_KEY] = (entries,)
    return shapes


def _drawn_tensor(name: str, shape: tuple[int, ...], dtype: str) -> TensorToWrite:
    """Drawn when it is written, the same every time; a large one repeats its first values."""

    def draw(empty: np.ndarray) -> np.ndarray:
        drawn = np.random.default_rng(0).normal(0, 0.02, min(math.prod(shape), _VALUES_DRAWN))
        return np.resize(encoded(drawn, dtype), shape)

    return TensorToWrite(name, shape, dtype, lambda: np.empty(0), draw)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
