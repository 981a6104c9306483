"""Draw the plots of docs/images from the tables in the pages beside them.

    python tools/draw_figures.py [profile_pi07_cpu pretraining cpu_step_parts]

The figures were measured when the pages say so; this draws them again, with the functions and the
look that the package uses for its own plots.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.profile.cells import Cell, MatrixChoice
from paddle_vl.profile.matrix_report import matrix_figure
from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
Rows = list[dict[str, str]]


def tables(page: str, columns: str) -> list[Rows]:
    """The tables of a page whose first line begins like this: a dictionary for every row.

    Raises:
        ValueError: the page has none.
    """
    found = []
    for block in (DOCS / page).read_text(encoding="utf-8").split("\n\n"):
        if block.startswith(columns):
            head, _, *rows = [
                [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
            ]
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    if not found:
        raise ValueError(f"docs/{page} has no table that begins with {columns!r}")
    return found


def profile_pi07_cpu() -> Any:
    """The matrix of docs/profiling.md, by the function that draws every matrix."""
    cells = []
    for row in tables("profiling.md", "| sharding | recompute | cameras")[0]:
        choice = MatrixChoice(row["sharding"], row["recompute"], int(row["cameras"]))
        run = {} if row["memory GB"] == "OOM" else {
            "global_samples_per_sec": float(row["samples/s"]),
            "peak_reserved_gb_worst": float(row["memory GB"]),
        }  # fmt: skip
        status = "ok" if run else "oom"
        cells.append(Cell(choice, int(row["batch"]), status, "", {}, (run,) if run else ()))
    return matrix_figure(cells, 1.0)


def pretraining() -> Any:
    """What pretraining is worth: losses before and after, and the steps that it saves."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    losses = tables("pretraining.md", "| source | random weights")[0]
    bars = _pairs(left, losses, "source", ("random weights", "pretrained"))
    title = "Pretraining lowers the loss of every source"
    label_axes(left, title, "source of held-out documents", "loss, nats per token")
    steps = tables("pretraining.md", "| right answers | pretrained")[0]
    _pairs(right, steps, "right answers", ("random", "pretrained"))
    title = "Pretraining saves steps of fine-tuning"
    label_axes(right, title, "right answers to held-out questions", "steps of fine-tuning")
    names = ["from random weights", "pretrained (median of 3 seeds, whiskers: lowest to highest)"]
    figure.legend(bars, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _pairs(axes: Any, rows: Rows, name: str, columns: Sequence[str]) -> list[Any]:
    """Two bars for every row, `1.5 (1 to 2)`: a median with its range; the bars by column."""
    drawn = []
    for number, (column, colour) in enumerate(zip(columns, ("0.75", COLOURS[0]), strict=True)):
        found = [re.findall(r"[\d.]+", row[column].partition(")")[0]) for row in rows]
        middle, low, high = zip(*(map(float, values) for values in found), strict=True)
        at = [place + 0.4 * number - 0.2 for place in range(len(rows))]
        ranges = [[a - b for a, b in zip(*pair, strict=True)] for pair in
                  ((middle, low), (high, middle))]  # fmt: skip
        drawn.append(axes.bar(at, middle, 0.38, yerr=ranges, capsize=3, color=colour))
        # A seed that never got there is told behind the range.
        texts = [f"{row[column].split()[0]}{row[column].partition(')')[2]}" for row in rows]
        axes.bar_label(drawn[-1], texts, padding=1, fontsize=9)
    axes.set_xticks(range(len(rows)), [row[name] for row in rows])
    return drawn


def cpu_step_parts() -> Any:
    """The parts of a training step on a CPU, one after the other in a bar for each side."""
    found = tables("cpu_speed.md", "| part | Paddle's operations")
    figure = new_figure(10, 5.6)
    shown: dict[str, Any] = {}
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (total, *parts), family in zip(panels, found, ("Qwen3-VL", "pi07"), strict=True):
        sides = [side for side in total if side != "part"]
        milliseconds = [float(total[side]) for side in sides]
        left = [0.0] * len(sides)
        for row in parts:
            values = [float(row[side]) for side in sides]
            # Smaller parts cannot be seen.
            if max(values) > 0.01 * max(milliseconds):
                number = [*shown, row["part"]].index(row["part"])
                colour = COLOURS[number % len(COLOURS)]
                bars = axes.barh(sides, values, left=left, color=colour, edgecolor="w")
                shown.setdefault(row["part"], bars)
                left = [begin + ms for begin, ms in zip(left, values, strict=True)]
        for number, ms in enumerate(milliseconds):
            axes.text(left[number], number, f" {ms:.0f} ms", va="center", fontsize=9)
        axes.invert_yaxis()
        slow, *_, fast = milliseconds
        told = f"{family}: a training step takes {fast:.0f} ms in place of {slow:.0f} ms"
        label_axes(axes, told, "milliseconds", "")
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=6, frameon=False)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    function.__name__: function for function in (profile_pi07_cpu, pretraining, cpu_step_parts)
}


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (all)")
    options = made.parse_args()
    if unknown := sorted({*options.names} - {*FIGURES}):
        made.error(f"{', '.join(unknown)}: the figures are {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        FIGURES[name]().savefig(DOCS / "images" / f"{name}.png", dpi=110)
        print(f"wrote docs/images/{name}.png")


if __name__ == "__main__":
    main()
