"""Exports with weights in float32, bfloat16 and int8: files, load, memory, and speed of answers.

    python tools/benchmarks/stored_weights.py

The model of `configs/bench/qwen3_vl_step.yaml` answers a prompt of `export.py` greedily, from an
export with each kind of weights. Programs compute in float32 and widen the weights; Paddle's
predictor does this once, at load. `int8, each step` switches that off, so that a step widens them.
Every round runs every kind in a new process, in changing order; ratios are medians over rounds,
with quartiles.
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

from export import build, prompts
from harness import Table, in_rounds, launch, leave, make_data, parser, quartiles, show

KINDS: dict[str, tuple[str, bool]] = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "int8": ("float32", True),
}
FOLDED, EACH_STEP = "int8", "int8, each step"
SIDES = (*KINDS, EACH_STEP)


def write_exports(work: Path) -> None:
    """A folder of each kind."""
    from paddle_vl.export.writing import export_model
    from paddle_vl.families.qwen3_vl.programs import model_to_export

    for kind, (dtype, int8) in KINDS.items():
        model, processor = build(work)
        to_export = model_to_export(model, processor.save_pretrained)
        export_model(to_export, Path("bench"), work / kind, dtype=dtype, int8=int8)


def without_folding() -> None:
    """Programs that are loaded from now on widen their weights in every run."""
    from paddle import inference

    from paddle_vl.export import program

    class Unfolded(inference.Config):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.delete_pass("constant_folding_pass")

    class Inference:
        Config, create_predictor = Unfolded, staticmethod(inference.create_predictor)

    program.inference = Inference  # type: ignore[assignment]


def measure(side: str, work: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds and sizes of one kind, in this process."""
    from paddle_vl.export import load

    if side == EACH_STEP:
        without_folding()
    folder = work / (FOLDED if side == EACH_STEP else side)
    begin = time.perf_counter()
    model = load(folder)
    loaded = time.perf_counter() - begin
    processor = model.processor
    ids = {
        "image": processor.image_token_id,
        "start": processor.vision_start_token_id,
        "end": processor.vision_end_token_id,
    }
    batch, runs = prompts(ids, 1), []
    for _ in range(repeats + 1):
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in model.stream(**batch, max_new_tokens=tokens)]
        runs.append((times[1] - times[0], times[-1] - times[1]))
    first, rest = (statistics.median(run[i] for run in runs[1:]) for i in (0, 1))
    size = sum(path.stat().st_size for path in folder.glob("*.pdiparams"))
    return {
        "load": loaded,
        "first": first,
        "rest": rest,
        "weights_mib": size / 2**20,
        "decoder_mib": (folder / "decoder.pdiparams").stat().st_size / 2**20,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def tables(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> list[Table]:
    """A row per kind; ratios are of the time with float32 weights to this one's."""
    rows = []
    for side in SIDES:
        of_side = [one[side] for one in rounds]
        cells = [f"{of_side[0][name]:.1f}" for name in ("weights_mib", "decoder_mib")]
        cells.append(f"{statistics.median(one['load'] for one in of_side):.2f}")
        cells.append(f"{statistics.median(one['peak_rss_mib'] for one in of_side):.0f}")
        for name in ("first", "rest"):
            ratios = [one["float32"][name] / one[side][name] for one in rounds]
            low, middle, high = quartiles(ratios)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append([side, *cells])
    columns = [
        "weights", "MiB, all", "MiB, decoder", "s to load", "peak MiB", "first: float32 / this",
        "rest: float32 / this",
    ]  # fmt: skip
    note = (
        f"A prompt of 511 tokens, {options.tokens} new ones, {options.threads} thread(s); medians "
        f"of {len(rounds)} round(s) with quartiles. Ratios above 1: faster than float32 weights."
    )
    return [Table("stored_weights", columns, rows, note)]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=16, help="new tokens of an answer (default 16)")
    made.add_argument("--repeats", type=int, default=2, help="timed answers (default 2)")
    made.add_argument("--rounds", type=int, default=3, help="processes of each kind (default 3)")
    made.add_argument("--threads", type=int, default=2, help="threads of a process (default 2)")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--side", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        work = Path(options.worker)
        if options.side == "write":
            write_exports(work)
            leave({}, work)
        leave(measure(options.side, work, options.tokens, options.repeats), work)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)

        def run(side: str) -> dict[str, Any]:
            arguments = [
                "--worker", str(work), "--side", side, "--tokens", str(options.tokens),
                "--repeats", str(options.repeats), "--threads", str(options.threads),
            ]  # fmt: skip
            return launch(__file__, 1, arguments, work)[0]

        try:
            make_data("qwen3_vl", work / "data")
            run("write")
            rounds = in_rounds(list(SIDES), options.rounds, run)
        except RuntimeError as error:
            print(f"stored_weights: a run failed:\n{error}", file=sys.stderr)
            return 1
    show(options, tables(options, rounds), {"rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
