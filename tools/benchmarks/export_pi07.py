"""One chunk of actions of a mid-size pi07: the policy itself, its exported programs, and ONNX.

    python tools/benchmarks/export_pi07.py
    python tools/benchmarks/export_pi07.py --parts

The policy of `configs/bench/pi07_step.yaml` in float32 acts on one observation of two cameras, with
every optional field and with none: 5 Euler steps to 50 actions. Timed is `sample_actions`, from
the raw observation to raw actions. Every round runs every side in a new process, in changing order;
ratios are medians over rounds, with quartiles. All sides must give the same actions.

`--parts` prints the milliseconds in each program.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from harness import ROOT, Table, in_rounds, launch, leave, make_data, parser, quartiles, show

CONFIG = ROOT / "configs/bench/pi07_step.yaml"
DATA_OPTIONS = (
    "--state-dim", "32", "--action-dim", "32", "--chunk-size", "50", "--action-vocab-size", "1024",
)  # fmt: skip
DYNAMIC, STATIC, ONNX = "dynamic", "static", "ONNX"
RUNTIMES: dict[str, Any] = {STATIC: "paddle", ONNX: "onnxruntime"}
CASES = ("all optional fields", "no optional field")
TOLERANCE = 1e-4


def build(work: Path) -> Any:
    """The policy with weights of a fixed seed."""
    import paddle

    from paddle_vl.families.pi07.config import PI07Config
    from paddle_vl.families.pi07.policy import PI07LowLevelPolicy

    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model"]["config"]
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")
    config = PI07Config.from_dict(values | {"normalization_mapping": modes})
    processor = work / "data" / "processor"
    paddle.seed(0)
    policy = PI07LowLevelPolicy(config, processor, processor / "action_tokenizer")
    for name, parameter in policy.model.named_parameters():
        # Fresh weights project images to zero.
        if name.endswith("mm_input_projection_weight"):
            parameter.set_value(0.02 * paddle.randn(parameter.shape))
    policy.eval()
    return policy


def observation(case: str) -> dict[str, Any]:
    """A raw observation."""
    rng = np.random.default_rng(0)

    def image() -> np.ndarray:
        return rng.random((1, 3, 224, 224), dtype=np.float32)

    found: dict[str, Any] = {
        "state": rng.normal(size=(1, 32)).astype(np.float32),
        "prompt": ["move to the mark " * 3],
        "camera0": image()[:, None],
        "camera1": image()[:, None],
    }
    if case == CASES[0]:
        found |= {"response": ["the mark is red, go to it " * 2], "speed": [3], "quality": [4]}
        found |= {f"subgoal{i}": image() for i in range(2)}
        found |= {f"{name}_is_pad": [False] for name in ("speed", "quality", "subgoal")}
    return found


def write_export(work: Path, with_onnx: bool) -> None:
    """The folder of the programs."""
    from paddle_vl.export.writing import export_model
    from paddle_vl.families.pi07.exporting import policy_to_export

    export_model(policy_to_export(build(work)), Path("bench"), work / "export", onnx=with_onnx)


def measure(side: str, work: Path, repeats: int) -> dict[str, Any]:
    """Seconds of one side, in this process."""
    if side == DYNAMIC:
        policy = build(work)
    else:
        from paddle_vl.export import load

        policy = load(work / "export", RUNTIMES[side])
    noise = np.random.default_rng(1).normal(size=(1, 50, 32)).astype(np.float32)
    seconds, parts, actions = {}, {}, {}
    clock = PartClock(policy) if side != DYNAMIC else None
    for case in CASES:
        given, times = observation(case), []
        for _ in range(repeats + 1):
            if clock is not None:
                clock.seconds = {}
            begin = time.perf_counter()
            chunk = policy.sample_actions(given, noise)
            times.append(time.perf_counter() - begin)
        # The first run warms up.
        seconds[case], actions[case] = statistics.median(times[1:]), chunk.tolist()
        parts[case] = {} if clock is None else clock.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "parts": parts, "actions": actions, "peak_rss_mib": peak}


class PartClock:
    """Seconds in each program of an exported policy during one chunk."""

    def __init__(self, policy: Any):
        self.seconds: dict[str, float] = {}
        for name, program in list(vars(policy).items()):
            if hasattr(program, "input_names"):
                setattr(policy, name, _Timed(program, name.strip("_"), self))


class _Timed:
    def __init__(self, program: Any, name: str, clock: PartClock):
        self._program, self._name, self._clock = program, name, clock
        self.input_names = program.input_names

    def __call__(self, inputs: Any) -> Any:
        begin = time.perf_counter()
        outputs = self._program(inputs)
        before = self._clock.seconds.get(self._name, 0.0)
        self._clock.seconds[self._name] = before + time.perf_counter() - begin
        return outputs


def run_here(options: argparse.Namespace, side: str, work: Path) -> dict[str, Any]:
    """The result of a new process."""
    arguments = [
        "--worker", str(work), "--side", side, "--repeats", str(options.repeats),
        "--threads", str(options.threads), *(["--no-onnx"] if options.no_onnx else []),
    ]  # fmt: skip
    return launch(__file__, 1, arguments, work)[0]


def compare(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Results of all rounds, by side.

    Raises:
        RuntimeError: a side failed, or gave other actions than the policy.
    """
    make_data("pi07", work / "data", *DATA_OPTIONS)
    run_here(options, "write", work)
    sides = [DYNAMIC, STATIC, *([] if options.no_onnx else [ONNX])]
    rounds = in_rounds(sides, options.rounds, lambda side: run_here(options, side, work))
    for side in sides:
        for case in CASES:
            found, wanted = (np.array(rounds[0][one]["actions"][case]) for one in (side, DYNAMIC))
            if (error := np.abs(found - wanted).max()) > TOLERANCE:
                raise RuntimeError(f"{side}, {case}: actions differ by {error:.2g}")
    return rounds


def tables(rounds: list[dict[str, Any]], threads: int) -> list[Table]:
    """A row per case and side; ratios are of the policy's time to this side's."""
    rows = []
    for case in CASES:
        for side in rounds[0]:
            own = [one[side]["seconds"][case] for one in rounds]
            ratios = [one[DYNAMIC]["seconds"][case] / own[i] for i, one in enumerate(rounds)]
            low, middle, high = quartiles(ratios)
            shown = "" if side == DYNAMIC else f"{middle:.2f} ({low:.2f} to {high:.2f})"
            memory = statistics.median(one[side]["peak_rss_mib"] for one in rounds)
            rows.append(
                [f"{side}, {case}", f"{1e3 * statistics.median(own):.1f}", shown, f"{memory:.0f}"]
            )
    note = (
        f"One observation of two cameras, 5 Euler steps, 50 actions, float32, {threads} thread(s),"
        f" medians of {len(rounds)} round(s) with quartiles. Ratios above 1: this side is faster. "
        "Peak memory is that of the process, which runs both cases."
    )
    columns = ["", "ms per chunk", "dynamic / this", "peak MiB"]
    return [Table("export pi07", columns, rows, note)]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=15, help="timed chunks (default 15)")
    made.add_argument("--rounds", type=int, default=5, help="processes of each side (default 5)")
    made.add_argument("--threads", type=int, default=2, help="threads of a process (default 2)")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    made.add_argument("--parts", action="store_true", help="print milliseconds in each program")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--side", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        from paddle_vl.compat import configure_cpu_runtime

        configure_cpu_runtime(options.threads)
        work = Path(options.worker)
        if options.side == "write":
            write_export(work, not options.no_onnx)
            leave({}, work)
        leave(measure(options.side, work, options.repeats), work)
    with tempfile.TemporaryDirectory() as folder:
        try:
            rounds = compare(options, Path(folder))
        except RuntimeError as error:
            print(f"export_pi07: a run failed:\n{error}", file=sys.stderr)
            return 1
    show(options, tables(rounds, options.threads), rounds)
    if options.parts:
        for side in [one for one in rounds[-1] if one != DYNAMIC]:
            for case, seconds in rounds[-1][side]["parts"].items():
                shown = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in seconds.items())
                print(f"{side}, {case}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
