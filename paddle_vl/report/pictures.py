"""The panels of a report as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import naming
from paddle_vl.report.panels import Panel
from paddle_vl.report.runs import Run, skipped_updates
from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

_STYLES = ("-", "--", ":", "-.", (0, (4, 2)))
# Up to this many curves the legend is inside the axes.
_INSIDE = 4
_SKIPPED = "#c92a2a"
_LONGEST_NAME = 80
# Larger values overflow in matplotlib's ticks.
_LARGEST = 1e150


def draw_panels(runs: Sequence[Run], panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw each panel into `folder` as NAME.png, 1280 x 800 pixels."""
    paths = []
    for panel in panels:
        figure = new_figure(8, 5)
        draw_panel(figure.add_subplot(), runs, panel)
        paths.append(folder / f"{panel.name}.png")
        with naming(paths[-1]):
            figure.savefig(paths[-1], dpi=160)
    return paths


def draw_panel(axes: Any, runs: Sequence[Run], panel: Panel) -> None:
    """Draw one panel into matplotlib axes."""
    several = len(runs) > 1
    for curve in panel.curves:
        colour = COLOURS[(curve.run if several else curve.look) % len(COLOURS)]
        label = ", ".join(filter(None, [runs[curve.run].name if several else "", curve.label]))
        steps = curve.series.steps
        # A number that was not finite, or is too large to draw, leaves a gap.
        values = [
            value if value is not None and abs(value) < _LARGEST else float("nan")
            for value in curve.series.values
        ]
        axes.plot(
            steps,
            values,
            color=colour,
            linestyle=_STYLES[curve.look % len(_STYLES)] if several else "-",
            linewidth=0.8 if curve.statistic in ("min", "max") else 1.5,
            marker="o" if curve.is_sparse else "",
            markersize=4 if curve.is_eval else 2,
            label=_drawable(label or panel.title),
        )
    for i, run in enumerate(runs):
        for step in run.resumed_steps:
            colour = COLOURS[i % len(COLOURS)] if several else "grey"
            axes.axvline(step, color=colour, linestyle=":", linewidth=0.9, zorder=0)
        if panel.tells_skipped:
            _mark_skipped(axes, run)
    label_axes(axes, _drawable(panel.title), "step", _drawable(panel.unit), is_log=panel.is_log)
    if len(panel.curves) > _INSIDE:
        legend = axes.legend(
            fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    elif len(panel.curves) > 1:
        legend = axes.legend(fontsize=8, frameon=False)
    else:
        return
    for text in legend.get_texts():
        text.set_parse_math(False)


def _drawable(name: str) -> str:
    """A name as one short printable line; a leading space, as legends leave out `_names`."""
    kept = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
    kept = kept if len(kept) <= _LONGEST_NAME else kept[: _LONGEST_NAME - 3] + "..."
    return f" {kept}" if kept.startswith("_") else kept


def _mark_skipped(axes: Any, run: Run) -> None:
    foot = axes.get_xaxis_transform()
    for one in skipped_updates(run.series):
        look = {"color": _SKIPPED, "transform": foot, "clip_on": False}
        axes.plot([one.after, one.until], [0, 0], linewidth=2.5, **look)
        axes.plot([one.until], [0.015], "^", markersize=5, **look)
