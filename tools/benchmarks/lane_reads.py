"""Samples decoded per machine, time of it, and pixels that reach a device, by topology.

    python tools/benchmarks/lane_reads.py

Trains a small Qwen3-VL on four ranks, on photographs of 1280 x 960. Ranks of this machine stand for
those of one or two machines: ranks of different ones share no memory.

Rows: topology, machines x ranks of each. Columns: samples of the steps; images that each machine
decodes, and CPU seconds to decode, resize and cut them into patches; MB of pixels handed to a
device, of the rank with fewest and of the one with most.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from data_path import write_photographs
from harness import ROOT, Result, Table

SP = {"sequence_parallel": "true"}
TOPOLOGIES = {
    "dp4": {"dp_degree": 4},
    "cp4": {"sharding_degree": 4, "cp_degree": 4},
    "mp2 dp2": {"mp_degree": 2, "dp_degree": 2, **SP},
    "cp2 mp2": {"sharding_degree": 2, "cp_degree": 2, "mp_degree": 2, **SP},
    "mp2 pp2": {"mp_degree": 2, "pp_degree": 2, **SP},
}
RANKS, STEPS, SAMPLES = 4, 2, 8
IMAGE_SIZE = (1280, 960)


def measure(settings: list[str], ranks_per_machine: int) -> dict[str, float]:
    """Numbers of this rank."""
    from paddle_vl.batch.schema import PIXELS
    from paddle_vl.config.load import load_run_config
    from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
    from paddle_vl.train import lanes
    from paddle_vl.train.build import build_trainer
    from paddle_vl.train.feeding import feed

    machine = int(os.environ["PADDLE_TRAINER_ID"]) // ranks_per_machine
    found = {"machine": machine, "images": 0, "seconds": 0.0, "bytes": 0}
    images: Any = ImageProcessor
    encode, counted = images.encode_one, feed.counted

    def encoded(processor, source, with_pixels):
        begin = time.thread_time()
        try:
            return encode(processor, source, with_pixels)
        finally:
            found["images"] += 1
            found["seconds"] += time.thread_time() - begin

    def taken(batch, *others):
        given = [batch[name] for name in (*PIXELS, "own_patches") if name in batch]
        found["bytes"] += sum(each.nbytes for each in given)
        return counted(batch, *others)

    images.encode_one, feed.counted = encoded, taken
    lanes.machine = lambda: f"machine {machine}"
    build_trainer(load_run_config(str(ROOT / "configs/quickstart/digits.yaml"), settings)).run()
    return found


def write_rows(folder: Path) -> Path:
    """Rows of the digits, each with a photograph."""
    lines = harness.make_data("qwen3_vl", folder).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: STEPS * SAMPLES]]
    for row, photo in zip(
        rows, write_photographs(folder / "photos", *IMAGE_SIZE, len(rows)), strict=True
    ):
        row["images"] = [str(photo)] * len(row["images"])
    path = folder / "photos.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def rows(options: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    data = write_rows(folder / "data")
    for name in options.topologies:
        degrees = TOPOLOGIES[name]
        data_size = degrees.get("dp_degree", 1) * degrees.get("sharding_degree", 1)
        data_size //= degrees.get("cp_degree", 1)
        settings = harness.data_settings("qwen3_vl", folder / "data") | {
            "data.train": f"[{data}]",
            "data.num_workers": 0,
            "data.pad_to_multiple_of": RANKS,
            "train.output_dir": folder / "work" / "out",
            "train.max_steps": STEPS,
            "train.per_device_train_batch_size": SAMPLES // data_size // 2,
            "train.gradient_accumulation_steps": 2,
        }
        settings |= {f"parallel.{key}": value for key, value in degrees.items()}
        given = harness.overrides(settings)
        for size in (RANKS, RANKS // 2):
            found = harness.launch(
                measure, folder / "work", RANKS, settings=given, ranks_per_machine=size
            )
            images, seconds = (
                [
                    sum(each[key] for each in found if each["machine"] == number)
                    for number in range(RANKS // size)
                ]
                for key in ("images", "seconds")
            )
            pixels = [each["bytes"] / 1e6 for each in found]
            few, most = f"{min(pixels):.2f}", f"{max(pixels):.2f}"
            decoded = " + ".join(map(str, images))
            shown = [str(STEPS * SAMPLES), decoded, " + ".join(map("{:.2f}".format, seconds))]
            yield [f"{name}, {RANKS // size} x {size}", *shown, few, most]


def count(options: argparse.Namespace, folder: Path) -> Result:
    """A row for each topology and number of machines."""
    columns = ["", "samples", "decoded", "CPU s", "MB, fewest", "MB, most"]
    found = list(rows(options, folder))
    return Result([Table("lane reads", columns, found)], found)


if __name__ == "__main__":
    made = harness.parser(__doc__)
    made.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    sys.exit(harness.run(made, count))
