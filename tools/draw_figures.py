"""Draw the plots of docs/images from the tables in the pages beside them.

    python tools/draw_figures.py [profile_pi07_cpu pretraining cpu_step_parts]

The figures were measured when the pages say so; this draws them again, with the functions and the
look that the package uses for its own plots.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.profile.cells import Cell, Choice
from paddle_vl.profile.matrix_report import draw_matrix
from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
_GREY = "0.75"


def tables(page: str, columns: str) -> list[list[dict[str, str]]]:
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


def numbers(text: str) -> tuple[float, float, float]:
    """Median, lowest and highest of `1.5 (1 to 2)`; what follows is left out."""
    match = re.match(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a median with its range, such as `1.5 (1 to 2)`")
    middle, low, high = map(float, match.groups())
    return middle, low, high


def profile_pi07_cpu(file: Path) -> None:
    """The matrix of docs/profiling.md, by the function that draws every matrix."""
    cells = []
    for row in tables("profiling.md", "| sharding | recompute | cameras")[0]:
        choice = Choice(row["sharding"], row["recompute"], int(row["cameras"]))
        is_oom = row["memory GB"] == "OOM"
        profile = {} if is_oom else {
            "global_samples_per_sec": float(row["samples/s"]),
            "peak_reserved_gb_worst": float(row["memory GB"]),
        }  # fmt: skip
        status = "oom" if is_oom else "ok"
        cells.append(Cell(choice, int(row["batch"]), status, "", {}, 0.0, profile))
    draw_matrix(cells, 1.0, file)


def pretraining(file: Path) -> None:
    """What pretraining is worth: losses before and after, and the steps that it saves."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    losses = tables("pretraining.md", "| source | random weights")[0]
    bars = _pairs(left, losses, "source", ("random weights", "pretrained"))
    label_axes(
        left, "Pretraining lowers the loss of every source", "source of held-out documents",
        "loss, nats per token",
    )  # fmt: skip
    steps = tables("pretraining.md", "| right answers | pretrained")[0]
    _pairs(right, steps, "right answers", ("random", "pretrained"))
    label_axes(
        right, "Pretraining saves steps of fine-tuning", "right answers to held-out questions",
        "steps of fine-tuning",
    )  # fmt: skip
    names = ["from random weights", "pretrained (median of 3 seeds, whiskers: lowest to highest)"]
    figure.legend(bars, names, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=110)


def _pairs(
    axes: Any, rows: Sequence[Mapping[str, str]], name: str, columns: Sequence[str]
) -> list[Any]:
    """Two bars for every row, a median with its range each; returns the bars by column."""
    drawn = []
    for number, (column, colour) in enumerate(zip(columns, (_GREY, COLOURS[0]), strict=True)):
        found = [numbers(row[column]) for row in rows]
        at = [place + 0.4 * number - 0.2 for place in range(len(rows))]
        ranges = [[mid - low for mid, low, _ in found], [high - mid for mid, _, high in found]]
        heights = [mid for mid, _, _ in found]
        drawn.append(axes.bar(at, heights, 0.38, yerr=ranges, capsize=3, color=colour))
        # A seed that never got there is told behind the range.
        texts = [f"{row[column].split()[0]}{row[column].partition(')')[2]}" for row in rows]
        axes.bar_label(drawn[-1], texts, padding=1, fontsize=9)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(rows)), [row[name] for row in rows])
    return drawn


def cpu_step_parts(file: Path) -> None:
    """The parts of a training step on a CPU, one after the other in a bar for each side."""
    found = tables("cpu_speed.md", "| part | Paddle's operations")
    figure = new_figure(10, 5.6)
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    names = list(dict.fromkeys(
        row["part"] for rows in found for row in rows[1:] if _is_drawn(row, rows[0])
    ))  # fmt: skip
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    colours["Python and dispatch"] = "0.6"
    shown: dict[str, Any] = {}
    for axes, rows, family in zip(panels, found, ("Qwen3-VL", "pi07"), strict=True):
        sides = [side for side in rows[0] if side != "part"]
        left = [0.0] * len(sides)
        total = {side: float(rows[0][side]) for side in sides}
        for row in rows[1:]:
            if not _is_drawn(row, rows[0]):
                continue
            values = [float(row[side]) for side in sides]
            bars = axes.barh(sides, values, left=left, color=colours[row["part"]], edgecolor="w")
            shown.setdefault(row["part"], bars)
            texts = [f"{ms:.0f}" if ms > 0.03 * max(total.values()) else "" for ms in values]
            axes.bar_label(bars, texts, label_type="center", fontsize=8, color="w")
            left = [begin + ms for begin, ms in zip(left, values, strict=True)]
        for number, (end, ms) in enumerate(zip(left, total.values(), strict=True)):
            axes.text(end, number, f" {ms:.0f} ms", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * max(total.values()))
        slow, *_, fast = total.values()
        told = f"{family}: a training step takes {fast:.0f} ms in place of {slow:.0f} ms"
        label_axes(axes, told, "milliseconds", "")
        axes.grid(visible=False, axis="y")
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=6, frameon=False
    )
    figure.savefig(file, dpi=110)


def _is_drawn(row: Mapping[str, str], total: Mapping[str, str]) -> bool:
    """Whether a part takes more than a hundredth of the longest step."""
    largest = [max(float(one[side]) for side in one if side != "part") for one in (row, total)]
    return largest[0] > 0.01 * largest[1]


FIGURES: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (profile_pi07_cpu, pretraining, cpu_step_parts)
}


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (all)")
    options = made.parse_args()
    if unknown := sorted({*options.names} - {*FIGURES}):
        made.error(f"{', '.join(unknown)}: the figures are {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        FIGURES[name](DOCS / "images" / f"{name}.png")
        print(f"wrote docs/images/{name}.png")


if __name__ == "__main__":
    main()
