"""Tables of a report: results, differing settings, origin of the runs."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paddle_vl.report.runs import SKIPPED_UPDATES, Run

# Settings that do not affect the training.
NOT_COMPARED = ("train.output_dir", "train.resume_from_checkpoint")
_ABSENT = "-"
_SHORT_REVISION = 10
# A label, and a cell for each run.
_Row = tuple[str, list[str]]
# What a table tells of one run, by label.
_Told = dict[str, str | None]


@dataclass(frozen=True)
class Table:
    """Rows of a label and one cell per run."""

    title: str
    rows: list[_Row]
    note: str = ""
    is_folded: bool = False


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All tables that have rows or a note."""
    several, rows = len(runs) > 1, _settings(runs)
    settings = Table("All settings", rows, is_folded=True)
    origin = "Where the runs come from" if several else "Where the run comes from"
    tables = [
        Table("Results", _side_by_side(map(_results, runs))),
        _differing(runs, rows) if several else settings,
        Table(origin, _side_by_side(map(_origin, runs))),
        *([settings] if several else []),
    ]
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


def _side_by_side(told: Iterable[_Told]) -> list[_Row]:
    """Rows in which any run has a value."""
    columns = [*told]
    rows = {
        label: [column.get(label) for column in columns]
        for label in dict.fromkeys(label for column in columns for label in column)
    }
    return [
        (label, [_ABSENT if cell is None else cell for cell in row])
        for label, row in rows.items()
        if any(cell is not None for cell in row)
    ]


def _results(run: Run) -> _Told:
    planned = (run.settings or {}).get("train.max_steps")
    speeds = [key for key in run.series if key.endswith("_per_second")]
    imbalance, best = run.numbers("token_imbalance"), None
    # Of a guarded run, see `paddle_vl.train.guard`.
    drops = [(max(run.numbers(key)), key) for key in run.series if "_drop/" in key]
    if "eval_loss" in run.series:
        step, loss = min(run.series["eval_loss"].points, key=lambda point: point[1])
        best = f"{shown_number(loss)} at step {step:,}"
    return {
        "last step": f"{run.last_step:,}"
        + (f" of {planned:,}" if isinstance(planned, int) else ""),
        "last loss": _last(run, "loss"),
        "best evaluation loss": best,
        "last evaluation loss": _last(run, "eval_loss"),
        "worst drop": f"{shown_number(max(drops)[0])} ({max(drops)[1]})" if drops else None,
        "mean per second": ", ".join(
            f"{shown_number(fmean(run.numbers(key)))} {key.removesuffix('_per_second')}"
            for key in speeds
        )
        or None,
        # Of the rank that has most in a step.
        "tokens of the fullest rank": f"{shown_number(fmean(imbalance))} times the mean, at worst "
        f"{shown_number(max(imbalance))}"
        if imbalance
        else None,
        "skipped updates": _last(run, SKIPPED_UPDATES),
        "duration": _duration(run),
    }


def _last(run: Run, key: str) -> str | None:
    """The last number; of several seeds with its ends, see `paddle_vl.report.seeds`."""
    mean, *ends = (
        shown_number(values[-1]) if (values := run.numbers(name)) else None
        for name in (key, f"{key}_min", f"{key}_max")
    )
    return f"{mean} ({' to '.join(filter(None, ends))})" if mean and any(ends) else mean


def _duration(run: Run) -> str | None:
    # Killed or still running.
    unknown = sum(not start.get("ended") for start in run.starts)
    texts = [shown_duration(run.seconds)] if unknown < len(run.starts) else []
    if unknown:
        texts.append(f"{unknown} start{'s' if unknown > 1 else ''} without an end")
    return ", and ".join(texts) or None


def _settings(runs: Sequence[Run]) -> list[_Row]:
    def cell(run: Run, name: str) -> str:
        if run.settings is None:
            return _ABSENT
        value = run.settings.get(name, "not set")
        return (
            value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        )

    names = dict.fromkeys(name for run in runs for name in run.settings or {})
    return [(name, [cell(run, name) for run in runs]) for name in names]


def _differing(runs: Sequence[Run], settings: Sequence[_Row]) -> Table:
    told = [i for i, run in enumerate(runs) if run.settings is not None]
    rows = [
        (name, cells)
        for name, cells in settings
        if name not in NOT_COMPARED and len({cells[i] for i in told}) > 1
    ]
    note = "" if rows or len(told) < 2 else "All settings are the same, but for where they write."
    missing = [run.name for run in runs if run.settings is None]
    if missing:
        note = f"{note} No config.yaml: {', '.join(missing)}.".strip()
    return Table("Settings that differ", rows, note)


def _origin(run: Run) -> _Told:
    """Of its newest start."""
    start = run.starts[-1] if run.starts else {}
    resumed = ", ".join(f"{step:,}" for step in run.resumed_steps)
    device, name = start.get("device"), start.get("device_name")
    return {
        "folder": str(run.folder),
        "started": run.starts[0].get("started") if run.starts else None,
        "starts": f"{len(run.starts)}" + f", resumed at step {resumed}" * bool(resumed)
        if run.starts
        else None,
        "git revision": _revision(start.get("git")),
        "git revision of paddle-vl": _revision(start.get("paddle_vl_git")),
        "command": shlex.join(start.get("command") or []) or None,
        "started in": start.get("folder"),
        "host": start.get("host"),
        "device": f"{device} ({name})" if device and name else device or name,
        "processes": _processes(start),
        "platform": start.get("platform"),
    } | (start.get("versions") or {})


def _revision(state: Mapping[str, Any] | None) -> str | None:
    if not state:
        return None
    changed = " with uncommitted changes" * bool(state.get("is_dirty"))
    return state["revision"][:_SHORT_REVISION] + changed


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
