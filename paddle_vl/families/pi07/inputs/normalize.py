"""Normalisation of states and actions, and back, by the statistics of the data set they are of.

Every statistic has one row for each group of data sets, `[groups, *feature]`, and a sample takes
the row of its group. Two conventions, the `config_version` of a checkpoint: version 1 adds 1e-6 to
denominators and maps a feature whose range is zero to 0; version 0 adds 1e-8 and maps it to -1.
Nothing is clamped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.pi07.features import PolicyFeature, check_normalization
from paddle_vl.families.pi07.inputs.feature_statistics import Statistics
from paddle_vl.files.spreads import spread_problem

STATISTICS_OF_MODE = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILE": ("q01", "q99"),
    "IDENTITY": (),
}
_EPSILON = {0: 1e-8, 1: 1e-6}


class Normalizer:
    """Normalises the features of a batch, and their inverse.

    Attributes:
        tensors: the statistics by their name in a checkpoint, `buffer_state.mean`, as
            `[groups, *feature]` float32; infinite until they are given.
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
            modes: by feature type; a type that is not named is left as it is.

        Raises:
            ValueError: unknown modes or versions.
        """
        check_normalization(modes)
        if version not in _EPSILON:
            raise ValueError(f"normalisation version {version} is not one of {list(_EPSILON)}")
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
        """Take the statistics of every group, in the order of their rows.

        Statistics that the modes do not need, `count` among them, may be there or not.

        Raises:
            ValueError: another number of groups; a feature or statistic is absent, has another
                size, or contradicts itself: a negative spread, NaN.
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
        """Refuse statistics that contradict themselves.

        Args:
            where: they are from, for the message.
            may_be_absent: infinite ones were never given, which is told when they are needed.

        Raises:
            ValueError: naming feature, group, value and what is needed.
        """
        for name, mode in self._modes.items():
            tensors = {s: self.tensors[tensor_name(name, s)] for s in STATISTICS_OF_MODE[mode]}
            for number in range(self.num_groups):
                found = {stat: tensor[number] for stat, tensor in tensors.items()}
                is_absent = any(np.isposinf(values).any() for values in found.values())
                problem = None if may_be_absent and is_absent else spread_problem(found)
                if problem is not None:
                    raise ValueError(
                        f"{where}: of {name!r} in group {number} {problem}; compute them anew of "
                        "the data"
                    )

    def normalize(self, batch: Mapping[str, Any], index_B: np.ndarray) -> dict[str, Any]:
        """A batch with its features normalised; entries that are none of them are as they were.

        Args:
            batch: arrays `[B, ..., *feature]`.
            index_B: the row of each sample, int64.

        Raises:
            ValueError: the statistics were never given, or are of another size.
        """
        return self._applied(batch, index_B, self._normalized)

    def unnormalize(self, batch: Mapping[str, Any], index_B: np.ndarray) -> dict[str, Any]:
        """The inverse of `normalize`."""
        return self._applied(batch, index_B, self._unnormalized)

    def _applied(self, batch: Mapping[str, Any], index_B: np.ndarray, formula) -> dict[str, Any]:
        result = dict(batch)
        for name, mode in self._modes.items():
            if name not in batch:
                continue
            values = np.asarray(batch[name], dtype=np.float32)
            if values.size:
                low, high = (
                    self._gathered(name, stat, values, index_B) for stat in STATISTICS_OF_MODE[mode]
                )
                result[name] = formula(mode, values, low, high)
        return result

    def _normalized(
        self, mode: str, x: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        if mode == "MEAN_STD":
            return (x - low) / (self._without_zeros(high) + self._epsilon)
        width = high - low
        divisor = self._without_zeros(width)
        if self._centers_zero_range:
            low = low - 0.5 * (divisor - width)
        return (x - low) / (divisor + self._epsilon) * 2 - 1

    def _unnormalized(
        self, mode: str, y: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        if mode == "MEAN_STD":
            return y * (self._without_zeros(high) + self._epsilon) + low
        width = high - low
        divisor = self._without_zeros(width)
        if self._centers_zero_range:
            low = low - 0.5 * (divisor - width)
        return (y + 1) / 2 * (divisor + self._epsilon) + low

    def _without_zeros(self, spread: np.ndarray) -> np.ndarray:
        """A feature that never varies is divided by 1: a value off it must not explode."""
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
        if len(index_B) != len(values) or index_B.min() < 0 or index_B.max() >= self.num_groups:
            raise ValueError(
                f"the groups {np.asarray(index_B).tolist()} of {len(values)} samples of {name!r} "
                f"must be one for each, from 0 to {self.num_groups - 1}"
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
    """Name of a statistic in a checkpoint, behind that of its normaliser."""
    return f"buffer_{feature.replace('.', '_')}.{stat}"


def _statistic_shape(feature: PolicyFeature) -> tuple[int, ...]:
    """Images have statistics by channel."""
    return (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape
