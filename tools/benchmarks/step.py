"""Time of one training step of a mid-size model: the trainer's own step, on its own loader.

    python tools/benchmarks/step.py --family qwen3_vl
    python tools/benchmarks/step.py --family qwen3_vl --against PYTHON   # HF transformers on torch
    python tools/benchmarks/step.py --family pi07 --against PYTHON       # OpenTau on torch
    python tools/benchmarks/step.py --family pi07 train.recompute=full   # against the default
    python tools/benchmarks/step.py --family pi07 --no-compiler          # also without C kernels

Trains `configs/bench/FAMILY_step.yaml` in float32 with two threads on made-up samples, and reports
medians over steps: milliseconds of the step and its phases, tokens or samples per second, and peak
memory of the process. Every round runs in a new process.

With settings, `section.name=value`, each round also runs the configuration with them. With
`--no-compiler` each round also runs as on a machine without a C compiler. With
`--against PYTHON` each round also runs the same step in the family's reference, with an interpreter
PYTHON that has torch and transformers, or torch and opentau: `step_hf.py`, `step_opentau.py`. The
references step on one batch that they keep, so they never wait for data. Ratios are medians over
rounds.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import (
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
    spread,
)

THREADS, WARM_UP = 2, 3
CONFIGS = {name: ROOT / f"configs/bench/{name}_step.yaml" for name in ("qwen3_vl", "pi07")}
# Options of the made-up data: `paddle_vl.profile.workload.Workload`, tools/make_demonstrations.py.
# The answer fills the 511 tokens of a sample.
WORKLOADS = {"qwen3_vl": {"image_side": 512, "answer_tokens": 238}, "pi07": {}}
DATA_OPTIONS = {
    "qwen3_vl": (),
    "pi07": ("--state-dim", "32", "--action-dim", "32", "--chunk-size", "50",
             "--action-vocab-size", "1024"),
}  # fmt: skip
PHASES = {"data wait": "dataload_wait", "forward": "forward", "backward": "bwd",
          "optimizer": "optim_step"}  # fmt: skip
OURS, NO_COMPILER = "paddle-vl", "paddle-vl, no compiler"
# Name and script of a family's reference.
REFERENCES = {
    "qwen3_vl": ("HF transformers", "step_hf.py"),
    "pi07": ("OpenTau", "step_opentau.py"),
}


def build(family: str, settings: list[str], work: Path) -> Any:
    """The trainer of the family's configuration on made-up samples.

    Args:
        settings: overrides, `section.name=value`.
        work: folder with the family's data in `data/`.
    """
    import paddle

    from paddle_vl.config.load import load_run_config
    from paddle_vl.profile.workload import Workload, with_workload
    from paddle_vl.train.build import build_trainer

    own = STEPS_ONLY | {
        "train.output_dir": work / "out",
        "data.processor": work / "data" / "processor",
        "data.train": "[]" if family == "pi07" else f"[{work / 'data' / 'train.jsonl'}]",
    }
    config = load_run_config(CONFIGS[family], [*overrides(own), *settings])
    workload = Workload(is_synthetic=True, **WORKLOADS[family])
    trainer = build_trainer(with_workload(config, workload, work), writes=False)
    if family == "pi07":
        # Fresh weights project images to zero, and the gradient of a norm of zero overflows.
        (weight,) = (
            parameter
            for name, parameter in trainer.runner.model.named_parameters()
            if name.endswith("mm_input_projection_weight")
        )
        paddle.assign(0.02 * paddle.randn(weight.shape), weight)
    return trainer


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the trainer's steps, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled
    from paddle_vl.train.phases import PhaseClock

    is_compiled = configure_cpu_runtime(THREADS) and not options.no_compiler and compiled.enable()
    trainer = build(options.family, options.settings, Path(options.worker))
    clock, losses = PhaseClock(), []
    for _ in range(WARM_UP + options.steps):
        with clock.step():
            outcome = trainer.train_one_step()
        losses.append(sum(outcome.terms.tolist()))
        if not outcome.is_good:
            raise RuntimeError(f"step {trainer.step} was skipped: loss {losses[-1]}")
    trainer.feed.close()
    steps = [{name.value: s for name, s in step.items()} for step in clock.steps[WARM_UP:]]
    seconds = {
        name: statistics.median(step.get(key, 0.0) for step in steps)
        for name, key in PHASES.items()
    }
    seconds["step"] = statistics.median(sum(step.values()) for step in steps)
    num_parameters = sum(parameter.size for parameter in trainer.runner.model.parameters())
    return {
        "seconds": seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "num_parameters": num_parameters,
        "samples": outcome.totals.num_samples,
        "tokens": outcome.totals.num_tokens,
        "gflops": matmul_gflops(),
        "is_compiled": is_compiled,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def matmul_gflops() -> float:
    """Speed of a [2048, 768] x [768, 768] product: tells a slow machine from slow code."""
    import paddle

    a, b = paddle.randn([2048, 768]), paddle.randn([768, 768])
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        paddle.matmul(a, b)
        times.append(time.perf_counter() - begin)
    return 2 * 2048 * 768 * 768 / statistics.median(times) / 1e9


def run_here(
    options: argparse.Namespace, settings: list[str], work: Path, compiles: bool = True
) -> dict[str, Any]:
    """The result of a new process."""
    arguments = ["--family", options.family, "--steps", str(options.steps)]
    arguments += [] if compiles else ["--no-compiler"]
    return launch(__file__, 1, [*arguments, "--worker", str(work), *settings], work)[0]


def run_reference(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The result of the family's reference in a new process of another interpreter."""
    script = Path(__file__).with_name(REFERENCES[options.family][1])
    inputs = [str(CONFIGS[options.family].resolve())]
    if options.family == "pi07":
        inputs.append(str(work / "data" / "processor"))
    done = subprocess.run(
        [options.against, str(script), *inputs, str(options.steps), str(THREADS)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{options.against} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Results of all rounds, by side."""
    make_data(options.family, work / "data", *DATA_OPTIONS[options.family])
    runs = {OURS: lambda: run_here(options, [], work)}
    if options.no_compiler:
        runs[NO_COMPILER] = lambda: run_here(options, [], work, compiles=False)
    if options.settings:
        runs[" ".join(options.settings)] = lambda: run_here(options, options.settings, work)
    if options.against:
        runs[REFERENCES[options.family][0]] = lambda: run_reference(options, work)
    rounds = in_rounds(list(runs), options.rounds, lambda side: runs[side]())
    return {"family": options.family, "rounds": rounds}


def tables(found: dict[str, Any]) -> list[Table]:
    """One table with a row per side; ratios are of paddle-vl to the others."""
    rounds, family = found["rounds"], found["family"]
    reference = REFERENCES[family][0]
    first = rounds[0][OURS]
    unit = "tokens" if first["tokens"] else "samples"

    def median(side: str, name: str) -> float:
        return statistics.median(one[side]["seconds"].get(name, 0.0) for one in rounds)

    def row(side: str) -> list[str]:
        step, memory = median(side, "step"), [one[side]["peak_rss_mib"] for one in rounds]
        measured = rounds[0][side]["seconds"]
        phases = [f"{1e3 * median(side, name):.0f}" if name in measured else "" for name in PHASES]
        speed = f"{first[unit] / step:.3g}"
        return [side, f"{1e3 * step:.0f}", *phases, speed, f"{statistics.median(memory):.0f}"]

    rows = [row(side) for side in sorted(rounds[0], key=lambda side: side != OURS)]
    gflops = statistics.median(one[OURS]["gflops"] for one in rounds)
    note = (
        f"{first['num_parameters'] / 1e6:.1f} million parameters, float32, {THREADS} threads, "
        f"medians of {len(rounds)} run(s). A plain matrix product reached {gflops:.0f} GFLOP/s."
    )
    changed = [side for side in rounds[0] if side not in (OURS, NO_COMPILER, reference)]
    note += f" {OURS} {'has' if first['is_compiled'] else 'does not have'} C kernels here."
    base = reference if reference in rounds[0] else OURS
    for side in [side for side in rounds[0] if side != base]:
        step = [one[side]["seconds"]["step"] / one[base]["seconds"]["step"] for one in rounds]
        memory = [one[side]["peak_rss_mib"] / one[base]["peak_rss_mib"] for one in rounds]
        note += (
            f" {side} takes {spread(step, 2)} times the step and {spread(memory, 2)} times the "
            f"memory of {base}."
        )
    columns = ["", "ms per step", *PHASES, f"{unit} per second", "peak MiB"]
    return [Table(" ".join(["step", family, *changed]), columns, rows, note)]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--family", choices=CONFIGS, required=True)
    made.add_argument("--steps", type=int, default=10, help="timed steps of a run (default 10)")
    made.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    made.add_argument(
        "--against", metavar="PYTHON", help="interpreter with torch and the family's reference"
    )
    made.add_argument(
        "--no-compiler", action="store_true", help="also run without compiled kernels"
    )
    made.add_argument(
        "settings", nargs="*", metavar="section.name=value", help="compare with changed settings"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        leave(measure(options), Path(options.worker))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = compare(options, Path(folder))
        except RuntimeError as error:
            print(f"step: a run failed:\n{error}", file=sys.stderr)
            return 1
    reference = found["rounds"][0].get(REFERENCES[options.family][0], {})
    versions = reference.get("versions", {})
    show(options, tables(found), found, **versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
