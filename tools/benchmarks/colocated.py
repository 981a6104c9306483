"""Steps of a small Qwen3-VL on two pipeline stages: colocated encoder against tower on stage 0.

    python tools/benchmarks/colocated.py
    python tools/benchmarks/colocated.py --shares 20 50 --rounds 5 --write-doc docs/colocated.md

For towers of about 5, 20 and 50 % of the multiplications of a step, trained on the same samples
with the same results: the plain pipeline with equally many layers per stage (`count`), with
estimated equal work (`cost`), and the colocated schedule.

Columns: fastest step (median of the rounds), and its ratio to the faster of the two plain runs of
the same round (median); *busiest rank*, the counted multiplications of the rank with most, relative
to the mean, which bounds the gain on real devices; *images*, how often each is encoded in the
world; megabytes that a rank sends over the bridge and between stages in a step; peak resident
memory beyond that before the model was built. The pipeline's bubble is (pp - 1) / (m + pp - 1) with
m micro-batches; under the colocated schedule only the language model's part of a step has it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

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

PP, MICRO_BATCHES, SAMPLES, WARM_UP = 2, 4, 6, 2
# Percent of the work -> depth, width and inner width of the tower.
TOWERS = {5: (3, 64, 192), 20: (6, 96, 384), 50: (9, 160, 640)}
SIDES = {
    "count": {"parallel.pp_split": "count"},
    "cost": {"parallel.pp_split": "cost"},
    "colocated": {"parallel.schedule": "colocated"},
}
PLAIN = ("count", "cost")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Numbers of this rank."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.train.build import build_trainer
    from topologies import _resident

    configure_cpu_runtime(1)
    before = _resident("VmRSS")
    trainer = build_trainer(load_run_config(options.config, options.settings))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    model = trainer.runner.model
    images = _count_images(model)
    for _ in range(WARM_UP):
        trainer.turn()
    del images[:]
    next_step, fed = trainer.feed.next_step, []

    def recorded_step() -> Any:
        fed.append(next_step())
        return fed[-1]

    trainer.feed.next_step = recorded_step
    with record_collectives() as recording:
        trainer.turn()
    trainer.feed.next_step = next_step
    found = _work(trainer.runner, [one.batch for one in fed[0].micro_batches], sum(images))
    times = []
    for _ in range(options.steps):
        trainer.ranks.wait()
        begin = time.perf_counter()
        trainer.turn()
        trainer.ranks.wait()
        times.append(time.perf_counter() - begin)
    trainer.feed.close()
    trainer.reporter.close()
    width = sum(getattr(trainer.runner, "encoder", _NoEncoder).section_widths)
    return found | {
        # Other work on the machine only makes steps slower.
        "milliseconds": 1e3 * min(times),
        "bridge_bytes": sum(
            call.num_bytes
            for call in recording.calls
            if not call.is_message and call.shape[-1:] == (width,)
        ),
        "message_bytes": sum(call.num_bytes for call in recording.calls if call.is_message),
        "mib": (_resident("VmHWM") - before) / 2**20,
    }


class _NoEncoder:
    section_widths = (-1,)


def _count_images(model: Any) -> list[int]:
    """A list that gets the number of patches of each call of this rank's tower."""
    patches: list[int] = []
    if model.visual is not None:
        model.visual.register_forward_pre_hook(
            lambda layer, inputs: patches.append(inputs[0].shape[0])
        )
    return patches


def _work(runner: Any, batches: list[Any], patches: int) -> dict[str, float]:
    """This rank's multiplications in a step, of the tower and of the rest, and the share of the
    images that it encodes.

    Args:
        patches: that its tower encoded.
    """
    model = runner.model.config
    text, vision = model.text_config, model.vision_config
    tokens = sum(batch["input_ids"].size for batch in batches)
    grids = [batch["image_grid_thw"] for batch in batches if "pixel_values" in batch]
    everything = sum(int(grid.prod(axis=1).sum()) for grid in grids)
    heads = text.num_attention_heads + text.num_key_value_heads
    layer = 2 * text.hidden_size * heads * text.head_dim
    layer += 3 * text.hidden_size * text.intermediate_size
    block = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    merged = vision.hidden_size * vision.spatial_merge_size**2
    mergers = (1 + len(vision.deepstack_visual_indexes)) * merged * (merged + text.hidden_size)
    per_patch = vision.depth * block + mergers / vision.spatial_merge_size**2
    own = [runner.chunks[number] for number in runner.own_chunks]
    decoder = sum(len(chunk.layers) for chunk in own) * layer * tokens
    decoder += any(chunk.is_last for chunk in own) * text.hidden_size * text.vocab_size * tokens
    return {
        "tower": float(patches * per_patch),
        "decoder": float(decoder),
        "images": patches / everything,
    }


def run(share: int, side: str, folder: Path, steps: int) -> dict[str, float]:
    """Train one side."""
    depth, width, inner = TOWERS[share]
    values = yaml.safe_load((ROOT / "configs/quickstart/digits.yaml").read_text(encoding="utf-8"))
    values["model"]["config"]["text_config"]["num_hidden_layers"] = 8
    vision = values["model"]["config"]["vision_config"]
    vision |= {"depth": depth, "hidden_size": width, "intermediate_size": inner}
    work, data = folder / "work", folder / "qwen3_vl"
    work.mkdir(parents=True, exist_ok=True)
    config = work / "run.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    settings = STEPS_ONLY | SIDES[side]
    settings |= {
        "train.output_dir": work / "out",
        "data.train": f"[{data / DATA['qwen3_vl'][1]}]",
        "data.eval": "[]",
        "data.processor": data / "processor",
        "train.per_device_train_batch_size": SAMPLES,
        "train.gradient_accumulation_steps": MICRO_BATCHES,
        "logging.logging_steps": 10**6,
        "parallel.pp_degree": PP,
    }
    arguments = ["--worker", str(work), "--steps", str(steps), "--config", str(config)]
    arguments += ["--settings", *overrides(settings)]
    found = launch(__file__, PP, arguments, work)
    for file in sorted(work.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    totals = [each["tower"] + each["decoder"] for each in found]
    return {
        "milliseconds": max(each["milliseconds"] for each in found),
        "share": sum(each["tower"] for each in found) / sum(totals),
        "busiest": max(totals) / (sum(totals) / len(totals)),
        "images": sum(each["images"] for each in found),
        "bridge_bytes": max(each["bridge_bytes"] for each in found),
        "message_bytes": max(each["message_bytes"] for each in found),
        "mib": max(each["mib"] for each in found),
    }


def compare(options: argparse.Namespace, folder: Path) -> Iterator[tuple[int, list[dict]]]:
    make_data("qwen3_vl", folder / "qwen3_vl")
    for share in options.shares:

        def run_side(side: str, share: int = share) -> dict[str, float]:
            return run(share, side, folder, options.steps)

        yield share, in_rounds(list(SIDES), options.rounds, run_side)


def rows(rounds: list[dict[str, dict[str, float]]]) -> Iterator[list[str]]:
    for side in SIDES:
        first = rounds[0][side]
        plain = [min(found[one]["milliseconds"] for one in PLAIN) for found in rounds]
        ratios = [f[side]["milliseconds"] / best for f, best in zip(rounds, plain, strict=True)]
        times = [found[side]["milliseconds"] for found in rounds]
        yield [
            f"tower {100 * first['share']:.0f} %, {side}",
            f"{statistics.median(times):.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{first['busiest']:.2f}",
            f"{first['images']:.2f}",
            f"{first['bridge_bytes'] / 1e6:.2f}",
            f"{first['message_bytes'] / 1e6:.2f}",
            f"{statistics.median([found[side]['mib'] for found in rounds]):.0f}",
        ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--shares", nargs="+", type=int, choices=TOWERS, default=list(TOWERS))
    made.add_argument("--steps", type=int, default=8, help="timed steps of a run (default 8)")
    made.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    for name in ("--worker", "--config"):
        made.add_argument(name, help=argparse.SUPPRESS)
    made.add_argument("--settings", nargs="*", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        leave(measure(options), Path(options.worker))
    if options.steps < 1 or options.rounds < 1:
        made.error("--steps and --rounds are numbers from 1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = dict(compare(options, Path(folder)))
        except RuntimeError as error:
            print(f"colocated: a run failed:\n{error}", file=sys.stderr)
            return 1
    columns = ["", "ms per step", "to plain", "busiest rank", "images", "MB bridge", "MB messages"]
    lines = [row for rounds in found.values() for row in rows(rounds)]
    bubble = (PP - 1) / (MICRO_BATCHES + PP - 1)
    note = (
        f"{PP} stages on 2 ranks, {MICRO_BATCHES} micro-batches of {SAMPLES} samples, so a bubble "
        f"of {bubble:.0%} in the pipeline; float32 over gloo, one thread per rank."
    )
    show(options, [Table("colocated", [*columns, "peak MiB"], lines, note)], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
