"""Tables of a report: results, differing settings, origin of the runs."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paddle_vl.report.runs import SKIPPED_UPDATES, Run

# Settings that do not affect the training.
NOT_COMPARED = ("train.output_dir", "train.resume_from_checkpoint")
_ABSENT = "-"
_SHORT_REVISION = 10


@dataclass(frozen=True)
class Table:
    """Rows of a label and one cell per run."""

    title: str
    rows: list[tuple[str, list[str]]]
    note: str = ""
    is_folded: bool = field(default=False, kw_only=True)


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All tables that have rows or a note."""
    several = len(runs) > 1
    tables = [
        Table("Results", _rows(runs, _RESULTS)),
        _differing_settings(runs) if several else _all_settings(runs),
        Table("Where the runs come from" if several else "Where the run comes from", _origin(runs)),
    ]
    if several:
        tables.append(_all_settings(runs))
    return [table for table in tables if table.rows or table.note]


def shown_number(value: float) -> str:
    """Four significant digits; integers in full."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def shown_duration(seconds: float) -> str:
    """For instance `2 h 05 min`: the two largest units."""
    left, parts = round(seconds), []
    for size, unit, width in ((86400, "d", 1), (3600, "h", 2), (60, "min", 2), (1, "s", 2)):
        number, left = divmod(left, size)
        if parts or number or size == 1:
            parts.append(f"{number:0{width if parts else 1}} {unit}")
    return " ".join(parts[:2])


def _rows(
    runs: Sequence[Run], rows: dict[str, Callable[[Run], str | None]]
) -> list[tuple[str, list[str]]]:
    """Rows in which any run has a value."""
    cells = {label: [tell(run) for run in runs] for label, tell in rows.items()}
    return [
        (label, [_ABSENT if cell is None else cell for cell in row])
        for label, row in cells.items()
        if any(cell is not None for cell in row)
    ]


def _steps(run: Run) -> str:
    planned = (run.settings or {}).get("train.max_steps")
    return f"{run.last_step:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")


def _last(key: str) -> Callable[[Run], str | None]:
    def tell(run: Run) -> str | None:
        if key not in run.series:
            return None
        last = shown_number(run.series[key].points[-1][1])
        # Of several seeds, see `paddle_vl.report.seeds`.
        ends = [run.series.get(f"{key}_{end}") for end in ("min", "max")]
        texts = [shown_number(end.points[-1][1]) for end in ends if end is not None]
        return f"{last} ({' to '.join(texts)})" if texts else last

    return tell


def _best_evaluation(run: Run) -> str | None:
    if "eval_loss" not in run.series:
        return None
    step, loss = min(run.series["eval_loss"].points, key=lambda point: point[1])
    return f"{shown_number(loss)} at step {step:,}"


def _mean_speed(run: Run) -> str | None:
    """Mean of each `*_per_second` metric over all lines."""
    found = [key for key in run.series if key.endswith("_per_second")]
    if not found:
        return None
    texts = []
    for key in found:
        mean = fmean(value for _, value in run.series[key].points)
        texts.append(f"{shown_number(mean)} {key.removesuffix('_per_second')}")
    return ", ".join(texts)


def _imbalance(run: Run) -> str | None:
    """Tokens of the rank that has most in a step, over the mean of the ranks."""
    if "token_imbalance" not in run.series:
        return None
    values = [value for _, value in run.series["token_imbalance"].points]
    return f"{shown_number(fmean(values))} times the mean, at worst {shown_number(max(values))}"


def _duration(run: Run) -> str | None:
    if not run.starts:
        return None
    unknown = sum(not start.get("ended") for start in run.starts)
    known = len(run.starts) - unknown
    texts = [shown_duration(run.seconds)] if known else []
    if unknown:
        # Killed or still running.
        texts.append(f"{unknown} start{'s' if unknown > 1 else ''} without an end")
    return ", and ".join(texts)


_RESULTS: dict[str, Callable[[Run], str | None]] = {
    "last step": _steps,
    "last loss": _last("loss"),
    "best evaluation loss": _best_evaluation,
    "last evaluation loss": _last("eval_loss"),
    "mean per second": _mean_speed,
    "tokens of the fullest rank": _imbalance,
    "skipped updates": _last(SKIPPED_UPDATES),
    "duration": _duration,
}


def _differing_settings(runs: Sequence[Run]) -> Table:
    title = "Settings that differ"
    told = [run.settings for run in runs if run.settings is not None]
    names = dict.fromkeys(name for settings in told for name in settings)
    rows = []
    for name in names:
        values = [_shown_setting(settings, name) for settings in told]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            rows.append((name, [_setting(run, name) for run in runs]))
    note = "" if rows or len(told) < 2 else "All settings are the same, but for where they write."
    missing = [run.name for run in runs if run.settings is None]
    if missing:
        note = f"{note} No config.yaml: {', '.join(missing)}.".strip()
    return Table(title, rows, note)


def _all_settings(runs: Sequence[Run]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.settings or {})
    rows = [(name, [_setting(run, name) for run in runs]) for name in names]
    return Table("All settings", rows, is_folded=True)


def _setting(run: Run, name: str) -> str:
    return _ABSENT if run.settings is None else _shown_setting(run.settings, name)


def _shown_setting(settings: dict[str, Any], name: str) -> str:
    if name not in settings:
        return "not set"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _origin(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Origin of each run, from its newest start."""
    rows = _rows(runs, _ORIGIN)
    packages = dict.fromkeys(
        name for run in runs for start in run.starts[-1:] for name in (start.get("versions") or {})
    )
    versions = {name: _version(name) for name in packages}
    return rows + _rows(runs, versions)


def _version(package: str) -> Callable[[Run], str | None]:
    return lambda run: (run.starts[-1].get("versions") or {}).get(package) if run.starts else None


def _of_start(tell: Callable[[dict[str, Any]], Any]) -> Callable[[Run], str | None]:
    def of_newest(run: Run) -> str | None:
        value = tell(run.starts[-1]) if run.starts else None
        return None if value is None else str(value)

    return of_newest


def _revision(key: str) -> Callable[[Run], str | None]:
    def tell(start: dict[str, Any]) -> str | None:
        state = start.get(key)
        if not state:
            return None
        changed = " with uncommitted changes" if state.get("is_dirty") else ""
        return state["revision"][:_SHORT_REVISION] + changed

    return _of_start(tell)


def _processes(start: dict[str, Any]) -> str | None:
    number = start.get("num_processes")
    if number is None:
        return None
    degrees = [
        f"{name.removesuffix('_degree')} {degree}"
        for name, degree in (start.get("parallel") or {}).items()
        if name.endswith("_degree") and degree and degree > 1
    ]
    return f"{number} ({', '.join(degrees)})" if degrees else str(number)


def _device(start: dict[str, Any]) -> str | None:
    device, name = start.get("device"), start.get("device_name")
    return f"{device} ({name})" if device and name else device or name


def _starts(run: Run) -> str | None:
    if not run.starts:
        return None
    resumed = ", ".join(f"{step:,}" for step in run.resumed_steps)
    return f"{len(run.starts)}" + (f", resumed at step {resumed}" if resumed else "")


_ORIGIN: dict[str, Callable[[Run], str | None]] = {
    "folder": lambda run: str(run.folder),
    "started": lambda run: run.starts[0].get("started") if run.starts else None,
    "starts": _starts,
    "git revision": _revision("git"),
    "git revision of paddle-vl": _revision("paddle_vl_git"),
    "command": _of_start(lambda start: shlex.join(start.get("command") or []) or None),
    "started in": _of_start(lambda start: start.get("folder")),
    "host": _of_start(lambda start: start.get("host")),
    "device": _of_start(_device),
    "processes": _of_start(_processes),
    "platform": _of_start(lambda start: start.get("platform")),
}
