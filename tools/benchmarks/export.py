"""Answers of mid-size models: the model itself, its exported programs, and ONNX.

    python tools/benchmarks/export.py
    python tools/benchmarks/export.py --family pi07

The models of `configs/bench/FAMILY_step.yaml` run in float32. Qwen3-VL answers prompts of 511
tokens with an image of 256 visual tokens each, greedily, one prompt and eight at once: reported are
the time to the first token, tokens per second after it (over the batch), and peak memory of the
process that generates. pi07 acts on one observation of two cameras, with every optional field and
with none: 5 Euler steps to 50 actions, timed from the raw observation to raw actions.

Every round runs every side in a new process, in changing order; ratios are medians over rounds,
with quartiles. Model, programs and ONNX must give the same tokens or actions.
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
import references
from harness import ROOT, Result, Round, Table

CONFIGS = {name: ROOT / f"configs/bench/{name}_step.yaml" for name in ("qwen3_vl", "pi07")}
DYNAMIC, STATIC, ONNX = "dynamic", "static", "ONNX"
RUNTIMES: dict[str, Any] = {STATIC: "paddle", ONNX: "onnxruntime"}
BATCHES = (1, 8)
OBSERVATIONS = ("all optional fields", "no optional field")
ACTION_TOLERANCE = 1e-4


def qwen3_vl(work: Path) -> tuple[Any, Any, Any]:
    """The configuration, the model's settings and its processor."""
    from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
    from paddle_vl.families.vlm.folders.processor_fit import model_config
    from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor

    settings = yaml.safe_load(CONFIGS["qwen3_vl"].read_text(encoding="utf-8"))
    processor = Qwen3VLProcessor.from_pretrained(work / "data" / "processor")
    config = model_config(Qwen3VLConfig, settings["model"]["config"], processor)
    return config, settings, processor


def qwen3_vl_model(config: Any) -> Any:
    """A model with weights of a fixed seed."""
    import paddle

    from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration

    paddle.seed(0)
    model = Qwen3VLForConditionalGeneration.from_config(config)
    model.eval()
    return model


def pi07(work: Path) -> Any:
    """The policy with weights of a fixed seed."""
    import paddle

    from paddle_vl.families.pi07.config import PI07Config
    from paddle_vl.families.pi07.policy import PI07LowLevelPolicy

    values = yaml.safe_load(CONFIGS["pi07"].read_text(encoding="utf-8"))["model"]["config"]
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


def write_export(family: str, work: str, num_threads: int, with_onnx: bool) -> dict[str, Any]:
    """Write the folder of the programs."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export.pi07.programs import policy_to_export
    from paddle_vl.export.qwen3_vl.programs import model_to_export
    from paddle_vl.export.writing import export_model

    configure_cpu_runtime(num_threads)
    if family == "pi07":
        to_export = policy_to_export(pi07(Path(work)))
    else:
        config, _, processor = qwen3_vl(Path(work))
        to_export = model_to_export(qwen3_vl_model(config), processor.save_pretrained)
    export_model(to_export, Path("bench"), Path(work) / "export", onnx=with_onnx)
    return {}


def measure(family: str, side: str, work: str, num_threads: int, repeats: int, tokens: int) -> Any:
    """Seconds and outputs of one side, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export import load
    from paddle_vl.nn.cpu import compiled

    configure_cpu_runtime(num_threads)
    if side == DYNAMIC:
        # As commands run it.
        compiled.enable()
        model = pi07(Path(work)) if family == "pi07" else qwen3_vl_model(qwen3_vl(Path(work))[0])
    else:
        model = load(Path(work) / "export", RUNTIMES[side])
    if family == "pi07":
        noise = np.random.default_rng(1).normal(size=(1, 50, 32)).astype(np.float32)
        cases: dict[Any, Any] = {case: observation(case) for case in OBSERVATIONS}
        answer = lambda given: [model.sample_actions(given, noise)]  # noqa: E731
    else:
        config, settings, _ = qwen3_vl(Path(work))
        cases = {size: references.samples(config, settings, size) for size in BATCHES}
        answer = lambda given: model.stream(**given, max_new_tokens=tokens)  # noqa: E731
    seconds, outputs = {}, {}
    for case, given in cases.items():
        runs = []
        # The first run warms up.
        for _ in range(repeats + 1):
            times, outputs[case] = [time.perf_counter()], []
            for output in answer(given):
                times.append(time.perf_counter())
                outputs[case].append(np.asarray(output).tolist())
            runs.append((times[1] - times[0], times[-1] - times[1]))
        first, rest = (statistics.median(each) for each in zip(*runs[1:], strict=True))
        seconds[case] = {"first": first, "rest": rest}
    return {"seconds": seconds, "outputs": outputs, "peak_rss_mib": harness.peak_mib()}


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side.

    Raises:
        RuntimeError: a side failed, or gave other answers than the model.
    """
    family = options.family
    given: dict[str, Any] = {
        "family": family, "work": work, "threads": options.threads, "num_threads": options.threads,
    }  # fmt: skip
    harness.make_data(family, work / "data")
    harness.launch(write_export, work / "run", with_onnx=not options.no_onnx, **given)

    def answers(side: str) -> dict[str, Any]:
        times = {"tokens": options.tokens, "repeats": options.repeats}
        return harness.launch(measure, work / "run", side=side, **times, **given)[0]

    sides = [DYNAMIC, STATIC, *([] if options.no_onnx else [ONNX])]
    rounds = harness.in_rounds(sides, options.rounds, answers)
    check_answers(family, {side: rounds[0][side]["outputs"] for side in sides})
    made = pi07_table(rounds, options) if family == "pi07" else table(rounds, options)
    return Result([made], {"rounds": rounds})


def check_answers(family: str, outputs: dict[str, Any]) -> None:
    """Compare the answers of all sides with the model's.

    Raises:
        RuntimeError: a side gave others.
    """
    for side, found in outputs.items():
        for case, wanted in outputs[DYNAMIC].items():
            error = np.abs(np.array(found[case]) - np.array(wanted)).max()
            if error > (ACTION_TOLERANCE if family == "pi07" else 0):
                raise RuntimeError(
                    f"{side}, {case}: answers differ from the model's by {error:.2g}"
                )


def table(rounds: list[Round], options: argparse.Namespace) -> Table:
    """A row per side and batch size; ratios are of the model's time to this side's."""
    rows = []
    for size in BATCHES:
        for side in rounds[0]:
            place = ("seconds", str(size))
            speed = (options.tokens - 1) * size / harness.median(rounds, side, *place, "rest")
            cells = [f"{1e3 * harness.median(rounds, side, *place, 'first'):.0f}", f"{speed:.1f}"]
            cells += [
                "" if side == DYNAMIC else harness.ratio(rounds, DYNAMIC, side, *place, name)
                for name in ("first", "rest")
            ]
            memory = f"{harness.median(rounds, side, 'peak_rss_mib'):.0f}"
            rows.append([f"{side}, batch {size}", *cells, memory])
    columns = [
        "", "ms to first token", "tokens per second", "first: dynamic / this",
        "rest: dynamic / this", "peak MiB",
    ]  # fmt: skip
    note = (
        f"Prompts of 511 tokens, 256 of them visual; {options.tokens} tokens, float32, "
        f"{options.threads} thread(s), medians of {len(rounds)} round(s) with quartiles. Ratios "
        "above 1: this side is faster."
    )
    return Table("export", columns, rows, note)


def pi07_table(rounds: list[Round], options: argparse.Namespace) -> Table:
    """A row per observation and side; ratios are of the policy's time to this side's."""
    rows = []
    for case in OBSERVATIONS:
        for side in rounds[0]:
            place = ("seconds", case, "first")
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
    made.add_argument("--family", choices=CONFIGS, default="qwen3_vl")
    harness.add_count(made, "tokens", 32, "new tokens of an answer")
    harness.add_count(made, "repeats", 3, "timed answers")
    harness.add_count(made, "rounds", 3, "processes of each side")
    harness.add_count(made, "threads", 2, "threads of a process")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    sys.exit(harness.run(made, compare))
