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
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import (
    DATA,
    ROOT,
    STEPS_ONLY,
    Table,
    in_rounds,
    launch,
    leave,
    make_data,
    overrides,
    parser,
    show,
)

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
SAMPLES, MICRO_BATCHES, WARM_UP = 8, 2, 3


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Numbers of this rank."""
    import paddle_vl
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.train.build import build_trainer

    if Path(paddle_vl.__file__).resolve().parents[1] != Path(options.package).resolve():
        raise SystemExit(f"paddle_vl comes from {paddle_vl.__file__}, not {options.package}")
    configure_cpu_runtime(1)
    before = _resident("VmRSS")
    trainer = build_trainer(load_run_config(options.config, options.settings))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    for _ in range(WARM_UP):
        trainer.turn()
    with record_collectives() as recording:
        trainer.turn()
    times = []
    for _ in range(options.steps):
        trainer.ranks.wait()
        begin = time.perf_counter()
        trainer.turn()
        trainer.ranks.wait()
        times.append(time.perf_counter() - begin)
    trainer.feed.close()
    trainer.reporter.close()
    return {
        # Other work on the machine only makes steps slower.
        "milliseconds": 1e3 * min(times),
        "collectives": sum(not call.is_message for call in recording.calls),
        "messages": sum(call.is_message for call in recording.calls),
        "bytes": sum(call.num_bytes for call in recording.calls),
        "mib": (_resident("VmHWM") - before) / 2**20,
    }


def _resident(name: str) -> int:
    """Resident bytes of this process: now (VmRSS) or peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def run(family: str, topology: str, package: Path, folder: Path, steps: int) -> dict[str, float]:
    """Train with the package of a checkout; the maximum of each number over ranks."""
    degrees = TOPOLOGIES[topology]
    num_ranks = math.prod(value for name, value in degrees.items() if name.endswith("_degree"))
    data_size = degrees.get("dp_degree", 1) * degrees.get("sharding_degree", 1)
    work, data = folder / "work", folder / family
    settings = STEPS_ONLY | {
        "train.output_dir": work / "out",
        "data.train": f"[{data / DATA[family][1]}]",
        "data.eval": "[]",
        "data.processor": data / "processor",
        "train.per_device_train_batch_size": SAMPLES // data_size,
        "train.gradient_accumulation_steps": MICRO_BATCHES,
        "logging.logging_steps": 10**6,
    }
    settings |= {f"parallel.{name}": str(degree).lower() for name, degree in degrees.items()}
    if degrees.get("sequence_parallel"):
        settings["data.pad_to_multiple_of"] = degrees["mp_degree"]
    arguments = ["--worker", str(work), "--package", str(package), "--steps", str(steps)]
    arguments += ["--config", str(package / CONFIGS[family]), "--settings", *overrides(settings)]
    found = launch(__file__, num_ranks, arguments, work, package)
    shutil.rmtree(work)
    return {name: max(each[name] for each in found) for name in found[0]}


def compare(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[dict]]]:
    """Rounds by family and topology."""
    sides = {"": ROOT} if options.against is None else {"here": ROOT, "there": options.against}
    for family in options.families:
        make_data(family, folder / family)
        for topology in options.topologies:
            if family == "pi07" and topology in NOT_OF_PI07:
                continue

            def run_side(side: str, case: tuple[str, str] = (family, topology)) -> dict:
                return run(*case, sides[side], folder, options.steps)

            yield f"{family} {topology}", in_rounds(list(sides), options.rounds, run_side)


def rows(case: str, rounds: list[dict[str, dict]]) -> Iterator[list[str]]:
    """A row per checkout, and one of ratios."""
    for side, first in sorted(rounds[0].items()):
        milliseconds, mib = (
            statistics.median(found[side][name] for found in rounds)
            for name in ("milliseconds", "mib")
        )
        counts = [str(first["collectives"]), str(first["messages"]), f"{first['bytes'] / 1e6:.2f}"]
        yield [f"{case} {side}".rstrip(), f"{milliseconds:.1f}", *counts, f"{mib:.0f}"]
    if len(rounds[0]) > 1:
        names = ("milliseconds", "collectives", "messages", "bytes", "mib")
        ratios = [
            statistics.median(
                found["here"][name] / found["there"][name] if found["there"][name] else math.nan
                for found in rounds
            )
            for name in names
        ]
        yield [f"{case} ratio", f"{ratios[0]:.3f}", *(f"{ratio:.2f}" for ratio in ratios[1:])]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    made.add_argument("--families", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    made.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES), metavar="NAME",
        help=f"of {', '.join(TOPOLOGIES)} (default all)",
    )  # fmt: skip
    made.add_argument("--steps", type=int, default=10, help="timed steps of a run (default 10)")
    made.add_argument("--rounds", type=int, default=3, help="runs of each checkout (default 3)")
    for name in ("--worker", "--package", "--config"):
        made.add_argument(name, help=argparse.SUPPRESS)
    made.add_argument("--settings", nargs="*", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        leave(measure(options), Path(options.worker))
    if options.against is not None:
        options.against = options.against.resolve()
        if not (options.against / "paddle_vl" / "__init__.py").is_file():
            made.error(f"--against: {options.against} is no checkout: it has no paddle_vl/")
    if options.steps < 1 or options.rounds < 1:
        made.error("--steps and --rounds are numbers from 1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = dict(compare(options, Path(folder)))
        except RuntimeError as error:
            print(f"topologies: a run failed:\n{error}", file=sys.stderr)
            return 1
    columns = ["", "ms per step", "collectives", "messages", "MB sent", "peak MiB"]
    lines = [row for case, rounds in found.items() for row in rows(case, rounds)]
    show(options, [Table("topologies", columns, lines)], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
