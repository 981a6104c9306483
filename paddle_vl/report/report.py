"""The report: one self-contained HTML page, and a PNG of each panel."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import write_text
from paddle_vl.report.actions import actions_section
from paddle_vl.report.html import document, fold, table
from paddle_vl.report.panels import Curve, Panel, panels_of
from paddle_vl.report.pictures import draw_panels
from paddle_vl.report.predictions import predictions_section, rollouts_section
from paddle_vl.report.runs import Run, read_runs, skipped_updates
from paddle_vl.report.seeds import by_seed
from paddle_vl.report.summary import tables_of
from paddle_vl.train.reporting.plots import COLOURS

PAGE_FILE = "report.html"
_ASSETS = Path(__file__).parent / "assets"
# In this order; uPlot is version 1.6.32 of npm, unchanged.
_SCRIPTS = ("uPlot.iife.min.js", "report.js", "watch.js")
# Metrics that can replace steps on the horizontal axis, as they never decrease within a run.
_AXES = {"epoch": "epoch", "tokens": "tokens", "target_tokens": "target tokens"}
# What the page's script knows of panels and curves.
_OF_PANEL = ("name", "title", "unit", "is_folded", "tells_skipped")
_OF_CURVE = ("run", "key", "label", "statistic", "look", "is_eval", "is_noisy", "is_sparse")


def write_report(
    folders: Sequence[str | Path],
    output_dir: Path,
    *,
    with_pictures: bool = True,
    joins_seeds: bool = False,
) -> list[Path]:
    """Write report.html, and a PNG of each of its panels, into `output_dir`.

    Args:
        folders: train.output_dir of the runs.
        joins_seeds: see `by_seed`.

    Returns:
        The written files, the page first.

    Raises:
        ValueError, RuntimeError: see `paddle_vl.report.runs.read_runs`.
    """
    runs = by_seed(read_runs(folders)) if joins_seeds else read_runs(folders)
    panels = panels_of(runs)
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / PAGE_FILE
    # Names may contain lone surrogates, which UTF-8 cannot encode.
    text = page(runs, panels).encode("utf-8", "backslashreplace").decode("utf-8")
    write_text(file, text)
    return [file, *(draw_panels(runs, panels, output_dir) if with_pictures else [])]


def page(runs: Sequence[Run], panels: Sequence[Panel], version: str | None = None) -> str:
    """The HTML page.

    Args:
        version: of what is served, for a page that refreshes itself.
    """
    text = json.dumps(page_data(runs, panels), allow_nan=False, separators=(",", ":"))
    # So that no value can close the script element.
    text = text.replace("<", "\\u003c")
    scripts = [_asset(name) for name in _SCRIPTS if version or name != "watch.js"]
    # A copy of uPlot has its licence with it.
    scripts[0] = f"/*\n{_asset('uPlot.LICENSE')}*/\n{scripts[0]}"
    script = "\n".join(f"<script>\n{one}</script>" for one in scripts)
    torn = ", ".join(run.name for run in runs if run.is_torn)
    notes = [
        f"Made {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.",
        f"The last metrics line is cut short and left out: {torn}." if torn else "",
    ]
    return document(
        "Report: " + ", ".join(run.name for run in runs),
        _asset("uPlot.min.css") + _asset("report.css"),
        "".join(f"<p class='note'>{escape(note)}</p>\n" for note in notes if note)
        + _controls(runs)
        + f"<div id='panels'>\n{_figures(panels)}</div>\n"
        + f'<section id="tables" data-version="{version or ""}">\n{_lower_half(runs)}</section>\n',
        scripts=f"<script type='application/json' id='data'>{text}</script>\n{script}\n",
        asks="'self'" if version else "",
    )


def _controls(runs: Sequence[Run]) -> str:
    """What the page's script reads the reader's choices from."""
    names = [f"{_chip(i)}{escape(run.name)}" for i, run in enumerate(runs)]
    boxes = "".join(
        f"<label><input type='checkbox' name='run' checked>{name}</label>\n" for name in names
    )
    axes = {"step": "step"} | {key: _AXES[key] for key in _axes(runs)}
    options = "".join(f"<option value='{key}'>{name}</option>" for key, name in axes.items())
    return f"""<form id="controls" autocomplete="off">
{boxes * (len(runs) > 1)}<label>smoothing
<input type="range" name="smoothing" max="0.99" step="0.01" value="0"><output></output></label>
<label>over <select name="axis">{options}</select></label>
</form>
<noscript><p class="note">This page draws its curves by a script, which is off.</p></noscript>
<p class="note">Drag across a panel to look closer, double-click to go back. Click a name below a
panel to hide its curve, with Ctrl to see it alone. A dotted line: a run was resumed. A red
triangle: updates were skipped.</p>
"""


def _figures(panels: Sequence[Panel]) -> str:
    """The places of the panels."""
    text, folded = "", [panel for panel in panels if panel.is_folded]
    seen = (panel for panel in panels if not panel.is_folded)
    for section, group in groupby(seen, lambda panel: panel.section):
        text += f"<h2>{escape(section)}</h2>\n{_grid(group)}"
    if folded:
        titles = ", ".join(panel.title for panel in folded)
        title = f"Nothing to see (always zero, or as in other panels): {titles}"
        text += fold(title, _grid(folded), is_open=False)
    return text


def _grid(panels: Iterable[Panel]) -> str:
    figures = "".join(
        f"<figure data-panel='{panel.name}'><figcaption>{escape(panel.title)}<label>"
        f"<input type='checkbox'{' checked' * panel.is_log}>log</label></figcaption>"
        "<div></div></figure>\n"
        for panel in panels
    )
    return f"<div class='grid'>\n{figures}</div>\n"


def _lower_half(runs: Sequence[Run]) -> str:
    """Tables, predictions and chunks of actions."""
    head = [f"{_chip(i)}{escape(run.name)}" for i, run in enumerate(runs)]
    tables = []
    for one in tables_of(runs):
        note = f"<p class='note'>{escape(one.note)}</p>" if one.note else ""
        rows = [(label, [*map(escape, cells)]) for label, cells in one.rows]
        content = note + (table(rows, head) if rows else "")
        tables.append(fold(one.title, content, is_open=not one.is_folded))
    shown = [predictions_section(run.name, run.predictions) for run in runs]
    shown += [rollouts_section(run.name, run.rollouts) for run in runs]
    return "".join([*tables[:1], *shown, *tables[1:], actions_section(runs)])


def page_data(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """The data of the page's script.

    Returns:
        `colours`: of runs, or of the looks of one run.
        `steps`: lists of steps, which curves refer to by index.
        `runs`: per run `name`, `skipped` ([after, until, count]) and `resumed` (steps).
        `axes`: keys of the metrics for the horizontal axis.
        `panels`: attributes of each Panel and its Curves, whose `steps` is an index and whose
            `values` are those of their series.
    """
    # Series of one run share their steps.
    curves = [curve for panel in panels for curve in panel.curves]
    steps = list(dict.fromkeys(tuple(curve.series.steps) for curve in curves))
    place_of = {one: place for place, one in enumerate(steps)}

    def of_curve(curve: Curve) -> dict[str, Any]:
        series = {"steps": place_of[tuple(curve.series.steps)], "values": curve.series.values}
        return {name: getattr(curve, name) for name in _OF_CURVE} | series

    return {
        "colours": COLOURS,
        "steps": steps,
        "runs": [
            {
                "name": run.name,
                "skipped": skipped_updates(run.series),
                "resumed": run.resumed_steps,
            }
            for run in runs
        ],
        "axes": _axes(runs),
        "panels": [
            {name: getattr(panel, name) for name in _OF_PANEL}
            | {"curves": [*map(of_curve, panel.curves)]}
            for panel in panels
        ],
    }


def _axes(runs: Sequence[Run]) -> list[str]:
    """Metrics that all runs have and that increase in all."""
    found = {key: [run.numbers(key) for run in runs] for key in _AXES}
    return [key for key, each in found.items() if all(map(_rises, each))]


def _rises(values: Sequence[float]) -> bool:
    return len(values) > 1 and values == sorted(values) and values[0] < values[-1]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _chip(run: int) -> str:
    return f"<span class='chip' style='background: {COLOURS[run % len(COLOURS)]}'></span>"
