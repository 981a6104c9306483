"""The plot of a matrix: throughput and memory of every cell, as bars over the batch size.

The first setting that differs between the choices (sharding, attention, recomputation) gives the
colours; the others have a column of panels for each combination, numbers of cameras a row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_vl.profile.cells import Cell, Choice
from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

# The same sharding has the same colour in every plot that compares shardings.
_SHARDINGS = ("dp", "stage1", "stage2", "stage3", "none")
_SETTINGS = ("sharding", "attention", "recompute")


def series_and_column(choices: Sequence[Choice]) -> dict[Choice, tuple[str, str]]:
    """Legend entry of each choice and the title of its column, by the settings that differ."""
    words = {
        choice: {
            "sharding": choice.sharding,
            "attention": f"{choice.attention} attention",
            "recompute": f"recompute {choice.recompute}",
        }
        for choice in choices
    }
    first, *others = [
        name for name in _SETTINGS if len({of_choice[name] for of_choice in words.values()}) > 1
    ] or ["sharding"]
    return {
        choice: (of_choice[first], ", ".join(of_choice[name] for name in others))
        for choice, of_choice in words.items()
    }


def draw_matrix(cells: Sequence[Cell], limit_gb: float | None, path: Path) -> None:
    """Write the plot of a matrix as PNG."""
    matrix_figure(cells, limit_gb).savefig(path, dpi=100)


def matrix_figure(cells: Sequence[Cell], limit_gb: float | None) -> Any:
    """The plot of a matrix, a matplotlib Figure.

    Whiskers are the range of a cell's runs; a cross marks a batch that did not fit, and a cell that
    failed has no bar.
    """
    places = series_and_column(list(dict.fromkeys(cell.choice for cell in cells)))
    series = list(dict.fromkeys(name for name, _ in places.values()))
    columns = list(dict.fromkeys(column for _, column in places.values())) or [""]
    cameras = list(dict.fromkeys(cell.choice.cameras for cell in cells)) or [None]
    figure = new_figure(max(7.0, 4.5 * len(columns)), 1.0 + 4.6 * len(cameras))
    grid = figure.subplots(2 * len(cameras), len(columns), squeeze=False, sharey="row")
    for row, number in enumerate(cameras):
        own = [
            cell for cell in cells
            if cell.choice.cameras == number and cell.status in ("ok", "oom")
        ]  # fmt: skip
        sizes = sorted({cell.batch_size for cell in own})
        for column, name in enumerate(columns):
            panels = grid[2 * row][column], grid[2 * row + 1][column]
            for cell in own:
                label, place_of = places[cell.choice]
                if place_of == name:
                    place = series.index(label)
                    at = sizes.index(cell.batch_size) + (place + 0.5) / len(series) * 0.8 - 0.4
                    _draw_cell(panels, cell, at, 0.8 / len(series), place, label)
            seen = f"{number} camera{'s' if number > 1 else ''}" if number else ""
            _label(panels, ", ".join(filter(None, [seen, name])), sizes, limit_gb)
    for axes in grid[-1]:
        axes.set_xlabel("samples per micro-batch of a rank (x: does not fit)")
    found: dict[str, Any] = {}
    for axes in grid.flat:
        handles, labels = axes.get_legend_handles_labels()
        found |= {label: handle for label, handle in zip(labels, handles, strict=True)}
    if found:
        shown = [name for name in series if name in found]
        figure.legend(
            [found[name] for name in shown], shown,
            loc="outside lower center", ncols=len(shown), frameon=False,
        )  # fmt: skip
    return figure


def _draw_cell(
    panels: tuple[Any, Any], cell: Cell, at: float, width: float, place: int, label: str
) -> None:
    if label in _SHARDINGS:
        place = _SHARDINGS.index(label)
    colour = COLOURS[place % len(COLOURS)]
    if cell.status == "oom":
        for axes in panels:
            axes.plot([at], [0.04], "x", color=colour, transform=axes.get_xaxis_transform())
        return
    speed, memory = panels
    low, high = cell.speed_range
    value = cell.samples_per_sec
    ranges = [[value - low], [high - value]] if high > low else None
    speed.bar([at], [value], 0.9 * width, yerr=ranges, capsize=2, color=colour, label=label)
    memory.bar([at], [cell.memory_gb], 0.9 * width, color=colour)


def _label(
    panels: tuple[Any, Any], head: str, sizes: Sequence[int], limit_gb: float | None
) -> None:
    speed, memory = panels
    head = f": {head}" if head else ""
    label_axes(speed, f"Throughput{head}", "", "samples/s, all ranks")
    label_axes(memory, f"Memory{head}", "", "GB, largest rank")
    if limit_gb is not None:
        memory.axhline(limit_gb, color="black", linewidth=0.8, linestyle=":")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
        axes.grid(visible=False, axis="x")
