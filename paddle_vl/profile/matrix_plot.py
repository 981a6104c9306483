"""The plot of a matrix: throughput, CPU time and memory over batch size, a line for each choice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.profile.cells import Cell, Choice

# The same sharding has the same colour in every plot that compares shardings.
_SHARDING_COLOURS = {"none": "C7", "dp": "C0", "stage1": "C2", "stage2": "C1", "stage3": "C3"}
_COLOURS = ("C0", "C1", "C2", "C3")
_STYLES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


class Look(NamedTuple):
    """Colour, line style and marker of a choice's line, and its name in the legend."""

    colour: str
    style: str
    marker: str
    label: str


def looks(choices: Sequence[Choice]) -> dict[Choice, Look]:
    """A look for each choice, by the settings that differ between them.

    The first setting that differs (sharding, attention, recomputation) gives the colours, the next
    the line styles, the third the markers; so lines of one sharding differ in colour too. The
    legend names the settings that differ, or the sharding where none does.
    """
    values = {
        "sharding": [choice.sharding for choice in choices],
        "attention": [choice.attention or "" for choice in choices],
        "recompute": [choice.recompute for choice in choices],
    }
    levels = {name: list(dict.fromkeys(of_name)) for name, of_name in values.items()}
    differing = [name for name, found in levels.items() if len(found) > 1] or ["sharding"]
    found = {}
    for i, choice in enumerate(choices):
        places = [levels[name].index(values[name][i]) for name in differing] + [0, 0]
        colour = _COLOURS[places[0] % len(_COLOURS)]
        if differing[0] == "sharding":
            colour = _SHARDING_COLOURS[choice.sharding]
        style, marker = _STYLES[places[1] % len(_STYLES)], _MARKERS[places[1] % len(_MARKERS)]
        if len(differing) > 2:
            marker = _MARKERS[places[2] % len(_MARKERS)]
        words = {
            "sharding": choice.sharding,
            "attention": f"{choice.attention} attention",
            "recompute": f"recompute {choice.recompute}",
        }
        found[choice] = Look(colour, style, marker, ", ".join(words[name] for name in differing))
    return found


def draw_matrix(cells: Sequence[Cell], limit_gb: float | None, path: Path) -> None:
    """Write the plot of a matrix as PNG."""
    matrix_figure(cells, limit_gb).savefig(path, dpi=90)


def matrix_figure(cells: Sequence[Cell], limit_gb: float | None) -> Any:
    """The plot of a matrix, a matplotlib Figure.

    One column for each number of cameras; bars are the range of a cell's runs, a cross marks a
    batch that did not fit.
    """
    # A figure with its own canvas: no display, no global state, and nothing imported before.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cameras = list(dict.fromkeys(cell.choice.cameras for cell in cells)) or [None]
    figure = Figure(figsize=(1.5 + 4.2 * len(cameras), 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(cameras), squeeze=False, sharex="col")
    found = looks(list(dict.fromkeys(cell.choice for cell in cells)))
    for column, number in enumerate(cameras):
        panels = speed, _, memory = grid[0][column], grid[1][column], grid[2][column]
        own = [cell for cell in cells if cell.choice.cameras == number]
        for choice in dict.fromkeys(cell.choice for cell in own):
            of_choice = [cell for cell in own if cell.choice == choice]
            _draw_choice(panels, of_choice, found[choice], limit_gb)
        _label(panels, number, limit_gb)
        # A logarithmic axis needs a size.
        if sizes := sorted({cell.batch_size for cell in own if cell.status in ("ok", "oom")}):
            speed.set_xscale("log", base=2)
            memory.set_xticks(sizes, [str(size) for size in sizes])
            memory.minorticks_off()
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        # Inches of an entry: its line, and its letters at this size.
        entry = 0.6 + 0.065 * max(map(len, labels))
        columns = max(1, min(4, int(figure.get_figwidth() / entry)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=7)
    return figure


def _draw_choice(
    panels: tuple[Any, ...], cells: Sequence[Cell], look: Look, limit_gb: float | None
) -> None:
    speed, work, memory = panels
    drawn = {"color": look.colour, "markersize": 4}
    line = drawn | {"linestyle": look.style, "marker": look.marker}
    measured = [cell for cell in cells if cell.status == "ok"]
    sizes = [cell.batch_size for cell in measured]
    speeds = [cell.samples_per_sec for cell in measured]
    ranges = [cell.speed_range for cell in measured]
    below = [value - low for value, (low, _) in zip(speeds, ranges, strict=True)]
    above = [high - value for value, (_, high) in zip(speeds, ranges, strict=True)]
    speed.errorbar(sizes, speeds, yerr=[below, above], capsize=2, label=look.label, **line)
    work.plot(sizes, [cell.cpu_ms_per_sample for cell in measured], **line)
    memory.plot(sizes, [cell.memory_gb for cell in measured], **line)
    too_large = [cell.batch_size for cell in cells if cell.status == "oom"]
    if too_large and limit_gb is not None:
        memory.plot(too_large, [limit_gb] * len(too_large), "x", **drawn)


def _label(panels: tuple[Any, ...], cameras: int | None, limit_gb: float | None) -> None:
    speed, work, memory = panels
    if cameras is not None:
        speed.set_title(f"{cameras} camera(s)")
    speed.set_ylabel("samples/s, all ranks")
    work.set_ylabel("CPU time for a sample, ms")
    memory.set_ylabel("memory of the largest rank, GB")
    memory.set_xlabel("samples per micro-batch")
    if limit_gb is not None:
        memory.axhline(limit_gb, color="black", linewidth=0.8, linestyle=":")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
