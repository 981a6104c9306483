"""Which group of data, and so which row of the statistics, a sample belongs to."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig

# What a data set says when it does not know its robot or its control mode.
_UNKNOWN = ("", "unknown")


def group_name(robot_type: str | None, control_mode: str | None) -> str | None:
    """The group of data of one robot under one control mode; None when one is not known."""
    parts = [(part or "").strip() for part in (robot_type, control_mode)]
    return None if any(part.casefold() in _UNKNOWN for part in parts) else "::".join(parts)


def group_index(
    batch: Mapping[str, Any],
    batch_size: int,
    config: PI07Config | PI07PlannerConfig,
    num_groups: int,
) -> np.ndarray:
    """The row of every sample, `[B]` int64.

    `dataset_index` says it outright, as training batches do, whose robot and mode may have been
    dropped. Otherwise robot and mode say it, else the data set's name; a policy of one group, or
    whose groups have no names, needs no more and takes the first row.

    Raises:
        ValueError: the batch names no group, or one that the policy was not trained on.
    """
    names = config.dataset_names
    if "dataset_index" in batch:
        index = np.asarray(batch["dataset_index"], dtype=np.int64).reshape(-1)
        if index.shape != (batch_size,) or index.min() < 0 or index.max() >= num_groups:
            raise ValueError(
                f"dataset_index is {index.tolist()}; a batch of {batch_size} needs one row for "
                f"each sample, from 0 to {num_groups - 1}"
            )
        return index
    if num_groups == 1 or names is None:
        return np.zeros(batch_size, dtype=np.int64)
    if "robot_type" in batch and "control_mode" in batch:
        robots, modes = (
            _repeated(batch[name], name, batch_size) for name in ("robot_type", "control_mode")
        )
        pairs = list(zip(robots, modes, strict=True))
        rows = {name: row for row, name in enumerate(names)}
        return _looked_up([group_name(*pair) for pair in pairs], rows, pairs)
    if "dataset_repo_id" in batch:
        asked = _repeated(batch["dataset_repo_id"], "dataset_repo_id", batch_size)
        rows = config.dataset_to_norm_index or {name: row for row, name in enumerate(names)}
        return _looked_up(asked, rows, asked)
    raise ValueError(
        f"the policy has statistics of {num_groups} groups ({', '.join(names)}), and the batch "
        "does not say which it belongs to: add dataset_index, or robot_type and control_mode, or "
        "dataset_repo_id"
    )


def _looked_up(
    asked: Sequence[str | None], rows: Mapping[str, int], said: Sequence[Any]
) -> np.ndarray:
    unknown = [what for name, what in zip(asked, said, strict=True) if name not in rows]
    if unknown:
        raise ValueError(
            f"the policy has no statistics of {unknown}; it was trained on {sorted(rows)}"
        )
    return np.array([rows[name] for name in asked], dtype=np.int64)


def _repeated(words: str | Sequence[str], name: str, batch_size: int) -> list[str]:
    words = [words] * batch_size if isinstance(words, str) else list(words)
    if len(words) != batch_size:
        raise ValueError(f"{name!r} has {len(words)} entries for a batch of {batch_size}")
    return words
