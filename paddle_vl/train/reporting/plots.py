"""The look of all plots of this package: figures, axes with titles and units, and the loss curve.

matplotlib is imported when something is drawn. Figures have canvases of their own: no display, no
global state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import naming

# Those of the report's page.
COLOURS = (
    "#2563eb", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8",
    "#0c8599", "#a17c00", "#5c5f66", "#ae3ec9", "#74512d",
)  # fmt: skip


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_axes(axes: Any, title: str, x: str, y: str, *, is_log: bool = False) -> None:
    """Title and units of axes, and their grid.

    Args:
        x: name and unit of the horizontal axis; `y` that of the vertical one.
        is_log: whether the vertical axis is logarithmic.
    """
    # A `$` in a metric's name does not begin a formula.
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_plain)
    axes.grid(alpha=0.3, which="both")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _plain(value: float, position: int | None) -> str:
    """Labels of a logarithmic axis: plain numbers at leading digits 1, 2, 3 and 5."""
    return f"{value:g}" if f"{value:e}"[0] in "1235" else ""


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw training and evaluation loss over steps into a PNG of 1280 x 800 pixels; of a run that
    learns from rewards the reward, as its loss says nothing.

    Args:
        lines: lines of metrics.jsonl.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    has_rewards = any("reward" in line for line in lines)
    curves = [("loss", "training", "-"), ("eval_loss", "evaluation", "o-")]
    for key, label, style in [("reward", "reward", "-")] if has_rewards else curves:
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    if has_rewards:
        label_axes(axes, "Reward", "step", "mean of the answers")
    else:
        # The loss falls by orders of magnitude in the first steps.
        label_axes(axes, "Loss", "step", "nats per target token", is_log=True)
    if axes.lines:
        axes.legend(frameon=False)
    with naming(path):
        figure.savefig(path, dpi=160)
