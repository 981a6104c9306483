"""A matrix as a picture: throughput, CPU time and memory over batch size, a line for a choice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_vl.profile.cells import Cell

_COLOURS = {"none": "C7", "dp": "C0", "stage1": "C2", "stage2": "C1", "stage3": "C3"}
_STYLES = {"none": "o-", "full": "s--"}


def draw_matrix(cells: Sequence[Cell], limit_gb: float | None, path: Path) -> None:
    """Draw a column for each number of cameras; a cross is a batch that did not fit."""
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
        _dress(speed, work, memory, number, limit_gb)
        # A logarithm of nothing is none.
        if sizes := sorted({cell.batch_size for cell in own if cell.status in ("ok", "oom")}):
            speed.set_xscale("log", base=2)
            memory.set_xticks(sizes, [str(size) for size in sizes])
            memory.minorticks_off()
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=90)


def _dress(speed: Any, work: Any, memory: Any, cameras: int | None, limit_gb: float | None) -> None:
    if cameras is not None:
        speed.set_title(f"{cameras} camera(s)")
    speed.set_ylabel("samples/s, all processes")
    work.set_ylabel("CPU time for a sample, ms")
    memory.set_ylabel("memory of the worst process, GB")
    memory.set_xlabel("samples per micro-batch of a process")
    if limit_gb is not None:
        memory.axhline(limit_gb, color="black", linewidth=0.8, linestyle=":")
    for axes in (speed, work, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
