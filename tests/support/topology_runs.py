"""Training runs on several ranks.

Adam divides a gradient by its size, which turns rounding noise of entries near zero into full
updates; `DAMPED` has a large epsilon for the runs that are compared.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run

RESUME = "train.resume_from_checkpoint=auto"
DAMPED = ("train.adam_epsilon=1e-2", "train.weight_decay=0.1")
SHARDING, PP = ("parallel.sharding_degree=2",), ("parallel.pp_degree=2",)
STAGE_3 = "parallel.sharding_stage=3"
CP = (*SHARDING, "parallel.cp_degree=2", "data.pad_to_multiple_of=2")
HIDDEN, ULYSSES = "parallel.cp_gather_overlap=true", "parallel.cp_attention=ulysses"
SP = ("parallel.sequence_parallel=true", "data.pad_to_multiple_of=2")
# Samples of a micro-batch over all ranks.
GLOBAL_BATCH = 4


def train(run_file: Path | str, output_dir: Path | str, overrides: Sequence[str]) -> None:
    config = load_run_config(str(run_file), [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None


def continue_run(
    run_file: Path | str, start: Path | str, output_dir: Path | str, overrides: Sequence[str]
) -> None:
    """Continue a checkpoint of step 2 in another folder, where the best model may be that in
    `final/`."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name in ("checkpoint-2", "final"):
            shutil.copytree(Path(start) / name, Path(output_dir) / name)
    if dist.is_initialized():
        dist.barrier()
    train(run_file, output_dir, [*overrides, RESUME])


def batch_settings(num_data_parts: int) -> list[str]:
    """The same global batch on any number of data ranks."""
    return [f"train.per_device_train_batch_size={GLOBAL_BATCH // num_data_parts}"]


def num_data_parts(topology: Sequence[str]) -> int:
    def product(axes: str) -> int:
        degrees = re.findall(rf"parallel\.(?:{axes})_degree=(\d+)", " ".join(topology))
        return int(np.prod([int(degree) for degree in degrees], dtype=int))

    return product("dp|sharding") // product("cp")


def write_mixed_run(folder: Path, num_samples: int, model: dict[str, Any]) -> Path:
    """A run whose samples have two images, one or none, and different lengths."""
    path = write_tiny_run(folder, num_samples, model)
    records = [json.loads(line) for line in path.with_name("train.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        question = record["messages"][0]
        if number % 3 == 0:
            question["content"] = question["content"].replace("<image>", "Guess: ")
            record["images"] = []
        elif number % 3 == 1:
            question["content"] = "<image> and " + question["content"]
            record["images"] *= 2
    write_records(path.with_name("train.jsonl"), records)
    return path
