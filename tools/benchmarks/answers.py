"""Times of answers: the model, its exported programs and the engine, beside HF's `generate`.

    python tools/benchmarks/answers.py --family qwen3_vl --against PYTHON
    python tools/benchmarks/answers.py --family qwen3_5 --threads 1 --tokens 8

The model of `configs/bench/FAMILY_step.yaml` answers prompts of 511 tokens with an image each,
greedily, in float32: one prompt, and eight at once. Reported is the processor time of the process,
the same clock for every side: to the first token (in the engine, until every prompt has its first),
and for a further token of all prompts. Every round runs every side in a process of its own; ratios
are medians over rounds. `--against PYTHON` is an interpreter with torch and transformers.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

import harness
import references
from harness import Result, Round, Table

MODEL, NO_COMPILER, ENGINE = "model", "model, no compiler", "engine"
PROGRAMS, ONNX = "programs", "programs in ONNX"
RUNTIMES: dict[str, Any] = {PROGRAMS: "paddle", ONNX: "onnxruntime"}
HF = "HF transformers"
FAMILIES = {"qwen3_vl": (MODEL, NO_COMPILER, ENGINE, *RUNTIMES),
            "qwen3_5": (MODEL, NO_COMPILER, ENGINE),
            "qwen4_exp": (MODEL, NO_COMPILER, ENGINE)}  # fmt: skip


def settings_of(family: str) -> dict[str, Any]:
    return yaml.safe_load((harness.ROOT / f"configs/bench/{family}_step.yaml").read_text("utf-8"))


def build(family: str, values: dict[str, Any] | None = None) -> Any:
    """The model of the configuration with fresh weights of a fixed seed.

    Args:
        values: of the configuration; None for the file's, with ids that are written out.
    """
    import paddle

    if family == "qwen3_vl":
        from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration as Model
    elif family == "qwen3_5":
        from paddle_vl.families.qwen3_5.model import Qwen3_5ForConditionalGeneration as Model
    else:
        from paddle_vl.families.qwen4_exp.model import Qwen4ExpForConditionalGeneration as Model
    paddle.seed(0)
    given: dict[str, Any] = values or settings_of(family)["model"]["config"] | references.IDS
    model = Model.from_config(Model.config_class.from_dict(given))
    model.eval()
    return model


def write_export(family: str, work: str, num_threads: int, with_onnx: bool) -> dict[str, Any]:
    """Write the folder of the programs, whose processor has ids of its own; returns them."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export.qwen3_vl.programs import model_to_export
    from paddle_vl.export.writing import export_model
    from paddle_vl.families.vlm.inputs.processor import VLProcessor

    configure_cpu_runtime(num_threads)
    processor = VLProcessor.from_pretrained(Path(work) / "data" / "processor")
    ids = {name: getattr(processor, name) for name in references.IDS}
    model = build(family, settings_of(family)["model"]["config"] | ids)
    to_export = model_to_export(model, processor.save_pretrained)
    export_model(to_export, Path("bench"), Path(work) / "export", onnx=with_onnx)
    return ids


def measure(
    family: str, side: str, work: str, num_threads: int, tokens: int, ids: dict[str, int]
) -> dict[str, Any]:
    """Times of one side, in this process."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.export import load
    from paddle_vl.nn.cpu import compiled

    configure_cpu_runtime(num_threads)
    is_compiled = side in (MODEL, ENGINE) and compiled.enable()
    settings, given = settings_of(family), settings_of(family)["model"]["config"]
    if side in RUNTIMES:
        model = load(Path(work) / "export", RUNTIMES[side])
        vision = SimpleNamespace(**given["vision_config"])
        config = SimpleNamespace(vision_config=vision, **ids)
    else:
        model = build(family)
        config = model.config
    samples = {size: references.samples(config, settings, size) for size in references.PROMPTS}
    if side == ENGINE:
        return {"seconds": engine_seconds(model, samples, tokens)} | _shared(is_compiled)

    def answer(size: int) -> Iterable[Any]:
        return model.stream(**samples[size], max_new_tokens=tokens)

    return {"seconds": seconds_of(answer)} | _shared(is_compiled)


def _shared(is_compiled: bool) -> dict[str, Any]:
    return {"is_compiled": is_compiled, "peak_rss_mib": harness.peak_mib()}


def seconds_of(answer: Callable[[int], Iterable[Any]]) -> dict[str, float]:
    """As of `references.py`, of answers that come token by token."""
    found: dict[str, float] = {}
    for size in references.PROMPTS:
        runs = []
        for _ in range(references.RUNS):
            runs.append([time.process_time()])
            for _ in answer(size):
                runs[-1].append(time.process_time())
        found |= references.least_of(runs, size)
    return found


def engine_seconds(model: Any, samples: dict[int, Any], tokens: int) -> dict[str, float]:
    """The same of requests that come together; a further token is one of all prompts, from the time
    when all have begun until the first has ended."""
    from paddle_vl.generation.sampling import Sampling
    from paddle_vl.serving.engine import Engine, EngineSettings, Request

    most = max(samples)
    # An image that is kept would not be encoded again.
    settings = EngineSettings(most, kv_cache_tokens=most * 1024, image_cache_bytes=0)
    engine = Engine(model, settings)
    engine.start()
    found: dict[str, float] = {}
    for size, given in samples.items():
        patches, runs = len(given["pixel_values"]) // size, []
        requests = [
            Request(
                given["input_ids"][row],
                Sampling(tokens + size, temperature=0.0),
                {
                    "pixel_values": given["pixel_values"][row * patches : (row + 1) * patches],
                    "image_grid_thw": given["image_grid_thw"][row : row + 1],
                },
            )
            for row in range(size)
        ]
        for _ in range(references.RUNS):
            begin, times = time.process_time(), [[] for _ in requests]

            def read(handle: Iterable[Any], own: list[float]) -> None:
                own += [time.process_time() for _ in handle]

            readers = [
                threading.Thread(target=read, args=(engine.submit(request), own))
                for request, own in zip(requests, times, strict=True)
            ]
            for each in readers:
                each.start()
            for each in readers:
                each.join()
            begun, ended = max(own[0] for own in times), min(own[-1] for own in times)
            last = max(times, key=lambda own: own[0])
            runs.append([begin, *(t for t in last if begun <= t <= ended)])
        found |= references.least_of(runs, size)
    engine.close()
    return found


def compare(options: argparse.Namespace, work: Path) -> Result:
    """Results of all rounds, by side."""
    family, ids = options.family, {}
    sides = [side for side in FAMILIES[family] if side != ONNX or not options.no_onnx]
    if PROGRAMS in sides:
        harness.make_data(family, work / "data")
        given = {"work": work, "num_threads": options.threads, "with_onnx": ONNX in sides}
        (ids,) = harness.launch(write_export, work / "run", family=family, **given)

    def times(side: str) -> dict[str, Any]:
        if side == HF:
            config = harness.ROOT / f"configs/bench/{family}_step.yaml"
            inputs = (config, 1, options.threads, "--tokens", options.tokens)
            return harness.reference(options.against, "hf", *inputs)
        given = {"family": family, "side": side, "work": work, "tokens": options.tokens, "ids": ids}
        given |= {"threads": options.threads, "num_threads": options.threads}
        return harness.launch(measure, work / "run", **given)[0]

    sides += [HF] if options.against else []
    rounds = harness.in_rounds(sides, options.rounds, times)
    versions = rounds[0].get(HF, {}).get("versions", {})
    made = table(family, options.threads, rounds)
    return Result([made], {"family": family, "rounds": rounds}, versions)


def table(family: str, threads: int, rounds: list[Round]) -> Table:
    """A row per side: milliseconds, and their ratios to the reference's, or the model's."""
    base = HF if HF in rounds[0] else MODEL
    names, rows = list(rounds[0][MODEL]["seconds"]), []
    for side in rounds[0]:
        cells = [f"{1e3 * harness.median(rounds, side, 'seconds', name):.1f}" for name in names]
        if side != base:
            ratios = [harness.ratio(rounds, side, base, "seconds", name) for name in names]
            cells = [f"{cell}; {ratio}" for cell, ratio in zip(cells, ratios, strict=True)]
        rows.append([side, *cells, f"{harness.median(rounds, side, 'peak_rss_mib'):.0f}"])
    has_kernels = "with" if rounds[0][MODEL]["is_compiled"] else "without"
    note = (
        f"Milliseconds of processor time to the first token and for a further one, of prompts of "
        f"511 tokens; then their ratios to those of {base}. Float32, {threads} thread(s), "
        f"{has_kernels} C kernels, medians of {len(rounds)} run(s), of each the least of "
        f"{references.RUNS - 1} answers."
    )
    return Table(f"answers {family}", ["", *names, "peak MiB"], rows, note)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument("--family", choices=FAMILIES, required=True)
    harness.add_count(made, "tokens", 16, "tokens of an answer")
    harness.add_count(made, "rounds", 3, "runs of each side")
    harness.add_count(made, "threads", 1, "threads of a process")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    made.add_argument("--against", metavar="PYTHON", help="interpreter with torch, transformers")
    sys.exit(harness.run(made, compare))
