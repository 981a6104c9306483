"""The result of a matrix: JSON, a markdown table with its recommendations, and a plot.

Numbers of a cell are those of its run of median throughput, beside the range of all its runs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from paddle_vl.profile.cells import Cell
from paddle_vl.profile.matrix import MatrixSettings
from paddle_vl.profile.matrix_plot import draw_matrix

_NUMBERS = ("tensors GB", "memory GB", "of limit", "step ms", "median ms", "backward ms", "CPU ms")
# Of cells within this share of the best throughput, the one with least memory is recommended.
_AS_GOOD = 0.02


@dataclass(frozen=True)
class Recommendation:
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
        limits = [c.profile["memory_limit_gb"] for c in cells if c.status == "ok"]
        limit = limits[0] if limits else None
    chosen = recommendations(cells, limit, memory_share)
    values = {
        "num_processes": settings.num_processes,
        "warmup": profile.warmup_steps,
        "measured": profile.steps,
        "repeats": settings.repeats,
        "memory_limit_gb": limit,
        "memory_share": memory_share,
        "cells": [asdict(cell) | {"choice": cell.choice._asdict()} for cell in cells],
        "recommendations": [
            {"cameras": r.cameras, "cell": r.cell and r.cell.name, "reason": r.reason}
            for r in chosen
        ],
    }
    (profile.out / "matrix.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    text = matrix_markdown(cells, limit, chosen)
    (profile.out / "matrix.md").write_text(text, encoding="utf-8")
    draw_matrix(cells, limit, profile.out / "matrix.png")
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
        _recommended([c for c in cells if c.choice.cameras == n], n, limit_gb, memory_share)
        for n in cameras
    ]


def _recommended(
    cells: Sequence[Cell], cameras: int | None, limit_gb: float | None, memory_share: float
) -> Recommendation:
    measured = [cell for cell in cells if cell.status == "ok"]
    allowed = [c for c in measured if limit_gb is None or c.memory_gb <= memory_share * limit_gb]
    if not allowed:
        reason = f"none of the {len(cells)} cells ran"
        if measured:
            least = min(measured, key=lambda cell: cell.memory_gb)
            reason = (
                f"none of the {len(measured)} cells that ran stays below "
                f"{100 * memory_share:g} % of {limit_gb:g} GB; the smallest, {described(least)}, "
                f"takes {least.memory_gb:.2f} GB"
            )
        return Recommendation(cameras, None, reason)
    fastest = max(allowed, key=lambda cell: cell.samples_per_sec)
    as_good = [
        cell for cell in allowed if cell.samples_per_sec >= (1 - _AS_GOOD) * fastest.samples_per_sec
    ]
    best = min(as_good, key=lambda cell: cell.memory_gb)
    runs = f" ({_spread(best)} in {len(best.runs)} runs)" if len(best.runs) > 1 else ""
    reason = f"{best.samples_per_sec:.2f} samples/s{runs} with {_memory(best, limit_gb)}"
    if best is not fastest:
        reason += (
            f"; {described(fastest)} is faster by less than {100 * _AS_GOOD:g} % and takes "
            f"{_memory(fastest, limit_gb)}"
        )
    others = [cell for cell in allowed if cell.choice.sharding != best.choice.sharding]
    if others:
        next_best = max(others, key=lambda cell: cell.samples_per_sec)
        reason += (
            f"; the best of another sharding, {described(next_best)}, makes "
            f"{next_best.samples_per_sec:.2f}"
        )
    over = max(measured, key=lambda cell: cell.samples_per_sec)
    if over not in allowed and over.samples_per_sec > fastest.samples_per_sec:
        reason += (
            f"; {described(over)} makes {over.samples_per_sec:.2f}, but takes "
            f"{_memory(over, limit_gb)}, above {100 * memory_share:g} %"
        )
    return Recommendation(cameras, best, reason)


def described(cell: Cell) -> str:
    """A cell in words."""
    choice = cell.choice
    cameras = "" if choice.cameras is None else f", {choice.cameras} camera(s)"
    attention = "" if choice.attention is None else f", {choice.attention} attention"
    start = f"{choice.sharding}{attention}, recompute {choice.recompute}"
    return f"{start}{cameras}, batch {cell.batch_size}"


def _spread(cell: Cell) -> str:
    return "{:.2f} to {:.2f}".format(*cell.speed_range)


def _memory(cell: Cell, limit_gb: float | None) -> str:
    if limit_gb is None:
        return f"{cell.memory_gb:.2f} GB"
    return f"{cell.memory_gb:.2f} GB, {100 * cell.memory_gb / limit_gb:.0f} % of the limit"


def matrix_markdown(
    cells: Sequence[Cell], limit: float | None, chosen: Sequence[Recommendation]
) -> str:
    """All cells as a table, and recommendations."""
    with_attention = any(cell.choice.attention is not None for cell in cells)
    with_runs = any(len(cell.runs) > 1 for cell in cells)
    names = ["sharding", *["attention"] * with_attention, "recompute"]
    numbers = ["cameras", "batch", *_NUMBERS, "samples/s", *["of runs"] * with_runs]
    lines = [_row([*names, *numbers])]
    lines.append("|" + " --- |" * len(names) + " ---: |" * len(numbers))
    for cell in cells:
        choice = cell.choice
        start = [choice.sharding, *[choice.attention or ""] * with_attention, choice.recompute]
        start += ["" if choice.cameras is None else str(choice.cameras), str(cell.batch_size)]
        values = _values(cell, limit)
        if with_runs:
            values.append(_spread(cell) if cell.status == "ok" else "")
        lines.append(_row([*start, *values]))
    lines.append("")
    for item in chosen:
        cameras = "" if item.cameras is None else f" with {item.cameras} camera(s)"
        best = "nothing" if item.cell is None else described(item.cell)
        lines.append(f"**Recommended{cameras}: {best}.** {item.reason}.")
    failed = [cell for cell in cells if cell.status in ("failed", "timeout")]
    if failed:
        lines += ["", "Cells that ended for another reason than memory:", ""]
        lines += [f"- {described(cell)}: {cell.status}, {cell.detail}" for cell in failed]
    return "\n".join(lines) + "\n"


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


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
