"""The page: one HTML file with everything inside, which asks nobody for anything."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from paddle_vl.report.panels import Panel
from paddle_vl.report.runs import Run
from paddle_vl.report.series import skipped_updates
from paddle_vl.report.summary import Table

_ASSETS = Path(__file__).parent / "assets"
# One script, in this order.
_SCRIPTS = ("numbers.js", "curves.js", "panel.js", "page.js")
# Quantities that curves can be drawn over instead of steps: they never fall within a run.
_AXES = {"epoch": "epoch", "target_tokens": "target tokens"}


def page(runs: Sequence[Run], panels: Sequence[Panel], tables: Sequence[Table]) -> str:
    """The whole file. Its data is the element `data`, JSON as `page_data` says."""
    title = escape("Report: " + ", ".join(run.name for run in runs))
    data = json.dumps(page_data(runs, panels), allow_nan=False, separators=(",", ":"))
    # Nothing in it may end the element that it stands in.
    data = data.replace("<", "\\u003c")
    style, script = _asset("report.css"), "\n".join(map(_asset, _SCRIPTS))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="note">Made {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.</p>
{_notes(runs)}</header>
<main>
<div id="controls"></div>
<noscript><p class="note">This page draws its curves by a script, which is off.</p></noscript>
<div id="panels"></div>
<section id="tables">
{"".join(_table(table, runs) for table in tables)}</section>
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page_data(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """What the page draws.

    Returns:
        `steps`: lists of steps that curves refer to; `runs`: of each `name`, `skipped`
        ([after, until, count] of skipped updates) and `resumed` (steps); `axes`: by key of
        quantities to draw over, their names; `panels`: of each `name`, `section`, `title`, `unit`,
        `log`, `skipped` (whether those are marked in it) and `curves`, of each `run` (its place),
        `key`, `label`, `eval`, `statistic`, `look`, `noisy`, `steps` (place of the list), and
        `values` and `breaks` of its series.
    """
    # Series of one run share their steps.
    curves = [curve for panel in panels for curve in panel.curves]
    steps = list(dict.fromkeys(tuple(curve.series.steps) for curve in curves))
    place_of = {one: place for place, one in enumerate(steps)}
    return {
        "steps": steps,
        "runs": [
            {
                "name": run.name,
                "skipped": [
                    [one.after, one.until, one.count] for one in skipped_updates(run.series)
                ],
                "resumed": run.resumed_steps,
            }
            for run in runs
        ],
        "axes": {key: name for key, name in _AXES.items() if all(_rises(run, key) for run in runs)},
        "panels": [
            {
                "name": panel.name,
                "section": panel.section,
                "title": panel.title,
                "unit": panel.unit,
                "log": panel.is_log,
                "skipped": panel.tells_skipped,
                "curves": [
                    {
                        "run": curve.run,
                        "key": curve.key,
                        "label": curve.label,
                        "eval": curve.is_eval,
                        "statistic": curve.statistic,
                        "look": curve.look,
                        "noisy": curve.is_noisy,
                        "steps": place_of[tuple(curve.series.steps)],
                        "values": curve.series.values,
                        "breaks": curve.series.breaks,
                    }
                    for curve in panel.curves
                ],
            }
            for panel in panels
        ],
    }


def _rises(run: Run, key: str) -> bool:
    """Whether a run has the key and it is larger at its end than at its beginning."""
    values = [value for _, value in run.series[key].points] if key in run.series else []
    return len(values) > 1 and values == sorted(values) and values[0] < values[-1]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _notes(runs: Sequence[Run]) -> str:
    torn = [run.name for run in runs if run.is_torn]
    if not torn:
        return ""
    text = f"The last metrics line is cut short and left out: {', '.join(torn)}."
    return f'<p class="note">{escape(text)}</p>\n'


def _table(table: Table, runs: Sequence[Run]) -> str:
    head = "".join(
        f"<th scope='col'>{_chip(i)}{escape(run.name)}</th>" for i, run in enumerate(runs)
    )
    rows = "".join(
        f"<tr><th scope='row'>{escape(label)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for label, cells in table.rows
    )
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    body = (
        f"<div class='scroll'><table><thead><tr><td></td>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    )
    body = f"{body}</table></div>" if table.rows else ""
    folded = "" if table.is_folded else " open"
    return f"<details{folded}><summary>{escape(table.title)}</summary>{note}{body}</details>\n"


def _chip(run: int) -> str:
    return f"<span class='chip' style='--own: var(--c{run % 10})'></span>"
