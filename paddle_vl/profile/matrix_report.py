"""The result of a matrix: JSON, a markdown table with its recommendations, and a plot."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_vl.profile.cells import Cell
from paddle_vl.profile.matrix import MatrixSettings
from paddle_vl.profile.recommend import (
    Comparison,
    Recommendation,
    comparisons,
    described,
    largest_batches,
    recommendations,
)

_COMPARED = ("stage2", "stage3")
_COLOURS = {"none": "C7", "dp": "C0", "stage1": "C2", "stage2": "C1", "stage3": "C3"}
_STYLES = {"none": "o-", "full": "s--"}
_HEAD = (
    "sharding", "recompute", "cameras", "batch", "tensors GB", "memory GB", "of limit", "step ms",
    "median ms", "backward ms", "CPU ms", "samples/s",
)  # fmt: skip


def write_report(cells: Sequence[Cell], settings: MatrixSettings, memory_share: float) -> str:
    """Write matrix.json, matrix.md and matrix.png into the folder of the matrix.

    Returns:
        The content of matrix.md.
    """
    limit = memory_limit_gb(cells, settings)
    chosen = recommendations(cells, limit, memory_share)
    compared = comparisons(cells, *_COMPARED)
    values = {
        "num_processes": settings.num_processes,
        "warmup": settings.warmup_steps,
        "measured": settings.steps,
        "memory_limit_gb": limit,
        "memory_share": memory_share,
        "cells": [asdict(cell) | {"choice": cell.choice._asdict()} for cell in cells],
        "recommendations": [
            {"cameras": r.cameras, "cell": r.cell and r.cell.name, "reason": r.reason}
            for r in chosen
        ],
        "comparisons": [_compared(c) for c in compared],
    }
    out = settings.out
    (out / "matrix.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    text = matrix_markdown(cells, limit, chosen, compared)
    (out / "matrix.md").write_text(text, encoding="utf-8")
    draw_matrix(cells, limit, out / "matrix.png")
    return text


def memory_limit_gb(cells: Sequence[Cell], settings: MatrixSettings) -> float | None:
    """Memory limit of a rank: the setting, or the memory of the cells' device."""
    if settings.memory_limit_gb is not None:
        return settings.memory_limit_gb
    limits = [c.profile["memory_limit_gb"] for c in cells if c.status == "ok"]
    return limits[0] if limits else None


def matrix_markdown(
    cells: Sequence[Cell],
    limit: float | None,
    chosen: Sequence[Recommendation],
    compared: Sequence[Comparison],
) -> str:
    """All cells as a table, recommendations and comparisons."""
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- | --- |" + " ---: |" * (len(_HEAD) - 2)]
    lines += [_row(cell, limit) for cell in cells]
    lines += ["", *_recommended_lines(chosen), *_compared_lines(cells, compared)]
    failed = [cell for cell in cells if cell.status in ("failed", "timeout")]
    if failed:
        lines += ["", "Cells that ended for another reason than memory:", ""]
        lines += [f"- {described(cell)}: {cell.status}, {cell.detail}" for cell in failed]
    return "\n".join(lines) + "\n"


def _row(cell: Cell, limit: float | None) -> str:
    choice = cell.choice
    cameras = "" if choice.cameras is None else str(choice.cameras)
    start = [choice.sharding, choice.recompute, cameras, str(cell.batch_size)]
    if cell.status != "ok":
        shown = {"oom": "OOM", "timeout": "out of time"}.get(cell.status, cell.status)
        return "| " + " | ".join([*start, shown, *[""] * (len(_HEAD) - 5)]) + " |"
    backward = 1000 * cell.profile["phase_means_s"].get("bwd", math.nan)
    values = [
        f"{cell.tensors_gb:.2f}",
        f"{cell.memory_gb:.2f}",
        "" if limit is None else f"{100 * cell.memory_gb / limit:.0f} %",
        f"{cell.step_ms:.0f}",
        f"{cell.median_step_ms:.0f}",
        "" if math.isnan(backward) else f"{backward:.0f}",
        f"{cell.cpu_ms:.0f}",
        f"{cell.samples_per_sec:.2f}",
    ]
    return "| " + " | ".join([*start, *values]) + " |"


def _recommended_lines(chosen: Sequence[Recommendation]) -> list[str]:
    lines = []
    for item in chosen:
        cameras = "" if item.cameras is None else f" with {item.cameras} camera(s)"
        cell = "nothing" if item.cell is None else described(item.cell)
        lines.append(f"**Recommended{cameras}: {cell}.** {item.reason}.")
    return lines


def _compared_lines(cells: Sequence[Cell], compared: Sequence[Comparison]) -> list[str]:
    if not compared:
        return []
    one, other = _COMPARED
    lines = ["", f"{one} against {other}, like for like (all else equal):", ""]
    lines += [
        "| recompute | cameras | batch | samples/s | by medians | CPU time | memory | tensors "
        "| backward |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for item in compared:
        choice, share = item.one.choice, item.share_of_gap("backward")
        memory = item.one.memory_gb - item.other.memory_gb
        tensors = item.one.tensors_gb - item.other.tensors_gb
        lines.append(
            f"| {choice.recompute} | {choice.cameras or ''} | {item.one.batch_size} "
            f"| {item.speedup:.2f}x | {item.speedup_of_medians:.2f}x | {item.cpu_ratio:.2f}x "
            f"| {memory:+.2f} GB | {tensors:+.2f} GB | "
            + ("no gap |" if share is None else f"{share:.0f} % of the gap |")
        )
    largest = largest_batches(cells)
    lines += [
        "",
        f"Over these {one} makes {_geometric([c.speedup for c in compared]):.2f} times the "
        f"samples/s of {other} (geometric mean; "
        f"{_geometric([c.speedup_of_medians for c in compared]):.2f} by median steps), and takes "
        f"{_geometric([c.cpu_ratio for c in compared]):.2f} times its CPU time.",
    ]
    fits = [
        f"{choice.sharding} with recompute {choice.recompute}"
        + ("" if choice.cameras is None else f" and {choice.cameras} camera(s)")
        + f" {size}"
        for choice, size in largest.items()
        if choice.sharding in _COMPARED
    ]
    lines += [f"Largest batches that fit: {', '.join(fits)}."]
    return lines


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _compared(item: Comparison) -> dict[str, Any]:
    return {
        "one": item.one.name,
        "other": item.other.name,
        "speedup": item.speedup,
        "speedup_of_medians": item.speedup_of_medians,
        "cpu_ratio": item.cpu_ratio,
        "memory_difference_gb": item.one.memory_gb - item.other.memory_gb,
        "percent_of_gap_in_backward": item.share_of_gap("backward"),
        "percent_of_gap_in_forward": item.share_of_gap("forward"),
    }


def draw_matrix(cells: Sequence[Cell], limit_gb: float | None, path: Path) -> None:
    """Plot throughput, CPU time and memory over batch size, a line for each choice.

    One column for each number of cameras; a cross marks a batch that did not fit.
    """
    # A figure with its own canvas: no display, no global state, and nothing imported before.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cameras = list(dict.fromkeys(cell.choice.cameras for cell in cells)) or [None]
    figure = Figure(figsize=(1.5 + 4.2 * len(cameras), 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(cameras), squeeze=False, sharex="col")
    for column, number in enumerate(cameras):
        speed, work, memory = (row[column] for row in grid)
        own = [cell for cell in cells if cell.choice.cameras == number]
        for choice in dict.fromkeys(cell.choice for cell in own):
            of_choice = [cell for cell in own if cell.choice == choice]
            look = {"color": _COLOURS[choice.sharding], "markersize": 4}
            measured = [cell for cell in of_choice if cell.status == "ok"]
            sizes = [cell.batch_size for cell in measured]
            label = f"{choice.sharding}, recompute {choice.recompute}"
            style = _STYLES[choice.recompute]
            speed.plot(sizes, [c.samples_per_sec for c in measured], style, label=label, **look)
            work.plot(sizes, [c.cpu_ms_per_sample for c in measured], style, **look)
            memory.plot(sizes, [c.memory_gb for c in measured], style, **look)
            too_large = [cell.batch_size for cell in of_choice if cell.status == "oom"]
            if too_large and limit_gb is not None:
                memory.plot(too_large, [limit_gb] * len(too_large), "x", **look)
        _label(speed, work, memory, number, limit_gb)
        # A logarithmic axis needs a size.
        if sizes := sorted({cell.batch_size for cell in own if cell.status in ("ok", "oom")}):
            speed.set_xscale("log", base=2)
            memory.set_xticks(sizes, [str(size) for size in sizes])
            memory.minorticks_off()
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=90)


def _label(speed: Any, work: Any, memory: Any, cameras: int | None, limit_gb: float | None) -> None:
    if cameras is not None:
        speed.set_title(f"{cameras} camera(s)")
    speed.set_ylabel("samples/s, all ranks")
    work.set_ylabel("CPU time for a sample, ms")
    memory.set_ylabel("memory of the largest rank, GB")
    memory.set_xlabel("samples per micro-batch")
    if limit_gb is not None:
        memory.axhline(limit_gb, color="black", linewidth=0.8, linestyle=":")
    for axes in (speed, work, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
