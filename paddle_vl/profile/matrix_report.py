"""The result of a matrix: JSON, a markdown table with its recommendations, and a plot.

Numbers of a cell are those of its run of median throughput, beside the range of all its runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from paddle_vl.profile.cells import Cell, Choice
from paddle_vl.profile.matrix import MatrixSettings
from paddle_vl.profile.matrix_plot import draw_matrix
from paddle_vl.profile.recommend import (
    Comparison,
    Recommendation,
    comparisons,
    described,
    largest_batches,
    recommendations,
    spread,
)

_COMPARED = ("stage2", "stage3")
_NUMBERS = ("tensors GB", "memory GB", "of limit", "step ms", "median ms", "backward ms", "CPU ms")


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
        "repeats": settings.repeats,
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
    columns = _Columns.of(cells)
    lines = columns.head()
    lines += [columns.row(cell, limit) for cell in cells]
    lines += ["", *_recommended_lines(chosen), *_compared_lines(cells, compared, columns)]
    failed = [cell for cell in cells if cell.status in ("failed", "timeout")]
    if failed:
        lines += ["", "Cells that ended for another reason than memory:", ""]
        lines += [f"- {described(cell)}: {cell.status}, {cell.detail}" for cell in failed]
    return "\n".join(lines) + "\n"


class _Columns(NamedTuple):
    """Which columns the cells need beyond those of every matrix."""

    attention: bool
    runs: bool

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "_Columns":
        return cls(
            any(cell.choice.attention is not None for cell in cells),
            any(len(cell.runs) > 1 for cell in cells),
        )

    def head(self) -> list[str]:
        """The head of the table, two lines."""
        names = ["sharding", *(["attention"] if self.attention else []), "recompute"]
        numbers = ["cameras", "batch", *_NUMBERS, "samples/s", *(["of runs"] if self.runs else [])]
        line = "| " + " | ".join([*names, *numbers]) + " |"
        return [line, "|" + " --- |" * len(names) + " ---: |" * len(numbers)]

    def start(self, choice: Choice) -> list[str]:
        """The cells of a row that say which choice it is, but for the sharding."""
        attention = [choice.attention or ""] if self.attention else []
        cameras = "" if choice.cameras is None else str(choice.cameras)
        return [*attention, choice.recompute, cameras]

    def row(self, cell: Cell, limit: float | None) -> str:
        start = [cell.choice.sharding, *self.start(cell.choice), str(cell.batch_size)]
        if cell.status != "ok":
            shown = {"oom": "OOM", "timeout": "out of time"}.get(cell.status, cell.status)
            values = [shown, *[""] * (len(_NUMBERS) + self.runs)]
            return "| " + " | ".join([*start, *values]) + " |"
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
            *([spread(cell)] if self.runs else []),
        ]
        return "| " + " | ".join([*start, *values]) + " |"


def _recommended_lines(chosen: Sequence[Recommendation]) -> list[str]:
    lines = []
    for item in chosen:
        cameras = "" if item.cameras is None else f" with {item.cameras} camera(s)"
        cell = "nothing" if item.cell is None else described(item.cell)
        lines.append(f"**Recommended{cameras}: {cell}.** {item.reason}.")
    return lines


def _compared_lines(
    cells: Sequence[Cell], compared: Sequence[Comparison], columns: _Columns
) -> list[str]:
    if not compared:
        return []
    one, other = _COMPARED
    lines = ["", f"{one} against {other}, like for like (all else equal):", ""]
    names = ["attention", "recompute"] if columns.attention else ["recompute"]
    numbers = "cameras batch samples/s by_medians CPU_time memory tensors backward".split()
    lines.append("| " + " | ".join([*names, *numbers]).replace("_", " ") + " |")
    lines.append("|" + " --- |" * len(names) + " ---: |" * len(numbers))
    for item in compared:
        start, share = columns.start(item.one.choice), item.share_of_gap("backward")
        chance = " (ranges overlap)" if item.is_within_spread else ""
        memory = item.one.memory_gb - item.other.memory_gb
        tensors = item.one.tensors_gb - item.other.tensors_gb
        lines.append(
            f"| {' | '.join(start)} | {item.one.batch_size} "
            f"| {item.speedup:.2f}x{chance} | {item.speedup_of_medians:.2f}x "
            f"| {item.cpu_ratio:.2f}x | {memory:+.2f} GB | {tensors:+.2f} GB | "
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
        f"{choice.sharding} with "
        + ("" if choice.attention is None else f"{choice.attention} attention, ")
        + f"recompute {choice.recompute}"
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
        "ranges_overlap": item.is_within_spread,
        "cpu_ratio": item.cpu_ratio,
        "memory_difference_gb": item.one.memory_gb - item.other.memory_gb,
        "percent_of_gap_in_backward": item.share_of_gap("backward"),
        "percent_of_gap_in_forward": item.share_of_gap("forward"),
    }
