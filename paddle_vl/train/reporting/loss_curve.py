"""The loss curve of a run as a picture."""

from pathlib import Path
from typing import Any

from paddle_vl.files.named_errors import naming

CURVE_FILE = "loss.png"


def draw_loss_curve(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw training and evaluation loss over steps into a PNG of 1280 x 800 pixels.

    Args:
        lines: those of metrics.jsonl.
    """
    # A figure with its own canvas: no display, no global state, and nothing imported before.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (("loss", "train", "-"), ("eval_loss", "eval", "o-")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token")
    # The fall of the first steps would otherwise press the rest of the curve flat.
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend()
    with naming(path):
        figure.savefig(path, dpi=160)
