"""Checkpoints whose groups of data are not the policy's: rows by name.

A projection of one group serves all; a group that the checkpoint does not know begins as its first.
Statistics are measured, so they are taken by name only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_vl.checkpoint.safetensors_io import StoredTensor

logger = logging.getLogger(__name__)
_PROJECTIONS = ("state_proj.", "action_in_proj.", "action_out_proj.")


@dataclass(frozen=True)
class GroupRows:
    """Rows of a stored tensor `[groups, ...]`, or one that has no groups, as it is read.

    Attributes:
        rows: of the groups, in the policy's order.
    """

    stored: StoredTensor
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
    """Names of the groups of a checkpoint and of the policy; None where they have none."""

    stored: Sequence[str] | None
    policy: Sequence[str] | None

    @property
    def are_same(self) -> bool:
        """Whether rows mean the same, as far as the names tell."""
        return self.policy is None or list(self.stored or ()) == list(self.policy)


def projections(
    stored: Mapping[str, StoredTensor], groups: Groups, num_groups: int
) -> dict[str, GroupRows]:
    """The projections of a checkpoint for a policy with one of each for every group.

    Raises:
        ValueError: the checkpoint does not name the groups that its several rows are for.
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


def statistics(
    stored: Mapping[str, StoredTensor], groups: Groups, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, GroupRows]:
    """The statistics of a checkpoint in the order of the policy's groups.

    Args:
        shapes: of the policy's statistics by key; older checkpoints have them without groups.

    Raises:
        ValueError: the checkpoint has none of a group, or does not name its groups.
    """
    found = {}
    for key, tensor in stored.items():
        if key in shapes and tensor.shape == shapes[key][1:] and shapes[key][0] == 1:
            found[key] = GroupRows(tensor, (0,), has_groups=False)
        elif not groups.are_same and (tensor.shape[:1] != (1,) or len(groups.policy) > 1):
            found[key] = GroupRows(tensor, _rows(key, groups, may_be_new=False))
    return found


def _rows(key: str, groups: Groups, may_be_new: bool) -> tuple[int, ...]:
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
        logger.info("%s: new groups %s begin as %r", key, new, groups.stored[0])
    return tuple(numbers.get(name, 0) for name in groups.policy)
