"""Actions of a mid-size policy: the policy itself, its exported programs, and ONNX.

    python tools/benchmarks/export.py

The pi07 of `configs/bench/pi07_step.yaml` acts in float32 on one observation of two cameras, with
every optional field and with none: 5 Euler steps to 50 actions, timed from the raw observation to
raw actions. Answers of vision-language models and their programs are in `answers.py`.

Every round runs every side in a new process, in changing order; ratios are medians over rounds,
with quartiles. Policy, programs and ONNX must give the same actions.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import harness
from harness import ROOT, Result, Round, Table

CONFIG = ROOT / "configs/bench/pi07_step.yaml"
DYNAMIC, STATIC, ONNX = "dynamic", "static", "ONNX"
RUNTIMES: dict[str, Any] = {STATIC: "paddle", ONNX: "onnxruntime"}
OBSERVATIONS = ("all optional fields", "no optional field")
ACTION_TOLERANCE = 1e-4


def pi07(work: Path) -> Any:
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
    if case == OBSERVATIONS[0]:
        found |= {"response": ["the mark is red, go to it " * 2], "speed": [3], "quality": [4]}
        found |= {f"subgoal{i}": image() for i in range(2)}
        found |= {f"{name}_is_pad": [False] for name in ("speed", "quality", "subgoal")}
    return found


def write_export(work: str, num_threads: int, with_onnx: bool) -> dict[str, Any]:
    """Write the folder of the programs."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export.pi07.programs import policy_to_export
    from paddle_vl.export.writing import export_model

    configure_cpu_runtime(num_threads)
    to_export = policy_to_export(pi07(Path(work)))
    export_model(to_export, Path("bench"), Path(work) / "export", onnx=with_onnx)
    return {}


def measure(side: str, work: str, num_threads: int, repeats: int) -> Any:
    """Seconds and actions of one side, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export import load
    from paddle_vl.nn.cpu import compiled

    configure_cpu_runtime(num_threads)
    if side == DYNAMIC:
        # As commands run it.
        compiled.enable()
        policy = pi07(Path(work))
    else:
        policy = load(Path(work) / "export", RUNTIMES[side])
    noise = np.random.default_rng(1).normal(size=(1, 50, 32)).astype(np.float32)
    seconds, outputs = {}, {}
    for case in OBSERVATIONS:
        given, times = observation(case), []
        # The first run warms up.
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            outputs[case] = np.asarray(policy.sample_actions(given, noise)).tolist()
            times.append(time.perf_counter() - begin)
        seconds[case] = statistics.median(times[1:])
    return {"seconds": seconds, "outputs": outputs, "peak_rss_mib": harness.peak_mib()}


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side.

    Raises:
        RuntimeError: a side failed, or gave other actions than the policy.
    """
    given = {"work": work, "threads": options.threads, "num_threads": options.threads}
    harness.make_data("pi07", work / "data")
    harness.launch(write_export, work / "run", with_onnx=not options.no_onnx, **given)

    def actions(side: str) -> dict[str, Any]:
        more = {"side": side, "repeats": options.repeats}
        return harness.launch(measure, work / "run", **more, **given)[0]

    sides = [DYNAMIC, STATIC, *([] if options.no_onnx else [ONNX])]
    rounds = harness.in_rounds(sides, options.rounds, actions)
    check_actions({side: rounds[0][side]["outputs"] for side in sides})
    return Result([table(rounds, options)], {"rounds": rounds})


def check_actions(outputs: dict[str, Any]) -> None:
    """Compare the actions of all sides with the policy's.

    Raises:
        RuntimeError: a side gave others.
    """
    for side, found in outputs.items():
        for case, wanted in outputs[DYNAMIC].items():
            error = np.abs(np.array(found[case]) - np.array(wanted)).max()
            if error > ACTION_TOLERANCE:
                raise RuntimeError(f"{side}, {case}: actions differ from the policy's by {error}")


def table(rounds: list[Round], options: argparse.Namespace) -> Table:
    """A row per observation and side; ratios are of the policy's time to this side's."""
    rows = []
    for case in OBSERVATIONS:
        for side in rounds[0]:
            place = ("seconds", case)
            rows.append(
                [
                    f"{side}, {case}",
                    f"{1e3 * harness.median(rounds, side, *place):.1f}",
                    "" if side == DYNAMIC else harness.ratio(rounds, DYNAMIC, side, *place),
                    f"{harness.median(rounds, side, 'peak_rss_mib'):.0f}",
                ]
            )
    note = (
        "One observation of two cameras, 5 Euler steps, 50 actions, float32, "
        f"{options.threads} thread(s), medians of {len(rounds)} round(s) with quartiles. Ratios "
        "above 1: this side is faster. Peak memory is that of the process, which runs both cases."
    )
    return Table("export pi07", ["", "ms per chunk", "dynamic / this", "peak MiB"], rows, note)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    harness.add_count(made, "repeats", 3, "timed calls")
    harness.add_count(made, "rounds", 3, "processes of each side")
    harness.add_count(made, "threads", 2, "threads of a process")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    sys.exit(harness.run(made, compare))
