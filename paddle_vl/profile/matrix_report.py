"""The result of a matrix: JSON, a markdown table with its recommendations, and a plot.

Numbers of a cell are those of its run of median throughput, beside the range of all its runs. The
plot has throughput and memory of every cell, as bars over the batch size: the first setting that
differs between the choices (sharding, attention, recomputation) gives the colours; the others have
a column of panels for each combination, numbers of cameras a row.
"""

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

from paddle_vl.profile.cells import SHARDING_CHOICES, Cell, MatrixChoice
from paddle_vl.profile.matrix import MatrixSettings
from paddle_vl.train.reporting.plots import COLOURS, label_axes, new_figure

_NUMBERS = ("tensors GB", "memory GB", "of limit", "step ms", "median ms", "backward ms", "CPU ms")
# The same sharding has the same colour in every plot that compares shardings.
_COLOURED = (*SHARDING_CHOICES[1:], SHARDING_CHOICES[0])


class Recommendation(NamedTuple):
    """The recommended cell for one number of cameras, None if none fits, and the reason."""

    cameras: int | None
    cell: Cell | None
    reason: str


def write_report(cells: Sequence[Cell], settings: MatrixSettings, memory_share: float) -> str:
    """Write matrix.json, matrix.md and matrix.png into the folder of the matrix.

    Returns:
        The content of matrix.md.
    """
    limit, profile = settings.profile.memory_limit_gb, settings.profile
    if limit is None:
        # That of the cells' device.
        limits = (cell.profile["memory_limit_gb"] for cell in cells if cell.status == "ok")
        limit = next(limits, None)
    chosen = recommendations(cells, limit, memory_share)
    values = {
        "num_processes": settings.num_processes,
        "warmup": profile.warmup_steps,
        "measured": profile.steps,
        "repeats": settings.repeats,
        "memory_limit_gb": limit,
        "memory_share": memory_share,
        "cells": [cell.as_json() for cell in cells],
        "recommendations": [
            each._asdict() | {"cell": each.cell and each.cell.name} for each in chosen
        ],
    }
    (profile.out / "matrix.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    text = matrix_markdown(cells, limit, chosen)
    (profile.out / "matrix.md").write_text(text, encoding="utf-8")
    matrix_figure(cells, limit).savefig(profile.out / "matrix.png", dpi=100)
    return text


def recommendations(
    cells: Sequence[Cell], limit_gb: float | None, memory_share: float
) -> list[Recommendation]:
    """For each number of cameras the fastest cell under a share of the memory limit.

    Args:
        limit_gb: memory limit of a rank; None for no limit.
        memory_share: share of the limit that a cell may use, in (0, 1].

    Raises:
        ValueError: a share out of range.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"a memory share of {memory_share}: it must be above 0 and at most 1")
    cameras = dict.fromkeys(cell.choice.cameras for cell in cells)
    return [
        Recommendation(
            n, *_recommended([c for c in cells if c.choice.cameras == n], limit_gb, memory_share)
        )
        for n in cameras
    ]


def _recommended(
    cells: Sequence[Cell], limit_gb: float | None, memory_share: float
) -> tuple[Cell | None, str]:
    measured = [cell for cell in cells if cell.status == "ok"]
    if not measured:
        return None, f"none of the {len(cells)} cells ran"
    allowed = [c for c in measured if limit_gb is None or c.memory_gb <= memory_share * limit_gb]
    if not allowed:
        least = min(measured, key=lambda cell: cell.memory_gb)
        return None, (
            f"none of the {len(measured)} cells that ran stays below {100 * memory_share:g} % of "
            f"{limit_gb:g} GB; the smallest, {described(least)}, takes {least.memory_gb:.2f} GB"
        )
    best = max(allowed, key=lambda cell: cell.samples_per_sec)
    runs = f" ({_spread(best)} in {len(best.runs)} runs)" if len(best.runs) > 1 else ""
    share = "" if limit_gb is None else f", {100 * best.memory_gb / limit_gb:.0f} % of the limit"
    reason = f"{best.samples_per_sec:.2f} samples/s{runs} with {best.memory_gb:.2f} GB{share}"
    over = max(measured, key=lambda cell: cell.samples_per_sec)
    if over not in allowed:
        reason += (
            f"; {described(over)} makes {over.samples_per_sec:.2f}, but takes {over.memory_gb:.2f} "
            f"GB, above {100 * memory_share:g} %"
        )
    return best, reason


def described(cell: Cell) -> str:
    """A cell in words."""
    choice = cell.choice
    cameras = "" if choice.cameras is None else f", {choice.cameras} camera(s)"
    attention = "" if choice.attention is None else f", {choice.attention} attention"
    start = f"{choice.sharding}{attention}, recompute {choice.recompute}"
    return f"{start}{cameras}, batch {cell.batch_size}"


def _spread(cell: Cell) -> str:
    return "{:.2f} to {:.2f}".format(*cell.speed_range)


def matrix_markdown(
    cells: Sequence[Cell], limit: float | None, chosen: Sequence[Recommendation]
) -> str:
    """All cells as a table, and recommendations."""
    with_attention = any(cell.choice.attention is not None for cell in cells)
    with_runs = any(len(cell.runs) > 1 for cell in cells)
    names = ["sharding", *["attention"] * with_attention, "recompute"]
    numbers = ["cameras", "batch", *_NUMBERS, "samples/s", *["of runs"] * with_runs]
    rows = [[*names, *numbers], ["---"] * len(names) + ["---:"] * len(numbers)]
    for cell in cells:
        choice = cell.choice
        start = [choice.sharding, *[choice.attention or ""] * with_attention, choice.recompute]
        start += ["" if choice.cameras is None else str(choice.cameras), str(cell.batch_size)]
        spread = [_spread(cell) if cell.status == "ok" else ""] * with_runs
        rows.append([*start, *_values(cell, limit), *spread])
    lines = [*(f"| {' | '.join(row)} |" for row in rows), ""]
    for item in chosen:
        cameras = "" if item.cameras is None else f" with {item.cameras} camera(s)"
        best = "nothing" if item.cell is None else described(item.cell)
        lines.append(f"**Recommended{cameras}: {best}.** {item.reason}.")
    failed = [cell for cell in cells if cell.status in ("failed", "timeout")]
    if failed:
        lines += ["", "Cells that ended for another reason than memory:", ""]
        lines += [f"- {described(cell)}: {cell.status}, {cell.detail}" for cell in failed]
    return "\n".join(lines) + "\n"


def _values(cell: Cell, limit: float | None) -> list[str]:
    """The numbers of a cell, from its tensors to samples/s; its status if it did not run."""
    if cell.status != "ok":
        shown = {"oom": "OOM", "timeout": "out of time"}.get(cell.status, cell.status)
        return [shown, *[""] * len(_NUMBERS)]
    profile = cell.profile
    backward = profile["phase_means_s"].get("bwd")
    return [
        f"{profile['peak_alloc_gb_worst']:.2f}",
        f"{cell.memory_gb:.2f}",
        "" if limit is None else f"{100 * cell.memory_gb / limit:.0f} %",
        f"{1000 * profile['global_step_time_s']:.0f}",
        f"{1000 * profile['phase_medians_s']['total']:.0f}",
        "" if backward is None else f"{1000 * backward:.0f}",
        f"{1000 * mean(profile['per_rank_cpu_time_s']):.0f}",
        f"{cell.samples_per_sec:.2f}",
    ]


def series_and_column(choices: Sequence[MatrixChoice]) -> dict[MatrixChoice, tuple[str, str]]:
    """Legend entry of each choice and the title of its column, by the settings that differ."""
    words = {
        choice: (choice.sharding, f"{choice.attention} attention", f"recompute {choice.recompute}")
        for choice in choices
    }
    differing = [i for i in range(3) if len({of_choice[i] for of_choice in words.values()}) > 1]
    first, *others = differing or [0]
    return {
        choice: (of_choice[first], ", ".join(of_choice[i] for i in others))
        for choice, of_choice in words.items()
    }


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
        seen = f"{number} camera{'s' if number > 1 else ''}" if number else ""
        for column, name in enumerate(columns):
            panels = grid[2 * row][column], grid[2 * row + 1][column]
            for cell in own:
                label, place_of = places[cell.choice]
                if place_of == name:
                    place = series.index(label)
                    at = sizes.index(cell.batch_size) + (place + 0.5) / len(series) * 0.8 - 0.4
                    if label in _COLOURED:
                        place = _COLOURED.index(label)
                    _draw_cell(
                        panels, cell, at, 0.72 / len(series), COLOURS[place % len(COLOURS)], label
                    )
            head = "".join(
                f": {words}" for words in [", ".join(filter(None, [seen, name]))] if words
            )
            label_axes(panels[0], f"Throughput{head}", "", "samples/s, all ranks")
            label_axes(panels[1], f"Memory{head}", "", "GB, largest rank")
            if limit_gb is not None:
                panels[1].axhline(limit_gb, color="black", linewidth=0.8, linestyle=":")
            for axes in panels:
                axes.set_ylim(bottom=0)
                axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
                axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
                axes.grid(visible=False, axis="x")
    for axes in grid[-1]:
        axes.set_xlabel("samples per micro-batch of a rank (x: does not fit)")
    found: dict[str, Any] = {}
    for axes in grid.flat:
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if found:
        shown = [name for name in series if name in found]
        figure.legend(
            [found[name] for name in shown], shown,
            loc="outside lower center", ncols=len(shown), frameon=False,
        )  # fmt: skip
    return figure


def _draw_cell(
    panels: tuple[Any, Any], cell: Cell, at: float, width: float, colour: str, label: str
) -> None:
    if cell.status == "oom":
        for axes in panels:
            axes.plot([at], [0.04], "x", color=colour, transform=axes.get_xaxis_transform())
        return
    speed, memory = panels
    low, high = cell.speed_range
    value = cell.samples_per_sec
    ranges = [[value - low], [high - value]] if high > low else None
    speed.bar([at], [value], width, yerr=ranges, capsize=2, color=colour, label=label)
    memory.bar([at], [cell.memory_gb], width, color=colour)
