"""Statistics of a LeRobot dataset: those in its `meta`, and new ones computed from its frames.

What lerobot wrote may be wrong: version 0.4.4 has standard deviations of images near 0, and the
quantiles of a whole dataset are means or bounds of those of its episodes. Statistics that
`paddle-vl compute-stats` wrote beside them take precedence, feature by feature.

Quantiles are exact. The numbers of one feature are in memory at a time, in float64. Pixels have so
few values that one histogram is enough; depth counts in whole millimetres up to 65 m.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot.dataset import LeRobotDataset
from paddle_vl.data.lerobot.depth import MM_PER_M, DepthUnit, in_unit
from paddle_vl.data.lerobot.metadata import Metadata, lines
from paddle_vl.data.worker_pool import results_in_order
from paddle_vl.files.text_file import read_json_object, write_text

STATS = "meta/stats.json"
STATS_OF_EPISODES = "meta/episodes_stats.jsonl"
RECOMPUTED = "meta/recomputed_stats.json"
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
# Images in memory at once.
_FRAMES_AT_ONCE = 16
_DEPTH_LEVELS = 1 << 16
_PIXEL_LEVELS = 1 << 8

# Statistic -> values in the feature's shape, (channels, 1, 1) of images; `count` is [1].
FeatureStatistics = dict[str, np.ndarray]
Statistics = dict[str, FeatureStatistics]


def stored_statistics(metadata: Metadata, depth_unit: DepthUnit = "mm") -> Statistics:
    """Statistics that lerobot wrote, as it gives them; of version 2.1 those of all episodes pooled.
    None without a file of them.

    Raises:
        RuntimeError: a file is damaged.
    """
    file = metadata.root / STATS_OF_EPISODES
    if metadata.version == "v2.1" and file.is_file():
        with _in_form(file):
            of_episodes = [_arrays(line["stats"]) for line in lines(file)]
            found = {
                name: pooled(
                    [stats[name] for stats in of_episodes], [s[name]["count"] for s in of_episodes]
                )
                for name in of_episodes[0]
            }
    else:
        found = read_statistics(metadata.root / STATS)
    for name, feature in metadata.features.items():
        stored = feature.info.get("depth_unit")
        if feature.is_depth and name in found and stored not in (None, depth_unit):
            # lerobot multiplies, which rounds otherwise than a division.
            factor = MM_PER_M if stored == "m" else 1 / MM_PER_M
            found[name] = {
                stat: values if stat == "count" else values * factor
                for stat, values in found[name].items()
            }
    return found


def statistics(metadata: Metadata) -> Statistics:
    """Recomputed statistics where there are any, otherwise stored ones."""
    return stored_statistics(metadata) | read_statistics(metadata.root / RECOMPUTED)


def has_recomputed(metadata: Metadata) -> bool:
    """Whether `compute-stats` wrote statistics for the dataset."""
    return (metadata.root / RECOMPUTED).is_file()


def pooled(each: Sequence[FeatureStatistics], weights: Sequence[Any]) -> FeatureStatistics:
    """Statistics of all values of several sets. Of quantiles, which all sets must have, the
    weighted mean.

    Args:
        weights: number of values of each set.
    """
    shape = np.shape(each[0]["mean"])
    shares = np.stack([np.broadcast_to(weight, shape) for weight in weights])
    total = shares.sum(axis=0)

    def mean(values: np.ndarray) -> np.ndarray:
        return (values * shares).sum(axis=0) / total

    stacked = {
        stat: np.stack([stats[stat] for stats in each])
        for stat in each[0]
        if all(stat in stats for stats in each)
    }
    average = mean(stacked["mean"])
    found = {
        "min": stacked["min"].min(axis=0),
        "max": stacked["max"].max(axis=0),
        "mean": average,
        "std": np.sqrt(mean(stacked["std"] ** 2 + (stacked["mean"] - average) ** 2)),
        "count": np.sum(np.stack([np.reshape(weight, [-1])[:1] for weight in weights]), axis=0),
    }
    return found | {stat: mean(stacked[stat]) for stat in QUANTILES if stat in stacked}


def read_statistics(file: Path) -> Statistics:
    """Statistics in lerobot's form; none if there is no such file.

    Raises:
        RuntimeError: it is damaged.
    """
    if not file.is_file():
        return {}
    values = read_json_object(file, "a dataset's statistics", "compute them again")
    with _in_form(file):
        return _arrays(values)


@contextmanager
def _in_form(file: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{file} has no statistics in lerobot's form ({type(error).__name__}: {error}): fetch "
            "the dataset again, or remove the file and compute them with paddle-vl compute-stats"
        ) from error


def _arrays(values: Mapping[str, Mapping[str, Any]]) -> Statistics:
    return {
        name: {
            stat: np.asarray(numbers, np.int64 if stat == "count" else np.float64)
            for stat, numbers in stats.items()
        }
        for name, stats in values.items()
    }


def write_statistics(found: Statistics, file: Path) -> None:
    """Write statistics in lerobot's form."""
    values = {
        name: {stat: array.tolist() for stat, array in stats.items()}
        for name, stats in found.items()
    }
    write_text(file, json.dumps(values, indent=1) + "\n")


def recomputed_statistics(
    dataset: LeRobotDataset, with_images: bool = True, num_workers: int = 0
) -> Statistics:
    """Statistics of all numbers and images of a dataset, in its stored units.

    Args:
        num_workers: processes that decode images; 0 decodes them in this one.

    Raises:
        BadSampleError: a frame cannot be read, or a number is not finite; says which.
    """
    numbers = [name for name, feature in dataset.features.items() if feature.is_number]
    found = {name: _of_numbers(dataset, name) for name in numbers}
    cameras = [name for name, feature in dataset.features.items() if feature.is_camera]
    for name in cameras if with_images else ():
        jobs = ((name, place) for place in range(len(dataset.episodes)))
        counts = sum(results_in_order(_level_counts, dataset, jobs, num_workers))
        feature = dataset.features[name]
        if feature.is_depth:
            unit = feature.info.get("depth_unit", "mm")
            levels = in_unit(np.arange(_DEPTH_LEVELS, dtype=np.float64), "mm", unit)
        else:
            levels = np.arange(_PIXEL_LEVELS) / 255
        found[name] = image_statistics(np.asarray(counts), levels, len(dataset))
    return found


def image_statistics(counts: np.ndarray, levels: np.ndarray, num_images: int) -> FeatureStatistics:
    """Statistics of images in which every level is so often.

    Args:
        counts: `[channels, levels]`.
    """
    of_channels = [_of_levels(channel, levels) for channel in counts]
    found = {
        stat: np.reshape([stats[stat] for stats in of_channels], [-1, 1, 1])
        for stat in of_channels[0]
    }
    return found | {"count": np.array([num_images])}


def _level_counts(dataset: LeRobotDataset, name: str, place: int) -> np.ndarray:
    """How often an episode's images have each level, `[channels, levels]`."""
    episode, feature = dataset.episodes[place], dataset.features[name]
    counts: Any = 0
    for start in range(0, episode.length, _FRAMES_AT_ONCE):
        rows = np.arange(start, min(start + _FRAMES_AT_ONCE, episode.length))
        with dataset.at_place(int(dataset.first(place) + start)):
            images = np.stack(dataset.values(episode, name, rows))
        if feature.is_depth:
            millimetres = in_unit(images, dataset.depth_unit, "mm")
            channels, levels = [np.rint(millimetres)], _DEPTH_LEVELS
        else:
            channels, levels = np.moveaxis(images, -1, 0), _PIXEL_LEVELS
        pixels = [np.clip(each, 0, levels - 1).astype(np.int64).ravel() for each in channels]
        counts = counts + np.stack([np.bincount(each, minlength=levels) for each in pixels])
    return counts


def _of_levels(counts: np.ndarray, levels: np.ndarray) -> dict[str, float]:
    """Statistics of the levels that occur so often."""
    total, there = int(counts.sum()), np.flatnonzero(counts)
    mean = float((levels * counts).sum() / total)
    found = {
        "min": levels[there[0]],
        "max": levels[there[-1]],
        "mean": mean,
        "std": np.sqrt(((levels - mean) ** 2 * counts).sum() / total),
    }
    ends = counts.cumsum()
    for stat, share in QUANTILES.items():
        position = share * (total - 1)
        ranks = int(position), min(int(position) + 1, total - 1)
        low, high = levels[np.searchsorted(ends, ranks, side="right")]
        found[stat] = low + (high - low) * (position % 1)
    return found


def _of_numbers(dataset: LeRobotDataset, name: str) -> FeatureStatistics:
    """Statistics of a feature's numbers in all frames."""
    pieces = []
    for place, episode in enumerate(dataset.episodes):
        with dataset.at_place(first := dataset.first(place)):
            found = dataset.values(episode, name, np.arange(episode.length))
        piece = np.reshape(found, [episode.length, -1]).astype(np.float64)
        if len(wrong := np.argwhere(~np.isfinite(piece))):
            row, column = wrong[0]
            raise BadSampleError(
                "not_finite",
                f"{name!r} holds {piece[row, column]}: correct it, or leave the episode out "
                "(--excluded-episodes)",
                dataset.place(first + int(row)),
            )
        pieces.append(piece)
    values = np.concatenate(pieces)
    stats = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0)}
    stats["std"] = values.std(0)
    stats |= zip(QUANTILES, np.quantile(values, [*QUANTILES.values()], axis=0), strict=True)
    shape = dataset.features[name].shape
    of_shape = {stat: each.reshape(shape) for stat, each in stats.items()}
    return of_shape | {"count": np.array([len(values)])}
