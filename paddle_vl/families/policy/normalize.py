"""Normalization of states and actions, and back, with the statistics of the sample's group; the
normalizers of a policy and of a planner; and statistics of data, with their files.

A group is a data set, or a robot under one control mode. Every statistic has one row per group,
`[groups, *feature]`. Two conventions, the `config_version` of a checkpoint: version 1 adds 1e-6 to
denominators and maps a feature whose range is zero to 0; version 0 adds 1e-8 and maps it to -1.
Nothing is clamped. Names of statistics are those of OpenTau's data sets. A ValueError names data or
statistics that are missing or do not fit, their group, value and what is needed.

Source: Normalize and Unnormalize of OpenTau.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from paddle_vl.families.policy.features import PolicyConfig, PolicyFeature
from paddle_vl.files.text_file import read_json_object, write_text

# Of one group: feature -> statistic (mean, std, min, max, q01, q99, count) -> values.
Statistics = Mapping[str, Mapping[str, Any]]
# Pairs of a smaller and a larger statistic.
_ORDERED = (("min", "max"), ("q01", "q99"))
# Names of a policy's normalizers in its checkpoint.
NORMALIZERS = (
    "normalize_inputs",
    "normalize_targets",
    "normalize_discrete_actions",
    "unnormalize_outputs",
)
# Statistics of an exported policy, by their keys in a checkpoint.
STATISTICS_FILE = "statistics.safetensors"
# Values of a robot type or control mode that is not known.
_UNKNOWN = ("", "unknown")


def required(batch: Mapping[str, Any], name: str) -> Any:
    """An entry of a raw batch; it raises ValueError if the batch lacks it."""
    if name not in batch:
        raise ValueError(f"the batch has no {name!r}; its entries are {sorted(batch)}")
    return batch[name]


def words_of(batch: Mapping[str, Any], name: str, batch_size: int) -> list[str]:
    """The texts of an entry, one per sample; empty texts if the batch lacks it."""
    words = batch.get(name, "")
    if not isinstance(words, list | tuple | np.ndarray) or getattr(words, "shape", None) == ():
        return [text_of(name, words)] * batch_size
    if len(words) != batch_size:
        raise ValueError(f"{name!r} has {len(words)} texts for a batch of {batch_size}")
    return [text_of(name, word) for word in words]


def text_of(name: str, given: Any) -> str:
    """A text in any of its forms: NumPy's, UTF-8 bytes, or a list or array of one."""
    text = given.item() if isinstance(given, np.ndarray) and given.size == 1 else given
    if isinstance(text, list | tuple) and len(text) == 1:
        return text_of(name, text[0])
    if isinstance(text, str | bytes):
        # NumPy's texts may have what UTF-8 has not.
        with suppress(UnicodeError):
            return (text.encode() if isinstance(text, str) else text).decode()
    raise ValueError(f"{name!r} is {repr(given)[:80]}; a text is needed")


def group_name(robot_type: str | None, control_mode: str | None) -> str | None:
    """Name of the group of a robot under a control mode; None if one of them is not known."""
    parts = [(part or "").strip() for part in (robot_type, control_mode)]
    return None if any(part.casefold() in _UNKNOWN for part in parts) else "::".join(parts)


def group_index(
    batch: Mapping[str, Any],
    batch_size: int,
    config: PolicyConfig,
    num_groups: int,
) -> np.ndarray:
    """Row of the statistics of each sample, `[B]` int64.

    In order of preference: `dataset_index` (training batches have it, since robot and mode may be
    dropped), `robot_type` and `control_mode`, `dataset_repo_id`. A policy with one group, or with
    unnamed groups, takes row 0 without any of them.
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
        robots, modes = (words_of(batch, n, batch_size) for n in ("robot_type", "control_mode"))
        pairs = list(zip(robots, modes, strict=True))
        rows = {name: row for row, name in enumerate(names)}
        return _looked_up([group_name(*pair) for pair in pairs], rows, pairs)
    if "dataset_repo_id" in batch:
        ids = words_of(batch, "dataset_repo_id", batch_size)
        rows = config.dataset_to_norm_index or {name: row for row, name in enumerate(names)}
        return _looked_up(ids, rows, ids)
    raise ValueError(
        f"the policy has statistics of {num_groups} groups ({', '.join(names)}), and the batch "
        "does not say which it belongs to: add dataset_index, or robot_type and control_mode, or "
        "dataset_repo_id"
    )


def _looked_up(
    groups: Sequence[str | None], rows: dict[str, int], given: Sequence[Any]
) -> np.ndarray:
    if unknown := [e for name, e in zip(groups, given, strict=True) if name not in rows]:
        raise ValueError(
            f"the policy has no statistics of {unknown}; it was trained on {sorted(rows)}"
        )
    return np.array([rows[name] for name in groups if name in rows], dtype=np.int64)


STATISTICS_OF_MODE = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILE": ("q01", "q99"),
    "IDENTITY": (),
}
_EPSILON = {0: 1e-8, 1: 1e-6}


class Normalizer:
    """Normalizes the features of a batch, and back.

    Attributes:
        tensors: statistics by their name in a checkpoint, such as `buffer_state.mean`, each
            `[groups, *feature]` float32; infinite until they are set.
    """

    def __init__(
        self,
        features: Mapping[str, PolicyFeature],
        modes: Mapping[str, str],
        version: int,
        num_groups: int = 1,
    ):
        """
        Args:
            modes: by feature type; features of other types are left as they are.
            version: 0 or 1, see the module.
        """
        if version not in _EPSILON:
            raise ValueError(f"normalization version {version} is not one of {list(_EPSILON)}")
        self._epsilon, self._centers_zero_range = _EPSILON[version], version >= 1
        self._modes = {
            name: mode
            for name, feature in features.items()
            if (mode := modes.get(feature.type, "IDENTITY")) != "IDENTITY"
        }
        self._shapes = {name: _statistic_shape(features[name]) for name in self._modes}
        self.num_groups = num_groups
        self.tensors = {
            tensor_name(name, stat): np.full(
                (num_groups, *self._shapes[name]), np.inf, dtype=np.float32
            )
            for name, mode in self._modes.items()
            for stat in STATISTICS_OF_MODE[mode]
        }

    def set_statistics(self, groups: Sequence[Statistics]) -> None:
        """Set the statistics of every group, in the order of the rows.

        Statistics that the modes do not need, such as `count`, may be absent.
        """
        if len(groups) != self.num_groups:
            raise ValueError(
                f"statistics of {len(groups)} groups were given, the policy has {self.num_groups}: "
                "give one for each of dataset_names"
            )
        for name, mode in self._modes.items():
            for stat in STATISTICS_OF_MODE[mode]:
                rows = [self._row(group, number, name, stat) for number, group in enumerate(groups)]
                self.tensors[tensor_name(name, stat)] = np.stack(rows)
        self.check("the statistics that are given", may_be_absent=False)

    def check(self, where: str, *, may_be_absent: bool = True) -> None:
        """Refuse NaN and negative spreads.

        Args:
            where: origin of the statistics, for the message.
            may_be_absent: accept infinite statistics, which were never set.
        """
        for name, mode in self._modes.items():
            tensors = {s: self.tensors[tensor_name(name, s)] for s in STATISTICS_OF_MODE[mode]}
            for number in range(self.num_groups):
                found = {stat: tensor[number] for stat, tensor in tensors.items()}
                is_absent = any(np.isposinf(values).any() for values in found.values())
                problem = None if may_be_absent and is_absent else spread_problem(found)
                if problem is not None:
                    raise ValueError(
                        f"{where}: of {name!r} in group {number} {problem}; compute them again "
                        "from the data"
                    )

    def normalize(self, batch: Mapping[str, Any], index_B: np.ndarray) -> dict[str, Any]:
        """The batch with its features `[B, ..., *feature]` normalized, float32, each sample by its
        int64 row of the statistics; other entries as they were."""
        return self._applied(batch, index_B, inverse=False)

    def unnormalize(self, batch: Mapping[str, Any], index_B: np.ndarray) -> dict[str, Any]:
        """The inverse of `normalize`."""
        return self._applied(batch, index_B, inverse=True)

    def _applied(
        self, batch: Mapping[str, Any], index_B: np.ndarray, inverse: bool
    ) -> dict[str, Any]:
        result = dict(batch)
        for name, mode in self._modes.items():
            x = np.asarray(batch.get(name, ()), dtype=np.float32)
            if not x.size:
                continue
            low, high = (
                self._gathered(name, stat, x, index_B) for stat in STATISTICS_OF_MODE[mode]
            )
            if mode == "MEAN_STD":
                divisor = self._without_zeros(high) + self._epsilon
                result[name] = x * divisor + low if inverse else (x - low) / divisor
                continue
            width = high - low
            divisor = self._without_zeros(width)
            if self._centers_zero_range:
                low = low - 0.5 * (divisor - width)
            divisor = divisor + self._epsilon
            result[name] = (x + 1) / 2 * divisor + low if inverse else (x - low) / divisor * 2 - 1
        return result

    def _without_zeros(self, spread: np.ndarray) -> np.ndarray:
        """Divide a feature that never varies by 1, so that another value does not explode."""
        return np.where(np.abs(spread) < self._epsilon, np.float32(1), spread)

    def _gathered(
        self, name: str, stat: str, values: np.ndarray, index_B: np.ndarray
    ) -> np.ndarray:
        stored = self.tensors[tensor_name(name, stat)]
        if np.isinf(stored).any():
            raise ValueError(
                f"the policy has no statistics of {name!r} ({stat} is infinite): give them when "
                "it is made, or load a checkpoint that holds them"
            )
        feature = stored.shape[1:]
        trailing = values.shape[values.ndim - len(feature) :]
        if values.ndim <= len(feature) or any(
            want not in (1, have) for want, have in zip(feature, trailing, strict=True)
        ):
            raise ValueError(
                f"{name!r} has shape {list(values.shape)}, but its statistics are of "
                f"{list(feature)}: the data must end in that shape"
            )
        rows = stored[index_B]
        between = (1,) * (values.ndim - rows.ndim)
        return rows.reshape(len(rows), *between, *feature)

    def _row(self, group: Statistics, number: int, name: str, stat: str) -> np.ndarray:
        of_feature = group.get(name)
        if of_feature is None or stat not in of_feature:
            has = f"{name!r} has {sorted(of_feature)}" if of_feature else f"it has {sorted(group)}"
            raise ValueError(
                f"the statistics of group {number} have no {stat} of {name!r} ({has}); "
                f"normalization mode {self._modes[name]} needs it: compute it, or choose another"
            )
        row = np.asarray(of_feature[stat], dtype=np.float32)
        if row.shape != self._shapes[name]:
            raise ValueError(
                f"{stat} of {name!r} in the statistics of group {number} has shape "
                f"{list(row.shape)}; the feature needs {list(self._shapes[name])}"
            )
        return row


def tensor_name(feature: str, stat: str) -> str:
    """Name of a statistic in a checkpoint, after the name of its normalizer."""
    return f"buffer_{feature.replace('.', '_')}.{stat}"


def _statistic_shape(feature: PolicyFeature) -> tuple[int, ...]:
    """Images have statistics per channel."""
    return (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape


def spread_problem(statistics: Mapping[str, np.ndarray]) -> str | None:
    """A message about the first statistic that is not finite, too small or contradicts another, of
    arrays by name, any of mean, std, min, max, q01, q99, count; None if there is none."""

    def first(is_wrong: np.ndarray) -> list[tuple[str, Any]]:
        """The first wrong place, as text, and its index."""
        places = np.argwhere(is_wrong).tolist()[:1]
        return [(str(place) if place else "", tuple(place)) for place in places]

    for name, values in statistics.items():
        for place, index in first(~np.isfinite(values)):
            return f"{name}{place} is {values[index]}; it must be a finite number"
        least = {"std": 0, "count": 1}.get(name, -np.inf)
        for place, index in first(values < least):
            return f"{name}{place} is {values[index]}; it must be at least {least}"
    for low, high in _ORDERED:
        lower, upper = statistics.get(low), statistics.get(high)
        if lower is None or upper is None or lower.shape != upper.shape:
            continue
        for place, index in first(lower > upper):
            return (
                f"{low}{place} is {lower[index]} and {high}{place} {upper[index]}; {low} must not "
                f"be above {high}"
            )
    return None


def new_normalizers(config: PolicyConfig, num_groups: int) -> dict[str, Normalizer]:
    """The normalizers of a policy, without statistics; of a planner, which has no actions, the
    first alone."""
    inputs, outputs = config.input_features, config.output_features
    modes, version = config.normalization_mapping, config.normalization_version
    made = [(inputs, modes)]
    if hasattr(config, "max_action_dim"):
        made += [(outputs, modes), (outputs, {"ACTION": "MIN_MAX"}), (outputs, modes)]
    return {
        name: Normalizer(features, of_kind, version, num_groups)
        for name, (features, of_kind) in zip(NORMALIZERS, made, strict=False)
    }


# Of one group: feature -> statistic -> values, float64 `[dims]`; `count` is int64 `[1]`.
GroupStatistics = dict[str, dict[str, np.ndarray]]


def demonstration_statistics(source: Any) -> dict[str, GroupStatistics]:
    """Statistics of each group by name, in the order of `dataset_index`.

    Over all real frames of the states and real steps of the actions, counted as often as samples
    have them; padding does not count. Reads no images. Quantiles are exact, so the values of all
    samples are in memory at once.
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
    path: str | Path, group_names: Sequence[str] | None = None
) -> dict[str, GroupStatistics]:
    """Read a file of `write_statistics`: these groups in this order, or all in that of the file.

    Raises:
        RuntimeError: there is no such file, or it has another content.
    """
    path = Path(path)
    form = "group -> feature -> statistic -> list of numbers is needed"
    values = read_json_object(path, "a statistics file", form)
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
        raise RuntimeError(f"statistics file {path} cannot be read: {error}; {form}") from error
    for name, group in groups.items():
        for feature, stats in group.items():
            if (problem := spread_problem(stats)) is not None:
                raise ValueError(f"{path}: group {name!r}, feature {feature!r}: {problem}")
    names = list(groups) if group_names is None else group_names
    missing = [name for name in names if name not in groups]
    if missing or not groups:
        raise ValueError(
            f"{path} has statistics of {list(groups)}, but not of {missing or 'any group'}: "
            "compute them of data that has all groups"
        )
    return {name: groups[name] for name in names}


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


def statistics_by_key(normalizers: Mapping[str, Normalizer]) -> dict[str, np.ndarray]:
    """The statistics of normalizers by their keys in a checkpoint."""
    return {
        f"{owner}.{name}": value
        for owner, normalizer in normalizers.items()
        for name, value in normalizer.tensors.items()
    }


def set_by_key(normalizers: Mapping[str, Normalizer], found: Mapping[str, np.ndarray]) -> None:
    """Set all statistics of normalizers, found by their keys in a checkpoint."""
    for owner, normalizer in normalizers.items():
        for name in normalizer.tensors:
            normalizer.tensors[name] = found[f"{owner}.{name}"].astype(np.float32)


def save_statistics(normalizers: Mapping[str, Normalizer], file: Path) -> None:
    save_file(statistics_by_key(normalizers), file)


def load_statistics(normalizers: Mapping[str, Normalizer], file: Path) -> None:
    """Set the statistics of normalizers from a file of `save_statistics`.

    Raises:
        RuntimeError: the file is of other normalizers.
    """
    stored = load_file(file)
    for key, value in statistics_by_key(normalizers).items():
        if key not in stored or stored[key].shape != value.shape:
            raise RuntimeError(
                f"{file} has no {key} of shape {list(value.shape)}: export the checkpoint again "
                "(paddle-vl export)"
            )
    set_by_key(normalizers, stored)
