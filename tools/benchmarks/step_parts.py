"""Where the time of a training step goes, by part: before and after the work on CPU speed.

    python tools/benchmarks/step_parts.py
    python tools/benchmarks/step_parts.py --before CHECKOUT --plot FILE.png

Trains the configurations of `step.py` with Paddle's own operations (`train.kernels=plain`), with
this package's but without a C compiler, and with its kernels in C; with `--before` also with the
package of another checkout. Each side is a process of its own, in which plain steps and steps in
Paddle's profiler take turns. Shown are the parts of the fastest profiled step; `step_trace.py` has
the patterns that tell the parts.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Table, in_rounds, launch, leave, make_data, parser, show, spread
from step import CONFIGS, DATA_OPTIONS, THREADS, WARM_UP, build
from step_nodes import labelled, mark, phase_clock, traced
from step_trace import NAMES, REST, UNCLASSIFIED, read, sums, unclassified

BEFORE, PLAIN, NO_COMPILER, COMPILED = "before", "Paddle's operations", "no compiler", "C kernels"
SIDES = (PLAIN, BEFORE, NO_COMPILER, COMPILED)
SETTINGS = {PLAIN: ["train.kernels=plain"]}
# Shares of the longest bar: a letter of a label, and the least part that is drawn.
_LETTER, _LEAST = 0.0085, 0.004


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Parts of the profiled steps of one side, in this process."""
    mark()
    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime(THREADS)
    is_compiled = False
    if options.side == COMPILED:
        from paddle_vl.nn.cpu import compiled

        is_compiled = compiled.enable()
    work = Path(options.worker)
    trainer = build(options.family, SETTINGS.get(options.side, []), work)
    clock = phase_clock()

    def step() -> None:
        with clock.step():
            outcome = trainer.train_one_step()
        if not outcome.is_good:
            raise RuntimeError(f"step {trainer.step} was skipped")

    for _ in range(WARM_UP):
        step()
    nodes = labelled(step)
    plain, profiled, files = [], [], []
    for number in range(options.steps):
        begin = time.perf_counter()
        step()
        plain.append(time.perf_counter() - begin)
        files.append(work / f"trace{number}.json")
        profiled.append(traced(step, files[-1]))
    trainer.feed.close()
    found = [read(file, nodes) for file in files]
    return {
        "is_compiled": is_compiled,
        "num_nodes": len(nodes),
        "steps": [sums(shares) for shares in found],
        "unclassified": [unclassified(shares) for shares in found],
        "seconds": plain,
        "profiled_seconds": profiled,
    }


def compare(options: argparse.Namespace, family: str, folder: Path) -> list[dict[str, Any]]:
    """Results of all rounds, by side."""
    make_data(family, folder / "data", *DATA_OPTIONS[family])

    def run(side: str) -> dict[str, Any]:
        package = options.before if side == BEFORE else ROOT
        arguments = ["--worker", str(folder), "--family", family, "--side", side]
        arguments += ["--steps", str(options.steps)]
        return launch(__file__, 1, arguments, folder, package)[0]

    sides = [side for side in SIDES if side != BEFORE or options.before]
    return in_rounds(sides, options.rounds, run)


def fastest(rounds: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    """Milliseconds of every part of the fastest profiled step: those of one step sum to it."""
    steps = [step for one in rounds for step in one[side]["steps"]]
    return min(steps, key=lambda step: sum(step.values()))


def table(family: str, rounds: Sequence[dict[str, Any]]) -> Table:
    """A row per part, a column per side."""
    sides = [side for side in SIDES if side in rounds[0]]
    found = {side: fastest(rounds, side) for side in sides}
    shown = [part for part in NAMES if any(of_side[part] > 0 for of_side in found.values())]
    rows = [["all", *(f"{sum(found[side].values()):.0f}" for side in sides)]]
    rows += [[part, *(f"{found[side][part]:.1f}" for side in sides)] for part in shown]
    runs = [one[side] for one in rounds for side in sides]
    ratios = [
        profiled / plain
        for run in runs
        for profiled, plain in zip(run["profiled_seconds"], run["seconds"], strict=True)
    ]
    num_steps = len(ratios) // len(sides)
    note = (
        f"Milliseconds of the fastest of {num_steps} profiled steps, float32, {THREADS} threads. "
        f"A profiled step takes {spread(ratios, 2)} times the plain one before it."
    )
    unknown: dict[str, float] = defaultdict(float)
    for step in (step for run in runs for step in run["unclassified"]):
        for kernel, ms in step.items():
            name = kernel.rpartition("/")[2]
            unknown[name] = max(unknown[name], ms)
    if unknown:
        most = sorted(unknown, key=lambda name: -unknown[name])[:6]
        note += f" The largest kernels of the {UNCLASSIFIED}: {', '.join(most)}."
    if not rounds[0][COMPILED]["is_compiled"]:
        note += f" {COMPILED}: none here, there is no compiler."
    return Table(f"step_parts {family}", ["part", *sides], rows, note)


def draw(tables: Sequence[Table], file: Path) -> None:
    """A panel per table, a bar per side, its parts one after the other."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    colours: dict[str, Any] = {name: colormaps["Set3"](i) for i, name in enumerate(NAMES)}
    # Its last yellow is close to another one; so are two greys.
    colours["data wait"], colours[REST] = "0.6", "0.85"
    panels = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
    for axes, drawn in zip(panels, tables, strict=True):
        sides, rows = drawn.columns[1:], {row[0]: list(map(float, row[1:])) for row in drawn.rows}
        largest, left = max(rows["all"]), [0.0] * len(sides)
        for name in (n for n in NAMES if max(rows.get(n, [0.0])) > _LEAST * largest):
            bars = axes.barh(sides, rows[name], left=left, color=colours[name], label=name)
            labels = [_label(name, ms, ms / largest) for ms in rows[name]]
            axes.bar_label(bars, labels, label_type="center", fontsize=7)
            left = [begin + ms for begin, ms in zip(left, rows[name], strict=True)]
        for number, (end, all_ms) in enumerate(zip(left, rows["all"], strict=True)):
            axes.text(end, number, f" {all_ms:.0f} ms", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.09 * largest)
        axes.set_title(f"{drawn.name.split()[1]}: milliseconds of a training step", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    shown = [name for name in NAMES if name in found]
    figure.legend(
        [found[name] for name in shown], shown,
        loc="outside lower center", ncols=6, fontsize=8, frameon=False,
    )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    # Few colours: a small file.
    Image.open(file).quantize(64).save(file, optimize=True)


def _label(name: str, ms: float, share: float) -> str:
    texts = (f"{name} {ms:.0f}", f"{ms:.0f}")
    return next((text for text in texts if len(text) * _LETTER < share), "")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--family", choices=CONFIGS, help="one of the families (default: both)")
    made.add_argument("--before", type=Path, metavar="CHECKOUT", help="also its package")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the parts into a PNG")
    made.add_argument("--steps", type=int, default=6, help="profiled steps of a run (default 6)")
    made.add_argument("--rounds", type=int, default=1, help="runs of each side (default 1)")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--side", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        leave(measure(options), Path(options.worker))
    if options.before is not None:
        options.before = options.before.resolve()
        if not (options.before / "paddle_vl").is_dir():
            made.error(f"--before {options.before}: it has no folder paddle_vl")
    found = {}
    for family in [options.family] if options.family else CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[family] = compare(options, family, Path(folder))
            except RuntimeError as error:
                print(f"step_parts: a run failed:\n{error}", file=sys.stderr)
                return 1
    tables = [table(family, rounds) for family, rounds in found.items()]
    show(options, tables, found)
    if options.plot is not None:
        draw(tables, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
