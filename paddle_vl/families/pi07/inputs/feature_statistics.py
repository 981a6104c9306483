"""Statistics of a data set's features: those of several data sets as one."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)
# Of one data set: feature -> statistic (mean, std, min, max, q01, q99, count) -> values.
Statistics = Mapping[str, Mapping[str, Any]]


def pooled_statistics(
    statistics: Sequence[Statistics], weights: Sequence[float] | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """The statistics of several data sets taken together.

    Means and variances are those of the joined data (Chan's formula), minimum and maximum the
    outer ones, quantiles the weighted means of the parts' quantiles, which is an approximation.

    Args:
        weights: how many samples each part stands for; None for the `count` of each feature.
            Where a part has no `count`, all parts count alike, and a warning says so.

    Raises:
        ValueError: no parts, another number of weights, or parts that do not have the same
            features and sizes.
    """
    if not statistics:
        raise ValueError("there are no statistics to pool; at least one data set is needed")
    if weights is not None and len(weights) != len(statistics):
        raise ValueError(f"{len(weights)} weights were given for {len(statistics)} data sets")
    features = [set(part) for part in statistics]
    if any(names != features[0] for names in features):
        differing = sorted(set.union(*features) - set.intersection(*features))
        raise ValueError(
            f"features {differing} are not in the statistics of every data set; leave them out, or "
            "compute them for all"
        )
    return {
        name: _pooled([part[name] for part in statistics], weights, name) for name in statistics[0]
    }


def _pooled(
    parts: Sequence[Mapping[str, Any]], weights: Sequence[float] | None, name: str
) -> dict[str, np.ndarray]:
    arrays = [{stat: np.asarray(v, dtype=np.float64) for stat, v in p.items()} for p in parts]
    common = set.intersection(*[set(part) for part in arrays])
    shapes = {stat: {part[stat].shape for part in arrays} for stat in common - {"count"}}
    if mixed := {stat: sorted(found) for stat, found in shapes.items() if len(found) > 1}:
        raise ValueError(
            f"the statistics of {name!r} have different shapes and cannot be pooled: {mixed}"
        )
    if weights is not None:
        share = np.asarray(weights, dtype=np.float64)
    elif "count" in common:
        share = np.array([float(part["count"].reshape(-1)[0]) for part in arrays])
    else:
        logger.warning("statistics of %r have no count; their data sets count alike", name)
        share = np.ones(len(arrays))
    share = share / share.sum()

    def weighted(values: Sequence[np.ndarray]) -> np.ndarray:
        return sum(s * v for s, v in zip(share, values, strict=True))

    pooled: dict[str, np.ndarray] = {}
    for stat, outer in (("min", np.minimum), ("max", np.maximum)):
        if stat in common:
            pooled[stat] = outer.reduce([part[stat] for part in arrays])
    if {"mean", "std"} <= common:
        mean = weighted([part["mean"] for part in arrays])
        deviations = [part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in arrays]
        pooled |= {"mean": mean, "std": np.sqrt(weighted(deviations))}
    for stat in sorted(common):
        if stat.startswith("q"):
            pooled[stat] = weighted([part[stat] for part in arrays])
    if "count" in common:
        pooled["count"] = np.sum([part["count"] for part in arrays], axis=0)
    return {stat: v.astype(np.float32) if stat != "count" else v for stat, v in pooled.items()}
