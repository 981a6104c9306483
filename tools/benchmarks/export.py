"""Generation of a mid-size Qwen3-VL: the model itself, its exported programs, and ONNX.

    python tools/benchmarks/export.py
    python tools/benchmarks/export.py --against PYTHON      # HF transformers on torch as well

The model of `configs/bench/qwen3_vl_step.yaml` in float32 answers prompts of 511 tokens with an
image of 256 visual tokens each, greedily, one prompt and eight at once. Reported are the time to
the first token, tokens per second after it (over the batch), and peak memory of the process that
generates. Every round runs every side in a new process, in changing order; ratios are medians over
rounds, with quartiles. Model, programs and ONNX must give the same tokens.

A second table is of one long prompt of text, which the model prefills whole and in chunks
(`prefill_chunk_size`): time to the first token and peak memory, each in processes of its own.

Time to the first token has three parts on the exported sides, which `--parts` prints: the tower,
the prefill, and the rest (layout, positions, copies).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from harness import ROOT, Table, in_rounds, launch, leave, make_data, parser, quartiles, show

CONFIG = ROOT / "configs/bench/qwen3_vl_step.yaml"
BATCHES = (1, 8)
DYNAMIC, STATIC, ONNX, HF = "dynamic", "static", "ONNX", "HF transformers"
# Sides of the long prompt, by the size of their chunks; 0 is the whole prompt.
CHUNKED, CHUNKS = "chunks ", (0, 512, 128)
RUNTIMES: dict[str, Any] = {STATIC: "paddle", ONNX: "onnxruntime"}


def build(work: Path) -> tuple[Any, Any]:
    """The model with weights of a fixed seed, and its processor."""
    import paddle

    from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
    from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
    from paddle_vl.families.qwen3_vl.processor_fit import model_config

    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    processor = Qwen3VLProcessor.from_pretrained(work / "data" / "processor")
    paddle.seed(0)
    config = model_config(settings["model"]["config"], processor)
    model = Qwen3VLForConditionalGeneration.from_config(config)
    model.eval()
    return model, processor


def prompts(ids: dict[str, int], size: int) -> dict[str, np.ndarray]:
    """Prompts of one image each, with random text; the shapes that export_hf.py gives to HF."""
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    vision, data = settings["model"]["config"]["vision_config"], settings["data"]
    side = int(data["max_pixels"] ** 0.5) // vision["patch_size"]
    pads = (side // vision["spatial_merge_size"]) ** 2
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    rng = np.random.default_rng(0)
    ids_BL = rng.integers(0, 200, (size, data["max_length"]))
    ids_BL[:, 10], ids_BL[:, 11 + pads] = ids["start"], ids["end"]
    ids_BL[:, 11 : 11 + pads] = ids["image"]
    return {
        "input_ids": ids_BL,
        "attention_mask": np.ones_like(ids_BL),
        "pixel_values": rng.normal(size=(size * side**2, patch)).astype(np.float32),
        "image_grid_thw": np.array([[1, side, side]] * size),
    }


def write_export(work: Path) -> None:
    """The folder of the programs."""
    from paddle_vl.export.writing import export_model
    from paddle_vl.families.qwen3_vl.programs import model_to_export

    model, processor = build(work)
    to_export = model_to_export(model, processor.save_pretrained)
    export_model(to_export, Path("bench"), work / "export", onnx=True)


def measure(side: str, work: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of one side, in this process."""
    if side == DYNAMIC:
        model, processor = build(work)
    else:
        from paddle_vl.export import load

        model = load(work / "export", RUNTIMES[side])
        processor = model.processor
    ids = {
        "image": processor.image_token_id,
        "start": processor.vision_start_token_id,
        "end": processor.vision_end_token_id,
    }
    seconds, parts = {}, {}
    clock = PartClock(model, ("_tower", "_prefill", "_decode")) if side != DYNAMIC else None
    last: list[list[int]] = []
    for size in BATCHES:
        batch = prompts(ids, size)
        runs = []
        for _ in range(repeats + 1):
            times, answers = [time.perf_counter()], []
            if clock is not None:
                clock.start()
            for token_B in model.stream(**batch, max_new_tokens=tokens):
                answers.append(token_B.tolist())
                times.append(time.perf_counter())
            runs.append({"first": times[1] - times[0], "rest": times[-1] - times[1]})
            if clock is not None:
                parts[size] = clock.seconds
        last = answers
        # The first run warms up.
        seconds[size] = {
            name: statistics.median(run[name] for run in runs[1:]) for name in ("first", "rest")
        }
    return {
        "seconds": seconds,
        "parts": parts,
        "tokens": last,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_long(chunk: int, work: Path, length: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token of a long prompt, in chunks; 0 for the whole prompt at once."""
    model, _ = build(work)
    ids_BL = np.random.default_rng(0).integers(0, 200, (1, length))
    seconds, token = [], 0
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        settings = {"max_new_tokens": 1, "prefill_chunk_size": chunk or None}
        token = int(model.generate(ids_BL, **settings)[0, 0])
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds[1:]),
        "token": token,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


class PartClock:
    """Seconds in each program of an exported model during one answer."""

    def __init__(self, model: Any, names: tuple[str, ...]):
        self.seconds: dict[str, float] = {}
        for name in names:
            setattr(model, name, _Timed(getattr(model, name), name, self))

    def start(self) -> None:
        self.seconds = {}


class _Timed:
    def __init__(self, program: Any, name: str, clock: PartClock):
        self._program, self._name, self._clock = program, name, clock

    def __call__(self, inputs: Any) -> Any:
        begin = time.perf_counter()
        outputs = self._program(inputs)
        before = self._clock.seconds.get(self._name, 0.0)
        self._clock.seconds[self._name] = before + time.perf_counter() - begin
        return outputs

    def input_width(self, name: str) -> int:
        return self._program.input_width(name)


def run_here(options: argparse.Namespace, side: str, work: Path) -> dict[str, Any]:
    """The result of a new process."""
    arguments = [
        "--worker", str(work), "--side", side, "--tokens", str(options.tokens),
        "--repeats", str(options.repeats), "--threads", str(options.threads),
        "--long", str(options.long),
    ]  # fmt: skip
    return launch(__file__, 1, arguments, work)[0]


def run_reference(options: argparse.Namespace) -> dict[str, Any]:
    """The result of HF transformers in a new process of another interpreter."""
    script = Path(__file__).with_name("export_hf.py")
    numbers = [options.tokens, options.repeats, options.threads, *BATCHES]
    done = subprocess.run(
        [options.against, str(script), str(CONFIG), *map(str, numbers)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{options.against} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Results of all rounds, by side.

    Raises:
        RuntimeError: a side failed, or gave other tokens than the model.
    """
    make_data("qwen3_vl", work / "data")
    run_here(options, "write", work)
    sides = [DYNAMIC, STATIC, *([] if options.no_onnx else [ONNX])]

    def run(side: str) -> dict[str, Any]:
        return run_reference(options) if side == HF else run_here(options, side, work)

    every = [*sides, *([HF] if options.against else [])]
    rounds = in_rounds(every, options.rounds, run)
    for side in sides:
        if rounds[0][side]["tokens"] != rounds[0][DYNAMIC]["tokens"]:
            raise RuntimeError(f"{side} gives other tokens than the model")
    chunks = [f"{CHUNKED}{size}" for size in CHUNKS]
    long = in_rounds(chunks, options.rounds, run) if options.long else []
    if long and len({found["token"] for found in long[0].values()}) > 1:
        raise RuntimeError("chunks of a prompt give another token than the whole prompt")
    return {"tokens": options.tokens, "rounds": rounds, "long": long, "length": options.long}


def tables(found: dict[str, Any], threads: int) -> list[Table]:
    """A row per side and batch size; ratios are of the model's, or HF's, time to this side's."""
    rounds, steps = found["rounds"], found["tokens"] - 1
    rows = []
    for size in BATCHES:
        for side in rounds[0]:

            def values(name: str, side: str = side, size: int = size) -> list[float]:
                return [one[side]["seconds"][str(size)][name] for one in rounds]

            cells = [f"{1e3 * statistics.median(values('first')):.0f}"]
            cells.append(f"{steps * size / statistics.median(values('rest')):.1f}")
            for other in (DYNAMIC, HF):
                for name in ("first", "rest"):
                    if other not in rounds[0] or other == side:
                        cells.append("")
                        continue
                    ratios = [
                        theirs / own
                        for theirs, own in zip(values(name, other), values(name), strict=True)
                    ]
                    low, middle, high = quartiles(ratios)
                    cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            memory = statistics.median(one[side]["peak_rss_mib"] for one in rounds)
            rows.append([f"{side}, batch {size}", *cells, f"{memory:.0f}"])
    columns = [
        "", "ms to first token", "tokens per second", "first: dynamic / this",
        "rest: dynamic / this", "first: HF / this", "rest: HF / this", "peak MiB",
    ]  # fmt: skip
    note = (
        f"Prompts of 511 tokens, 256 of them visual; {found['tokens']} tokens, float32, {threads} "
        f"thread(s), medians of {len(rounds)} round(s) with quartiles. Ratios above 1: this side "
        "is faster."
    )
    return [Table("export", columns, rows, note), *long_tables(found)]


def long_tables(found: dict[str, Any]) -> list[Table]:
    """A row per size of the chunks of a long prompt."""
    rows = []
    for size in CHUNKS if found["long"] else ():
        own = [one[f"{CHUNKED}{size}"] for one in found["long"]]
        whole = [one[f"{CHUNKED}{CHUNKS[0]}"] for one in found["long"]]
        ratios = [w["seconds"] / o["seconds"] for w, o in zip(whole, own, strict=True)]
        low, middle, high = quartiles(ratios)
        rows.append(
            [
                f"chunks of {size}" if size else "whole",
                f"{1e3 * statistics.median(one['seconds'] for one in own):.0f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})" if size else "",
                f"{statistics.median(one['peak_rss_mib'] for one in own):.0f}",
            ]
        )
    columns = ["prefill", "ms to first token", "whole / this", "peak MiB"]
    note = f"One prompt of {found['length']} tokens of text, the model itself, float32."
    return [Table("export long prompt", columns, rows, note)] if rows else []


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=32, help="new tokens of an answer (default 32)")
    made.add_argument("--repeats", type=int, default=3, help="timed answers (default 3)")
    made.add_argument("--rounds", type=int, default=3, help="processes of each side (default 3)")
    made.add_argument("--threads", type=int, default=2, help="threads of a process (default 2)")
    made.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")
    made.add_argument("--against", metavar="PYTHON", help="interpreter with torch, transformers")
    made.add_argument("--parts", action="store_true", help="print seconds in each program")
    made.add_argument(
        "--long", type=int, default=4000, help="tokens of the long prompt (default 4000, 0: none)"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--side", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        from paddle_vl.compat import configure_cpu_runtime

        configure_cpu_runtime(options.threads)
        work = Path(options.worker)
        if options.side == "write":
            write_export(work)
            leave({}, work)
        if options.side.startswith(CHUNKED):
            chunk = int(options.side.removeprefix(CHUNKED))
            leave(measure_long(chunk, work, options.long, options.repeats), work)
        leave(measure(options.side, work, options.tokens, options.repeats), work)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = compare(options, Path(folder))
        except RuntimeError as error:
            print(f"export: a run failed:\n{error}", file=sys.stderr)
            return 1
    versions = found["rounds"][0].get(HF, {}).get("versions", {})
    show(options, tables(found, options.threads), found, **versions)
    if options.parts:
        for side in RUNTIMES:
            for size, seconds in found["rounds"][0].get(side, {}).get("parts", {}).items():
                shown = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in seconds.items())
                print(f"{side}, batch {size}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
