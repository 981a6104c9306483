"""The panels of a report as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import naming
from paddle_vl.report.panels import Curve, Panel
from paddle_vl.report.runs import Run, skipped_updates

# The colours of the page.
COLOURS = (
    "#2563eb", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8",
    "#0c8599", "#a17c00", "#5c5f66", "#ae3ec9", "#74512d",
)  # fmt: skip
_STYLES = ("-", "--", ":", "-.", (0, (4, 2)))
# Up to this many curves the legend is inside the axes.
_INSIDE = 4
_SKIPPED = "#c92a2a"
_LONGEST_NAME = 80
# Larger values overflow in matplotlib's ticks.
_LARGEST = 1e150


def draw_panels(runs: Sequence[Run], panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Draw each panel into `folder` as NAME.png, 1280 x 800 pixels.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        # A figure with its own canvas needs no display and no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"pictures need matplotlib, which cannot be imported ({error}): pip install "
            "'paddle-vl[viz]', or make the page alone with --no-png"
        ) from error
    paths = []
    for panel in panels:
        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasAgg(figure)
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
        steps, values = _joined(curve)
        is_sparse = curve.is_eval or len(steps) < 30
        axes.plot(
            steps,
            values,
            color=colour,
            linestyle=_STYLES[curve.look % len(_STYLES)] if several else "-",
            linewidth=0.8 if curve.statistic in ("min", "max") else 1.5,
            marker="o" if is_sparse else "",
            markersize=4 if curve.is_eval else 2,
            label=_drawable(label or panel.title),
        )
    for i, run in enumerate(runs):
        for step in run.resumed_steps:
            colour = COLOURS[i % len(COLOURS)] if several else "grey"
            axes.axvline(step, color=colour, linestyle=":", linewidth=0.9, zorder=0)
        if panel.tells_skipped:
            _mark_skipped(axes, run)
    # A `$` in a metric's name does not begin a formula.
    axes.set_title(
        _drawable(panel.title), loc="left", fontsize=11, fontweight="bold", parse_math=False
    )
    axes.set_xlabel("step")
    axes.set_ylabel(_drawable(panel.unit), parse_math=False)
    if panel.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_plain)
    axes.grid(alpha=0.3, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
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


def _joined(curve: Curve) -> tuple[list[float], list[float]]:
    """Points of a curve, with NaN where it is interrupted."""
    steps, values = [], []
    for i, (step, value) in enumerate(zip(curve.series.steps, curve.series.values, strict=True)):
        if i in curve.series.breaks:
            steps.append(step)
            values.append(float("nan"))
        steps.append(step)
        is_drawn = value is not None and abs(value) < _LARGEST
        values.append(value if is_drawn else float("nan"))
    return steps, values


def _plain(value: float, position: int | None) -> str:
    """Labels of a logarithmic axis: plain numbers at leading digits 1, 2, 3 and 5."""
    return f"{value:g}" if f"{value:e}"[0] in "1235" else ""


def _mark_skipped(axes: Any, run: Run) -> None:
    foot = axes.get_xaxis_transform()
    for one in skipped_updates(run.series):
        look = {"color": _SKIPPED, "transform": foot, "clip_on": False}
        axes.plot([one.after, one.until], [0, 0], linewidth=2.5, **look)
        axes.plot([one.until], [0.015], "^", markersize=5, **look)
