"""The report: one self-contained HTML page, and a PNG of each panel."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import write_text
from paddle_vl.report.actions import actions_section
from paddle_vl.report.panels import Curve, Panel, panels_of
from paddle_vl.report.pictures import draw_panels
from paddle_vl.report.predictions import predictions_section
from paddle_vl.report.runs import Run, read_runs, skipped_updates
from paddle_vl.report.seeds import by_seed
from paddle_vl.report.summary import Table, tables_of

PAGE_FILE = "report.html"
_ASSETS = Path(__file__).parent / "assets"
# Joined into one script in this order.
_SCRIPTS = ("numbers.js", "curves.js", "panel.js", "page.js")
# Metrics that can replace steps on the horizontal axis, as they never decrease within a run.
_AXES = {"epoch": "epoch", "tokens": "tokens", "target_tokens": "target tokens"}


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
        RuntimeError: pictures need matplotlib; the page is written before.
    """
    runs = by_seed(read_runs(folders)) if joins_seeds else read_runs(folders)
    panels = panels_of(runs)
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / PAGE_FILE
    text = page(runs, page_data(runs, panels), lower_half(runs))
    # Names may contain lone surrogates, which UTF-8 cannot encode.
    write_text(file, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return [file, *(draw_panels(runs, panels, output_dir) if with_pictures else [])]


def page(
    runs: Sequence[Run], data: Mapping[str, Any], tables: str, version: str | None = None
) -> str:
    """The HTML page.

    Args:
        data: see `page_data`; JSON in the page's element `data`.
        tables: see `lower_half`.
        version: of what is served, for a page that refreshes itself.
    """
    title = escape("Report: " + ", ".join(run.name for run in runs))
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # So that no value can close the script element.
    text = text.replace("<", "\\u003c")
    scripts = _SCRIPTS if version is None else (*_SCRIPTS, "watch.js")
    style, script = _asset("report.css"), "\n".join(map(_asset, scripts))
    connect = "" if version is None else " connect-src 'self';"
    body = "<body>" if version is None else f'<body data-version="{version}">'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline';{connect} img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
{body}
<header>
<h1>{title}</h1>
<p class="note">Made {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.</p>
{_notes(runs)}</header>
<main>
<div id="controls"></div>
<noscript><p class="note">This page draws its curves by a script, which is off.</p></noscript>
<div id="panels"></div>
<section id="tables">
{tables}</section>
</main>
<script type="application/json" id="data">{text}</script>
<script>
{script}</script>
</body>
</html>
"""


def lower_half(runs: Sequence[Run]) -> str:
    """Tables, predictions and chunks of actions, as HTML."""
    tables = [_table(table, runs) for table in tables_of(runs)]
    shown = [predictions_section(run.name, run.predictions) for run in runs]
    return "".join([*tables[:1], *shown, *tables[1:], actions_section(runs)])


def page_data(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """The data of the page's script.

    Returns:
        `steps`: lists of steps, which curves refer to by index.
        `runs`: per run `name`, `skipped` ([after, until, count]) and `resumed` (steps).
        `axes`: names of the metrics for the horizontal axis, by key.
        `panels`: per panel `name`, `section`, `title`, `unit`, `log`, `folded` (whether there is
            nothing to see), `skipped` (whether skipped updates are marked) and `curves`: `run` and
            `steps` (indices), `key`, `label`, `eval`, `statistic`, `look`, `noisy` and `values`.
    """
    # Series of one run share their steps.
    curves = [curve for panel in panels for curve in panel.curves]
    steps = list(dict.fromkeys(tuple(curve.series.steps) for curve in curves))
    place_of = {one: place for place, one in enumerate(steps)}

    def of_curve(curve: Curve) -> dict[str, Any]:
        series = curve.series
        same = {name: getattr(curve, name) for name in ("run", "key", "label", "statistic", "look")}
        named = {"eval": curve.is_eval, "noisy": curve.is_noisy}
        place = place_of[tuple(series.steps)]
        return same | named | {"steps": place, "values": series.values}

    def of_panel(panel: Panel) -> dict[str, Any]:
        same = {name: getattr(panel, name) for name in ("name", "section", "title", "unit")}
        named = {"log": panel.is_log, "folded": panel.is_folded, "skipped": panel.tells_skipped}
        return same | named | {"curves": [of_curve(curve) for curve in panel.curves]}

    return {
        "steps": steps,
        "runs": [
            {
                "name": run.name,
                "skipped": [astuple(one) for one in skipped_updates(run.series)],
                "resumed": run.resumed_steps,
            }
            for run in runs
        ],
        "axes": {key: name for key, name in _AXES.items() if all(_rises(run, key) for run in runs)},
        "panels": [of_panel(panel) for panel in panels],
    }


def _rises(run: Run, key: str) -> bool:
    """Whether a run has the metric and it increases."""
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
