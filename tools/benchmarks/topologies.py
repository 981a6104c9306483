"""Steps of small models on several ranks, by topology: time, collectives, bytes and memory.

    python tools/benchmarks/topologies.py
    python tools/benchmarks/topologies.py --against ../before      # another checkout, with ratios
    python tools/benchmarks/topologies.py --families qwen3_vl --topologies mp2 pp2 --rounds 5

Trains a small Qwen3-VL (`configs/quickstart/digits.yaml`) and a small policy
(`configs/pi07/tiny_cpu.yaml`) over gloo on this machine. With `--against` the same runs use the
package of another checkout too, in every round and in changing order.

Columns: fastest step (median of the rounds); collectives and messages of one step and their bytes,
of the rank with most; peak resident memory beyond that before the model was built, of the rank with
most. A step has two micro-batches. Ratios are medians of the rounds' ratios.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Result, Round, Table
from turns import timed_turns

CONFIGS = {"qwen3_vl": "configs/quickstart/digits.yaml", "pi07": "configs/pi07/tiny_cpu.yaml"}
TOPOLOGIES = {
    "dp2": {"dp_degree": 2},
    "mp2": {"mp_degree": 2},
    "mp2 sp": {"mp_degree": 2, "sequence_parallel": True},
    "pp2": {"pp_degree": 2},
    "sharding2": {"sharding_degree": 2},
    "sharding2 stage 2": {"sharding_degree": 2, "sharding_stage": 2},
    "sharding2 stage 3": {"sharding_degree": 2, "sharding_stage": 3},
    "dp2 mp2": {"dp_degree": 2, "mp_degree": 2},
    "dp2 pp2": {"dp_degree": 2, "pp_degree": 2},
    "mp2 pp2": {"mp_degree": 2, "pp_degree": 2},
    "mp2 sharding2": {"mp_degree": 2, "sharding_degree": 2},
}
# pi07 has no sequence parallelism.
NOT_OF_PI07 = ("mp2 sp",)
SAMPLES, MICRO_BATCHES = 8, 2
MEASURES = ("milliseconds", "collectives", "messages", "bytes", "mib")


def measure(checkout: str, config: str, settings: list[str], steps: int) -> dict[str, float]:
    """Numbers of this rank."""
    import paddle_vl

    if Path(paddle_vl.__file__).resolve().parents[1] != Path(checkout).resolve():
        raise SystemExit(f"paddle_vl comes from {paddle_vl.__file__}, not {checkout}")
    found = timed_turns(config, settings, steps)
    return {name: found[name] for name in MEASURES}


def trained(
    family: str, topology: str, package: Path, folder: Path, steps: int
) -> dict[str, float]:
    """Train with the package of a checkout; the maximum of each number over ranks."""
    degrees: dict[str, Any] = TOPOLOGIES[topology]
    num_ranks = math.prod(value for name, value in degrees.items() if name.endswith("_degree"))
    data_size = degrees.get("dp_degree", 1) * degrees.get("sharding_degree", 1)
    settings = harness.data_settings(family, folder / family) | {
        "train.output_dir": folder / "work" / "out",
        "train.per_device_train_batch_size": SAMPLES // data_size,
        "train.gradient_accumulation_steps": MICRO_BATCHES,
        "logging.logging_steps": 10**6,
    }
    settings |= {f"parallel.{name}": str(degree).lower() for name, degree in degrees.items()}
    if degrees.get("sequence_parallel"):
        settings["data.pad_to_multiple_of"] = degrees["mp_degree"]
    given = {"config": package / CONFIGS[family], "settings": harness.overrides(settings)}
    given |= {"steps": steps, "checkout": str(package)}
    found = harness.launch(measure, folder / "work", num_ranks, package=package, **given)
    return {name: max(each[name] for each in found) for name in found[0]}


def rows(case: str, rounds: list[Round]) -> Iterator[list[str]]:
    """A row per checkout, and one of ratios."""
    for side, first in sorted(rounds[0].items()):
        counts = [str(first["collectives"]), str(first["messages"]), f"{first['bytes'] / 1e6:.2f}"]
        times = f"{harness.median(rounds, side, 'milliseconds'):.1f}"
        memory = f"{harness.median(rounds, side, 'mib'):.0f}"
        yield [f"{case} {side}".rstrip(), times, *counts, memory]
    if len(rounds[0]) > 1:
        ratios = [
            {"": {name: one["here"][name] / (one["there"][name] or math.nan) for name in MEASURES}}
            for one in rounds
        ]
        first, *others = (harness.median(ratios, "", name) for name in MEASURES)
        yield [f"{case} ratio", f"{first:.3f}", *(f"{other:.2f}" for other in others)]


def compare(options: argparse.Namespace, folder: Path) -> Result:
    """Rounds by family and topology."""
    sides = {"": ROOT} if options.against is None else {"here": ROOT, "there": options.against}
    found: dict[str, list[Any]] = {}
    for family in options.families:
        harness.make_data(family, folder / family)
        for topology in options.topologies:
            if family == "pi07" and topology in NOT_OF_PI07:
                continue

            def run_side(side: str, case: tuple[str, str] = (family, topology)) -> dict:
                return trained(*case, sides[side], folder, options.steps)

            rounds = harness.in_rounds(list(sides), options.rounds, run_side)
            found[f"{family} {topology}"] = rounds
    columns = ["", "ms per step", "collectives", "messages", "MB sent", "peak MiB"]
    lines = [row for case, rounds in found.items() for row in rows(case, rounds)]
    return Result([Table("topologies", columns, lines)], found)


def folder_of_checkout(text: str) -> Path:
    """The folder of a checkout, as the type of an option."""
    folder = Path(text).resolve()
    if not (folder / "paddle_vl" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{folder} is no checkout: it has no paddle_vl/")
    return folder


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument(
        "--against", type=folder_of_checkout, metavar="FOLDER", help="another checkout"
    )
    made.add_argument("--families", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    made.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES), metavar="NAME",
        help=f"of {', '.join(TOPOLOGIES)} (default all)",
    )  # fmt: skip
    harness.add_count(made, "steps", 10, "timed steps of a run")
    harness.add_count(made, "rounds", 3, "runs of each checkout")
    sys.exit(harness.run(made, compare))
