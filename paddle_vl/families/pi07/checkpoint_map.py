"""pi07's parameters under OpenTau's checkpoint keys (without `model.`), and rows of groups by name.

A checkpoint may have been trained on other groups of data than the policy's. The projection of a
single group is used for all groups; an unknown group starts from the first group's projection.
Statistics are measured data, so they are matched by name only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_vl.checkpoint.reading import ReadableTensor
from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same
from paddle_vl.checkpoint.safetensors_io import StoredTensor
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig

logger = logging.getLogger(__name__)
_PROJECTIONS = ("state_proj.", "action_in_proj.", "action_out_proj.")
# Not read, as in OpenTau: the expert predicts no tokens, and the backbone's head is tied to its
# token embedding.
UNUSED_KEYS = frozenset(
    {"gemma3_with_expert.gemma_expert.lm_head.weight", "gemma3_with_expert.gemma3.lm_head.weight"}
)
_RENAMES = (
    ("action_time_mlp_", "time_mlp_"),
    ("paligemma_with_expert.", "gemma3_with_expert."),
)


@dataclass(frozen=True)
class GroupWeights:
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
    engine = "gemma3_with_expert"
    backbone, expert = f"{engine}.gemma3.model", f"{engine}.gemma_expert.model"
    tower, ours = f"{backbone}.vision_tower.vision_model", "prefix.video_encoder.tower"
    projection = GroupWeights() if is_grouped else LinearWeights()
    return (
        Rule(
            f"{ours}.patch_embedding.weight",
            f"{tower}.embeddings.patch_embedding.weight",
            PatchKernel((3, size, size)),
        ),
        Rule(f"{ours}.patch_embedding.bias", f"{tower}.embeddings.patch_embedding.bias", Same()),
        Rule(
            f"{ours}.position_embedding.weight",
            f"{tower}.embeddings.position_embedding.weight",
            Same(),
        ),
        Rule(f"{ours}.layers.*", f"{tower}.encoder.layers.*", LinearWeights()),
        Rule(f"{ours}.post_layernorm.*", f"{tower}.post_layernorm.*", Same()),
        Rule("prefix.video_encoder.projector.*", f"{backbone}.multi_modal_projector.*", Same()),
        Rule("prefix.embed_tokens.table.*", f"{backbone}.language_model.embed_tokens.*", Same()),
        Rule(
            "prefix.discrete_action_embedding.table.*",
            f"{engine}.discrete_action_embedding.*",
            Same(),
        ),
        Rule("prefix.state_proj.linear.*", "state_proj.*", projection),
        Rule("suffix.action_in_proj.linear.*", "action_in_proj.*", projection),
        Rule("action_out_proj.linear.*", "action_out_proj.*", projection),
        Rule("suffix.time_mlp_*", "time_mlp_*", LinearWeights()),
        Rule("decoder.layers.*", f"{engine}.interleaved_layers.*", LinearWeights()),
        Rule("decoder.norm.*", f"{backbone}.language_model.norm.*", Same()),
        Rule("decoder.expert_norm.*", f"{expert}.norm.*", LinearWeights()),
        Rule("da_head.*", f"{engine}.da_head.*", LinearWeights()),
        # The planner's head on a pipeline stage without the tied token embedding.
        Rule("lm_head.*", f"{backbone}.language_model.embed_tokens.*", Same()),
    )


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


@dataclass(frozen=True)
class GroupRows:
    """A stored tensor, with or without a group axis, read as `[groups, ...]` of the policy.

    Attributes:
        rows: stored row of each of the policy's groups.
    """

    stored: ReadableTensor
    rows: tuple[int, ...]
    has_groups: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *(self.stored.shape[1:] if self.has_groups else self.stored.shape))

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        """As `StoredTensor.read`."""
        array = self.stored.read(must_be_finite=must_be_finite)
        array = array if self.has_groups else array[None]
        return np.ascontiguousarray(array[list(self.rows)])


@dataclass(frozen=True)
class Groups:
    """Group names of a checkpoint and of the policy, in the order of the rows; None if unnamed."""

    stored: Sequence[str] | None
    policy: Sequence[str] | None

    @property
    def are_same(self) -> bool:
        """Whether the policy has the checkpoint's rows; True if its groups are unnamed."""
        return self.policy is None or list(self.stored or ()) == list(self.policy)


def grouped_projections(
    stored: Mapping[str, ReadableTensor], groups: Groups, num_groups: int
) -> dict[str, GroupRows]:
    """Stored projections, by key, for a policy with one projection per group.

    Raises:
        ValueError: the checkpoint has rows of several groups and does not name them.
    """
    found = {}
    for key, tensor in stored.items():
        if not key.startswith(_PROJECTIONS):
            continue
        has_groups = len(tensor.shape) > (2 if key.endswith(".weight") else 1)
        if not has_groups or tensor.shape[0] == 1:
            found[key] = GroupRows(tensor, (0,) * num_groups, has_groups)
        elif not groups.are_same:
            found[key] = GroupRows(tensor, _rows(key, groups, may_be_new=True))
    return found


def grouped_statistics(
    stored: Mapping[str, ReadableTensor], groups: Groups, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, GroupRows]:
    """Stored statistics, by key, in the order of the policy's groups.

    Args:
        shapes: of the policy's statistics by key; older checkpoints have no group axis.

    Raises:
        ValueError: the checkpoint lacks a group, or does not name its groups.
    """
    found = {}
    for key, tensor in stored.items():
        if key in shapes and tensor.shape == shapes[key][1:] and shapes[key][0] == 1:
            found[key] = GroupRows(tensor, (0,), has_groups=False)
        elif not groups.are_same and (tensor.shape[:1] != (1,) or len(groups.policy or ()) > 1):
            found[key] = GroupRows(tensor, _rows(key, groups, may_be_new=False))
    return found


def _rows(key: str, groups: Groups, may_be_new: bool) -> tuple[int, ...]:
    assert groups.policy is not None, "groups without names keep their order"
    numbers = {name: number for number, name in enumerate(groups.stored or ())}
    new = [name for name in groups.policy if name not in numbers]
    if new and not may_be_new:
        raise ValueError(
            f"the checkpoint has statistics of {groups.stored or 'groups without names'}, not of "
            f"{new}: give statistics of every group, and set skip_normalization_weights"
        )
    if not numbers:
        raise ValueError(
            f"{key} of the checkpoint has rows of several groups, and its configuration has no "
            f"dataset_names to tell which is which of the policy's {groups.policy}"
        )
    if new:
        logger.info("%s: new groups %s begin as %r", key, new, next(iter(numbers)))
    return tuple(numbers.get(name, 0) for name in groups.policy)
