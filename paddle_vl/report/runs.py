"""Reads the folders of runs: metrics as series of numbers, settings, starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.config.load import flatten, read_yaml
from paddle_vl.report.predictions import read_predictions
from paddle_vl.train.reporting.run_files import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    Line,
    MetricsFile,
    numbers_of,
    read_starts,
)

CONFIG_FILE = "config.yaml"
SKIPPED_UPDATES = "skipped_updates"


@dataclass(frozen=True)
class Series:
    """The numbers of one metric.

    Attributes:
        steps: ascending.
        values: one per step; None for a number that was not finite.
    """

    steps: list[int]
    values: list[float | None]

    @property
    def points(self) -> list[tuple[int, float]]:
        """Steps and values that are not None."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if value is not None]

    @property
    def numbers(self) -> list[float]:
        """Values that are not None."""
        return [value for value in self.values if value is not None]


class SkippedUpdates(NamedTuple):
    """Updates skipped between two metrics lines.

    Attributes:
        after, until: steps of the two lines.
    """

    after: int
    until: int
    count: int


def series_of(lines: Sequence[Line]) -> dict[str, Series]:
    """Series of all metrics with a number in any line, in order of appearance."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        for key, value in numbers_of(line):
            steps, values = found.setdefault(key, ([], []))
            steps.append(line["step"])
            values.append(value)
    return {
        key: Series(steps, values)
        for key, (steps, values) in found.items()
        if any(value is not None for value in values)
    }


def skipped_updates(series: dict[str, Series]) -> list[SkippedUpdates]:
    """Pairs of lines between which the count of skipped updates grew."""
    found, after, before = [], 0, 0
    for step, count in series[SKIPPED_UPDATES].points if SKIPPED_UPDATES in series else []:
        if count > before:
            found.append(SkippedUpdates(after, step, int(count - before)))
        after, before = step, count
    return found


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: shortest suffix of the folder's path that is unique in the report.
        series: by metric.
        settings: config.yaml, flat; None without the file.
        starts: entries of run.json that belong to these metrics, oldest first.
        is_torn: whether the last line of metrics.jsonl is incomplete and left out.
        predictions: lines of predictions.jsonl.
        rollouts: lines of rollouts.jsonl.
    """

    name: str
    folder: Path
    series: dict[str, Series]
    settings: dict[str, Any] | None
    starts: list[dict[str, Any]]
    is_torn: bool
    predictions: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)

    def numbers(self, key: str) -> list[float]:
        """The numbers of a metric; empty without it."""
        return self.series[key].numbers if key in self.series else []

    @property
    def last_step(self) -> int:
        """Step of the last metrics line that has a number."""
        return max(series.steps[-1] for series in self.series.values())

    @property
    def resumed_steps(self) -> list[int]:
        """Steps from which starts resumed."""
        return [start["first_step"] for start in self.starts if start.get("first_step")]

    @property
    def seconds(self) -> float:
        """Total duration of the starts that ended."""
        total = 0.0
        for start in self.starts:
            if start.get("ended"):
                begin, end = (datetime.fromisoformat(start[key]) for key in ("started", "ended"))
                total += (end - begin).total_seconds()
        return total


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read the folders of runs.

    Raises:
        ValueError: a run is given twice, or has no metric in common with the others.
        RuntimeError: a folder is not the output folder of a run, or a file in it is damaged.
    """
    paths = [Path(folder).resolve() for folder in folders]
    for given, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{given} is given {paths.count(path)} times; name each run once")
    runs = [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    for run in runs:
        others = [key for other in runs if other is not run for key in other.series]
        if len(runs) > 1 and run.series.keys().isdisjoint(others):
            raise ValueError(
                f"{run.folder} has no metric in common with the other runs: it has "
                f"{', '.join(run.series)}, they have {', '.join(dict.fromkeys(others))}; make a "
                "report of its own"
            )
    return runs


def _read_run(folder: Path, name: str) -> Run:
    file = folder / METRICS_FILE
    if not file.is_file():
        inside = sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
        hint = (
            f"it holds the runs {', '.join(map(str, inside))}: give those"
            if inside
            else "give the train.output_dir of a run that has reported, see logging.logging_steps"
        )
        what = "there is no such folder" if not folder.exists() else f"it has no {METRICS_FILE}"
        raise RuntimeError(f"{folder} is not the folder of a run, {what}; {hint}")
    lines, is_torn = MetricsFile(file).read_all()
    series = series_of(lines)
    if not series:
        raise RuntimeError(f"{file} has no number yet; wait for the run's first report")
    config = folder / CONFIG_FILE
    return Run(
        name,
        folder,
        series,
        flatten(read_yaml(config)[0]) if config.is_file() else None,
        _own_starts(read_starts(folder)),
        is_torn,
        read_predictions(folder),
        read_predictions(folder, ROLLOUTS_FILE),
    )


def _own_starts(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Starts since the last one from step 0, which removed the earlier metrics."""
    fresh = [i for i, start in enumerate(starts) if not start.get("first_step")]
    return starts[fresh[-1] :] if fresh else starts


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest unique suffix of each path."""

    def end(path: Path, count: int) -> str:
        return "/".join(path.parts[-count:])

    return [
        next(
            end(path, count)
            for count in range(1, len(path.parts) + 1)
            if all(end(other, count) != end(path, count) for other in paths if other != path)
        )
        for path in paths
    ]
