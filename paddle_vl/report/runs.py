"""Reading the folders of runs: metrics, settings, starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paddle_vl.config.load import flatten, read_yaml
from paddle_vl.report.series import Series, series_of
from paddle_vl.train.reporting.run_files import METRICS_FILE, MetricsFile, read_starts

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: the shortest end of the folder's path that no other run of the report has.
        series: by key of the metrics lines.
        settings: flat, all of config.yaml; None without the file.
        starts: entries of run.json that belong to these metrics, oldest first; none without it.
        is_torn: whether the last line of the metrics is cut short and left out.
    """

    name: str
    folder: Path
    series: dict[str, Series]
    settings: dict[str, Any] | None
    starts: list[dict[str, Any]]
    is_torn: bool

    @property
    def last_step(self) -> int:
        """Of the last metrics line that has a number."""
        return max(series.steps[-1] for series in self.series.values())

    @property
    def resumed_steps(self) -> list[int]:
        """Steps that starts went on from."""
        return [start["first_step"] for start in self.starts if start.get("first_step")]

    @property
    def settings_by_step(self) -> list[tuple[int, int, dict[str, Any]]]:
        """First step, last step and flat settings of each start that trained and has left these.

        Steps that a later start trained again belong to that one.
        """
        found = []
        ends = [start.get("first_step") for start in self.starts[1:]]
        for start, end in zip_longest(self.starts, ends):
            first = (start.get("first_step") or 0) + 1
            last = self.last_step if end is None else min(end, self.last_step)
            if first <= last and start.get("settings"):
                found.append((first, last, flatten(start["settings"])))
        return found

    @property
    def seconds(self) -> float:
        """What the starts that ended took together."""
        total = 0.0
        for start in self.starts:
            if start.get("ended"):
                begin, end = (datetime.fromisoformat(start[key]) for key in ("started", "ended"))
                total += (end - begin).total_seconds()
        return total


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read what a report is made of.

    Raises:
        ValueError: a run is given twice, or shares no metric with any other.
        RuntimeError: a folder is not that of a run, or a file in it is damaged.
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
    )


def _own_starts(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those since the last one from the beginning, which dropped the metrics before it."""
    fresh = [i for i, start in enumerate(starts) if not start.get("first_step")]
    return starts[fresh[-1] :] if fresh else starts


def _names(paths: Sequence[Path]) -> list[str]:
    """For each path the fewest of its last parts that tell it from the others."""
    names = []
    for path in paths:
        ends = ["/".join(path.parts[-count:]) for count in range(1, len(path.parts) + 1)]
        rest = [f"/{other.as_posix()}" for other in paths if other != path]
        names.append(
            next(
                (end for end in ends if not any(other.endswith(f"/{end}") for other in rest)),
                str(path),
            )
        )
    return names
