"""Steps of a small Qwen3-VL on two pipeline stages: colocated encoder against tower on stage 0.

    python tools/benchmarks/colocated.py
    python tools/benchmarks/colocated.py --shares 20 50 --rounds 5 --write-doc docs/colocated.md

For towers of about 5, 20 and 50 % of the multiplications of a step, trained on the same samples
with the same results: the plain pipeline with equally many layers per stage (`count`), with
estimated equal work (`cost`), and the colocated schedule.

Columns: fastest step (median of the rounds), and its ratio to the faster of the two plain runs of
the same round (median); *busiest rank*, the counted multiplications of the rank with most, relative
to the mean, which bounds the gain on real devices; *images*, how often each is encoded in the
world; megabytes that a rank sends over the bridge and between stages in a step; *copies*, arrays
that a rank copies to the device in a step from pageable memory, beside its batches; peak resident
memory beyond that before the model was built. The pipeline's bubble is (pp - 1) / (m + pp - 1) with
m micro-batches; under the colocated schedule only the language model's part of a step has it.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import harness
from harness import ROOT, Result, Round, Table

PP, MICRO_BATCHES, SAMPLES = 2, 4, 6
# Percent of the work -> depth, width and inner width of the tower.
TOWERS = {5: (3, 64, 192), 20: (6, 96, 384), 50: (9, 160, 640)}
SIDES = {
    "count": {"parallel.pp_split": "count"},
    "cost": {"parallel.pp_split": "cost"},
    "colocated": {"parallel.schedule": "colocated"},
}
PLAIN, WARM_UP = ("count", "cost"), 3
# What is shown of the rank with most.
MOST = ("milliseconds", "bridge_bytes", "message_bytes", "copies", "mib")


def measure(config: str, settings: list[str], steps: int) -> dict[str, float]:
    """Numbers of this rank."""
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.testing import record_device_copies
    from paddle_vl.train.build import build_trainer

    configure_cpu_runtime(1)
    before = harness.peak_mib()
    trainer: Any = build_trainer(load_run_config(config, settings))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    found: dict[str, float] = {}
    widths: list[int] = []

    @contextmanager
    def watched() -> Iterator[None]:
        """Count the turn's copies to the device and this rank's work."""
        next_step, fed, patches = trainer.feed.next_step, [], []

        def recorded_step() -> Any:
            fed.append(next_step())
            return fed[-1]

        trainer.feed.next_step = recorded_step
        tower = trainer.runner.model.visual
        if tower is not None:
            # At its first layer: with a layout from the collator the tower runs by `encode`.
            tower.patch_embed.register_forward_pre_hook(
                lambda layer, inputs: patches.append(inputs[0].shape[0])
            )
        with record_device_copies() as copies:
            yield
        trainer.feed.next_step = next_step
        # Batches are copied by the feed, from pinned memory on a GPU.
        found["copies"] = sum(not place.startswith("train/feeding/") for place in copies)
        batches = fed[0].micro_batches
        found.update(_work(trainer.runner, batches, sum(patches)))
        if hasattr(trainer.runner, "encoder"):
            widths.append(sum(trainer.runner.encoder.section_widths))

    for _ in range(WARM_UP):
        trainer.turn()
    with watched(), record_collectives() as recording:
        trainer.turn()
    times = []
    for _ in range(steps):
        trainer.ranks.wait()
        begin = time.perf_counter()
        trainer.turn()
        trainer.ranks.wait()
        times.append(time.perf_counter() - begin)
    trainer.feed.close()
    trainer.reporter.close()
    for name, wanted in (("bridge_bytes", False), ("message_bytes", True)):
        found[name] = sum(
            call.num_bytes
            for call in recording.calls
            if call.is_message == wanted and (call.is_message or list(call.shape[-1:]) == widths)
        )
    # Other work on the machine only makes steps slower.
    return found | {"milliseconds": 1e3 * min(times), "mib": harness.peak_mib() - before}


def _work(runner: Any, batches: list[Any], patches: int) -> dict[str, float]:
    """This rank's multiplications in a step, of the tower and of the rest, and the share of the
    images that it encodes.

    Args:
        patches: that its tower encoded.
    """
    model = runner.model.config
    text, vision = model.text_config, model.vision_config
    tokens = sum(batch["input_ids"].size for batch in batches)
    grids = [batch["image_grid_thw"] for batch in batches if "image_grid_thw" in batch]
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


def trained(share: int, side: str, folder: Path, steps: int) -> dict[str, float]:
    """Train one side."""
    depth, width, inner = TOWERS[share]
    values = yaml.safe_load((ROOT / "configs/quickstart/digits.yaml").read_text(encoding="utf-8"))
    values["model"]["config"]["text_config"]["num_hidden_layers"] = 8
    vision = values["model"]["config"]["vision_config"]
    vision |= {"depth": depth, "hidden_size": width, "intermediate_size": inner}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    settings = harness.data_settings("qwen3_vl", folder / "data") | SIDES[side]
    settings |= {
        "train.output_dir": folder / "work" / "out",
        "train.per_device_train_batch_size": SAMPLES,
        "train.gradient_accumulation_steps": MICRO_BATCHES,
        "logging.logging_steps": 10**6,
        "parallel.pp_degree": PP,
    }
    given = {"config": config, "settings": harness.overrides(settings), "steps": steps}
    found = harness.launch(measure, folder / "work", PP, **given)
    totals = [each["tower"] + each["decoder"] for each in found]
    return {name: max(each[name] for each in found) for name in MOST} | {
        "share": sum(each["tower"] for each in found) / sum(totals),
        "busiest": max(totals) / (sum(totals) / len(totals)),
        "images": sum(each["images"] for each in found),
    }


def rows(rounds: list[Round]) -> Iterator[list[str]]:
    for side in SIDES:
        first = rounds[0][side]
        ratios = [
            {"": {"ms": one[side]["milliseconds"] / min(one[p]["milliseconds"] for p in PLAIN)}}
            for one in rounds
        ]
        yield [
            f"tower {100 * first['share']:.0f} %, {side}",
            f"{harness.median(rounds, side, 'milliseconds'):.0f}",
            f"{harness.median(ratios, '', 'ms'):.2f}",
            f"{first['busiest']:.2f}",
            f"{first['images']:.2f}",
            f"{first['bridge_bytes'] / 1e6:.2f}",
            f"{first['message_bytes'] / 1e6:.2f}",
            f"{first['copies']:.0f}",
            f"{harness.median(rounds, side, 'mib'):.0f}",
        ]


def compare(options: argparse.Namespace, folder: Path) -> Result:
    harness.make_data("qwen3_vl", folder / "data")
    found = {}
    for share in options.shares:

        def run_side(side: str, share: int = share) -> dict[str, float]:
            return trained(share, side, folder, options.steps)

        found[share] = harness.in_rounds(list(SIDES), options.rounds, run_side)
    columns = ["", "ms per step", "to plain", "busiest rank", "images", "MB bridge", "MB messages"]
    columns += ["copies", "peak MiB"]
    lines = [row for rounds in found.values() for row in rows(rounds)]
    bubble = (PP - 1) / (MICRO_BATCHES + PP - 1)
    note = (
        f"{PP} stages on 2 ranks, {MICRO_BATCHES} micro-batches of {SAMPLES} samples, so a bubble "
        f"of {bubble:.0%} in the pipeline; float32 over gloo, one thread per rank."
    )
    return Result([Table("colocated", columns, lines, note)], found)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument("--shares", nargs="+", type=int, choices=TOWERS, default=list(TOWERS))
    harness.add_count(made, "steps", 8, "timed steps of a run")
    harness.add_count(made, "rounds", 3, "runs of each side")
    sys.exit(harness.run(made, compare))
