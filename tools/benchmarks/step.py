"""Time of one training step of a mid-size model: the trainer's own step, on its own loader.

    python tools/benchmarks/step.py --family qwen3_vl
    python tools/benchmarks/step.py --family qwen3_vl --against PYTHON   # HF transformers on torch
    python tools/benchmarks/step.py --family paddleocr_vl --against PYTHON
    python tools/benchmarks/step.py --family pi07 --against PYTHON       # OpenTau on torch
    python tools/benchmarks/step.py --family pi07 train.recompute=full   # against the default
    python tools/benchmarks/step.py --family pi07 --no-compiler          # also without C kernels

Trains `configs/bench/FAMILY_step.yaml` in float32 on made-up samples, and reports
medians over steps: milliseconds of the step and its phases, tokens or samples per second, and peak
memory of the process. Every round runs in a new process.

With settings, `section.name=value`, each round also runs the configuration with them. With
`--no-compiler` each round also runs as on a machine without a C compiler. With
`--against PYTHON` each round also runs the same step in the family's reference (`references.py`),
with an interpreter PYTHON that has torch and transformers, or torch and opentau. The references
step on one batch that they keep, so they never wait for data. Ratios are medians over rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Result, Round, Table

WARM_UP = 3
# `paddle_vl.profile.workload.Workload`; the answer fills `data.max_length`.
_IMAGE = {"image_side": 512, "answer_tokens": 238}
WORKLOADS = {
    "qwen3_vl": _IMAGE, "qwen3_5": _IMAGE, "qwen4_exp": _IMAGE,
    "paddleocr_vl": _IMAGE | {"answer_tokens": 225}, "pi07": {},
}  # fmt: skip
CONFIGS = {name: ROOT / f"configs/bench/{name}_step.yaml" for name in WORKLOADS}
PHASES = {"data wait": "dataload_wait", "forward": "forward", "backward": "bwd",
          "optimizer": "optim_step"}  # fmt: skip
OURS, NO_COMPILER = "paddle-vl", "paddle-vl, no compiler"
# Name of a family's reference, for people and for `references.py`.
REFERENCES = {
    "qwen3_vl": ("HF transformers", "hf"),
    "qwen3_5": ("HF transformers", "hf"),
    "qwen4_exp": ("HF transformers", "hf"),
    "paddleocr_vl": ("HF transformers", "hf"),
    "pi07": ("OpenTau", "opentau"),
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

    own = harness.data_settings(family, work / "data") | {"train.output_dir": work / "out"}
    if family == "pi07":
        own["data.train"] = "[]"
    config = load_run_config(CONFIGS[family], [*harness.overrides(own), *settings])
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


def measure(
    family: str,
    work: str,
    num_threads: int,
    steps: int,
    settings: list[str],
    compiles: bool,
) -> dict[str, Any]:
    """Medians of the trainer's steps, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled
    from paddle_vl.train.phases import PhaseClock

    is_compiled = configure_cpu_runtime(num_threads) and compiles and compiled.enable()
    trainer = build(family, settings, Path(work))
    shared = {
        "num_parameters": sum(p.size for p in trainer.runner.model.parameters()),
        "is_compiled": is_compiled,
    }
    clock, losses, begin_cpu = PhaseClock(), [], 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            begin_cpu = time.process_time()
        with clock.step():
            outcome = trainer.train_one_step()
        losses.append(sum(outcome.terms.tolist()))
        if not outcome.is_good:
            raise RuntimeError(f"step {trainer.step} was skipped: loss {losses[-1]}")
    cpu = (time.process_time() - begin_cpu) / steps
    trainer.feed.close()
    timed = [{name.value: s for name, s in step.items()} for step in clock.steps[WARM_UP:]]
    seconds = {
        name: statistics.median(step.get(key, 0.0) for step in timed)
        for name, key in PHASES.items()
    }
    seconds["step"] = statistics.median(sum(step.values()) for step in timed)
    seconds["cpu"] = cpu
    return shared | {
        "seconds": seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "samples": outcome.totals.num_samples,
        "tokens": outcome.totals.num_tokens,
        "gflops": matmul_gflops(),
        "peak_rss_mib": harness.peak_mib(),
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


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side."""
    family = options.family
    name, command = REFERENCES[family]
    data = harness.make_data(family, work / "data").parent

    def ours(settings: list[str], compiles: bool = True) -> dict[str, Any]:
        given = {"family": family, "settings": settings, "compiles": compiles}
        given |= {"steps": options.steps, "num_threads": options.threads}
        return harness.launch(measure, work / "run", **given, work=work)[0]

    def theirs() -> dict[str, Any]:
        inputs = [CONFIGS[family], *([data / "processor"] if family == "pi07" else [])]
        return harness.reference(options.against, command, *inputs, options.steps, options.threads)

    runs = {OURS: lambda: ours([])}
    if options.no_compiler:
        runs[NO_COMPILER] = lambda: ours([], compiles=False)
    if options.settings:
        runs[" ".join(options.settings)] = lambda: ours(options.settings)
    if options.against:
        runs[name] = theirs
    rounds = harness.in_rounds(list(runs), options.rounds, lambda side: runs[side]())
    versions = rounds[0].get(name, {}).get("versions", {})
    made = table(family, options.threads, rounds)
    return Result([made], {"family": family, "rounds": rounds}, versions)


def table(family: str, threads: int, rounds: list[Round]) -> Table:
    """A row per side; ratios are to the reference, or to paddle-vl."""
    other, first = REFERENCES[family][0], rounds[0][OURS]
    unit = "tokens" if first["tokens"] else "samples"

    def row(side: str) -> list[str]:
        names = rounds[0][side]["seconds"]
        milliseconds = {n: 1e3 * harness.median(rounds, side, "seconds", n) for n in names}
        phases = [f"{milliseconds[name]:.0f}" if name in milliseconds else "" for name in PHASES]
        speed = f"{1e3 * first[unit] / milliseconds['step']:.3g}"
        memory = f"{harness.median(rounds, side, 'peak_rss_mib'):.0f}"
        return [side, f"{milliseconds['step']:.0f}", *phases, speed, memory]

    note = (
        f"{first['num_parameters'] / 1e6:.1f} million parameters, float32, {threads} thread(s), "
        f"medians of {len(rounds)} run(s). A plain matrix product reached "
        f"{harness.median(rounds, OURS, 'gflops'):.0f} GFLOP/s. "
        f"{OURS} {'has' if first['is_compiled'] else 'does not have'} C kernels here."
    )
    base = other if other in rounds[0] else OURS
    for side in [side for side in rounds[0] if side != base]:
        times = harness.ratio(rounds, side, base, "seconds", "step")
        memory = harness.ratio(rounds, side, base, "peak_rss_mib")
        note += f" {side} takes {times} times the step"
        if "cpu" in rounds[0][base]["seconds"]:
            cpu = harness.ratio(rounds, side, base, "seconds", "cpu")
            note += f", {cpu} times the processor time"
        note += f" and {memory} times the memory of {base}."
    rows = [row(side) for side in sorted(rounds[0], key=lambda side: side != OURS)]
    changed = [side for side in rounds[0] if side not in (OURS, NO_COMPILER, other)]
    columns = ["", "ms per step", *PHASES, f"{unit} per second", "peak MiB"]
    return Table(" ".join(["step", family, *changed]), columns, rows, note)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument("--family", choices=CONFIGS, required=True)
    harness.add_count(made, "steps", 10, "timed steps of a run")
    harness.add_count(made, "rounds", 3, "runs of each side")
    harness.add_count(made, "threads", 2, "threads of a process")
    made.add_argument(
        "--against", metavar="PYTHON", help="interpreter with torch and the family's reference"
    )
    made.add_argument(
        "--no-compiler", action="store_true", help="also run without compiled kernels"
    )
    made.add_argument(
        "settings", nargs="*", metavar="section.name=value", help="compare with changed settings"
    )
    sys.exit(harness.run(made, compare))
