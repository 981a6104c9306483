"""Metrics lines as series of numbers: one for each key, whatever keys there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paddle_vl.train.reporting.run_files import Line, numbers_of

SKIPPED_UPDATES = "skipped_updates"
# A distance between two lines that is so many times the distances around it is a gap.
_GAP = 3


@dataclass(frozen=True)
class Series:
    """The numbers of one key.

    Attributes:
        steps: ascending.
        values: one for each step; None where the line has the key and no finite number.
        breaks: positions that a curve must not be joined to what is before: lines are missing.
    """

    steps: list[int]
    values: list[float | None]
    breaks: list[int]

    @property
    def points(self) -> list[tuple[int, float]]:
        """Steps and values without those that are None."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True)
class SkippedUpdates:
    """Updates that were skipped after one metrics line and up to the next.

    Attributes:
        after, until: the steps of the two lines.
    """

    after: int
    until: int
    count: int


def series_of(lines: Sequence[Line]) -> dict[str, Series]:
    """The series of all keys that have a number in any line, in order of appearance."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        for key, value in numbers_of(line):
            steps, values = found.setdefault(key, ([], []))
            steps.append(line["step"])
            values.append(value)
    return {
        key: Series(steps, values, _breaks(steps))
        for key, (steps, values) in found.items()
        if any(value is not None for value in values)
    }


def skipped_updates(series: dict[str, Series]) -> list[SkippedUpdates]:
    """Where the count of skipped updates grew."""
    found, after, before = [], 0, 0
    for step, count in series[SKIPPED_UPDATES].points if SKIPPED_UPDATES in series else []:
        if count > before:
            found.append(SkippedUpdates(after, step, int(count - before)))
        after, before = step, count
    return found


def _breaks(steps: Sequence[int]) -> list[int]:
    distances = [later - earlier for earlier, later in pairwise(steps)]
    breaks = []
    for i, distance in enumerate(distances):
        around = distances[max(i - 1, 0) : i] + distances[i + 1 : i + 2]
        if len(around) == 2 and distance > _GAP * max(around):
            breaks.append(i + 1)
    return breaks
