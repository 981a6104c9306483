"""Checkpoints written when this package had its own pipeline and sharding.

Guarantee: a run continues from a checkpoint of mp 2 x sharding 2, on one device and on fleet's
engine, and equals what one device trained then.
"""

import os
import shutil
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import arrays_of, assert_close
from tests.support.launch import launch

BEFORE = Path(__file__).parents[1] / "golden" / "own_engine_run"
SETTINGS = [
    "data.train=[train.jsonl]", "data.processor=processor", "train.output_dir=out",
    "train.save_steps=2", "train.max_steps=4", "train.adam_epsilon=1e-2", "train.weight_decay=0.1",
    "train.resume_from_checkpoint=auto",
]  # fmt: skip
TOPOLOGIES = {
    "one process": (1, []),
    "sharding2": (2, ["parallel.sharding_degree=2", "train.per_device_train_batch_size=1"]),
}


def train(folder: str, overrides: list[str]) -> None:
    os.chdir(folder)
    assert build_trainer(load_run_config("run.yaml", [*SETTINGS, *overrides])).run() is None


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_run_goes_on_from_it(topology, tmp_path):
    processes, overrides = TOPOLOGIES[topology]
    write_tiny_run(tmp_path)
    shutil.copytree(BEFORE / "checkpoint-2", tmp_path / "out" / "checkpoint-2")
    launch(train, processes, arguments=(str(tmp_path), overrides))
    assert_close(arrays_of(tmp_path / "out" / "checkpoint-4"), arrays_of(BEFORE / "checkpoint-4"))
