"""Checks on the statistics of a feature (mean, std, min, max, quantiles)."""

from collections.abc import Mapping

import numpy as np

# Pairs of a smaller and a larger statistic.
_ORDERED = (("min", "max"), ("q01", "q99"))


def spread_problem(statistics: Mapping[str, np.ndarray]) -> str | None:
    """A message about the first statistic that is not finite, too small or contradicts another.

    Args:
        statistics: arrays by name, any of mean, std, min, max, q01, q99, count.

    Returns:
        None if all are consistent.
    """
    for name, values in statistics.items():
        if (place := _first(~np.isfinite(values))) is not None:
            return f"{name}{place} is {values[place]}; it must be a finite number"
    for name, least in (("std", 0), ("count", 1)):
        values = statistics.get(name)
        if values is not None and (place := _first(values < least)) is not None:
            return f"{name}{place} is {values[place]}; it must be at least {least}"
    for low, high in _ORDERED:
        if low not in statistics or high not in statistics:
            continue
        lower, upper = statistics[low], statistics[high]
        if lower.shape == upper.shape and (place := _first(lower > upper)) is not None:
            return (
                f"{low}{place} is {lower[place]} and {high}{place} {upper[place]}; {low} must not "
                f"be above {high}"
            )
    return None


class _Place(tuple):
    """An index into an array, written as `[2]`, and as nothing for a scalar."""

    def __str__(self) -> str:
        return str(list(self)) if self else ""


def _first(is_wrong: np.ndarray) -> _Place | None:
    places = np.argwhere(is_wrong)
    return _Place(int(i) for i in places[0]) if len(places) else None
