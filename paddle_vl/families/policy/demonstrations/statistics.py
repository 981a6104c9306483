"""Statistics of states and actions for a policy's normalizers, and their JSON file.

Names are those of OpenTau's data sets: `mean`, `std`, `min`, `max`, `q01`, `q99` and `count` of
each feature.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.families.policy.demonstrations.sample import DemonstrationSource
from paddle_vl.families.policy.normalize import spread_problem
from paddle_vl.files.text_file import read_json_object, write_text

# Of one group: feature -> statistic -> values, float64 `[dims]`; `count` is int64 `[1]`.
GroupStatistics = dict[str, dict[str, np.ndarray]]


def demonstration_statistics(source: DemonstrationSource) -> dict[str, GroupStatistics]:
    """Statistics of each group by name, in the order of `dataset_index`.

    Over all real frames of the states and real steps of the actions, counted as often as samples
    have them; padding does not count. Reads no images. Quantiles are exact, so the values of all
    samples are in memory at once.

    Raises:
        ValueError: a group has no samples.
    """
    values: dict[int, dict[str, list[np.ndarray]]] = {}
    for number in range(len(source)):
        state, actions, group = source.motion(number)
        of_group = values.setdefault(group, {"state": [], "actions": []})
        of_group["state"].append(state)
        if actions is not None:
            of_group["actions"].append(actions)
    empty = [name for row, name in enumerate(source.group_names) if row not in values]
    if empty:
        raise ValueError(
            f"the groups {empty} have no samples, so no statistics: add their data, or take them "
            "out of the groups' names"
        )
    return {
        name: {
            feature: _statistics(np.concatenate(arrays))
            for feature, arrays in values[row].items()
            if arrays
        }
        for row, name in enumerate(source.group_names)
    }


def write_statistics(path: str | Path, groups: Mapping[str, GroupStatistics]) -> None:
    """Write the statistics of groups as JSON: group -> feature -> statistic -> list."""
    values = {
        name: {
            feature: {stat: array.tolist() for stat, array in stats.items()}
            for feature, stats in group.items()
        }
        for name, group in groups.items()
    }
    write_text(Path(path), json.dumps(values, indent=1) + "\n")


def read_statistics(
    path: str | Path,
    group_names: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, GroupStatistics]:
    """Read a file of `write_statistics`.

    Args:
        group_names: the groups to return, in this order; None for all in the order of the file.
        sizes: required dims of features, by name.

    Raises:
        RuntimeError: there is no such file, or it has another content.
        ValueError: a group is missing, or a statistic has another size, is NaN, or gives a negative
            spread.
    """
    path = Path(path)
    values = read_json_object(
        path, "a statistics file", "group -> feature -> statistic -> list of numbers is needed"
    )
    try:
        groups = {
            name: {
                feature: {
                    stat: np.array(numbers, np.int64 if stat == "count" else np.float64)
                    for stat, numbers in stats.items()
                }
                for feature, stats in group.items()
            }
            for name, group in values.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise RuntimeError(
            f"statistics file {path} cannot be read: {error}; group -> feature -> statistic -> "
            "list of numbers is needed"
        ) from error
    if not groups:
        raise ValueError(f"{path} has statistics of no group: compute them of the data")
    for name, group in groups.items():
        for feature, stats in group.items():
            problem = _size_problem(stats, (sizes or {}).get(feature)) or spread_problem(stats)
            if problem is not None:
                raise ValueError(f"{path}: group {name!r}, feature {feature!r}: {problem}")
    if group_names is None:
        return groups
    if missing := [name for name in group_names if name not in groups]:
        raise ValueError(
            f"{path} has statistics of {list(groups)}, but not of {missing}: compute them of data "
            "that has all groups"
        )
    return {name: groups[name] for name in group_names}


def _statistics(values_ND: np.ndarray) -> dict[str, np.ndarray]:
    values = values_ND.astype(np.float64)
    q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
    return {
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "q01": q01,
        "q99": q99,
        "count": np.array([len(values)], dtype=np.int64),
    }


def _size_problem(stats: Mapping[str, np.ndarray], size: int | None) -> str | None:
    for name, values in stats.items():
        if name == "count":
            continue
        if values.ndim != 1:
            return f"{name} has shape {list(values.shape)}; a list of numbers is needed"
        if size is not None and len(values) != size:
            return f"{name} has {len(values)} numbers, the policy's feature {size}"
    return None
