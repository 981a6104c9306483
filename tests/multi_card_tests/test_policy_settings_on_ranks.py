"""`model.policy` on several ranks, given on the command line of `fleetrun tools/train.py`.

Guarantee: a checkpoint with a frozen tower, unfrozen by one override on two ranks that shard the
parameters (stage 3), gives one device's metrics, parameters and moments, on samples of which some
lack a camera; the tower's gradients are not zero and its parameters move.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.finished_runs import arrays_of, assert_equal_runs

ROOT = Path(__file__).parents[2]
FLEETRUN = Path(sys.executable).with_name("fleetrun")
TOWER = "model.gemma3_with_expert.gemma3.model.vision_tower."


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_file = write_tiny_policy_run(folder, 40, freeze_vision_encoder=True, empty_cameras=1)
    file = folder / "arm-joint.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for number, line in enumerate(lines):
        if number % 3:
            del line[f"camera{number % 3 - 1}"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run_file


@pytest.fixture(scope="module")
def frozen(run_file) -> Path:
    # The projector starts at zero: it must grow before the tower has a gradient worth a step. With
    # faster steps attention would saturate, and gradients of a millionth be rounding.
    grow = ["train.learning_rate=0.02", "train.max_steps=8"]
    assert build_trainer(load_run_config(run_file, grow)).run() is None
    return run_file.parent / "out" / "final"


def fleetrun(run_file: Path, folder: Path, overrides: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [str(FLEETRUN), "--nproc_per_node", "2", "--log_dir", str(folder / "log")]
    command = [*launcher, str(ROOT / "tools" / "train.py"), str(run_file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    logs = [path.read_text() for path in sorted((folder / "log").glob("workerlog.*"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])


def test_a_checkpoint_unfrozen_under_stage_3_trains_as_on_one_device(run_file, frozen, tmp_path):
    common = [
        f"model={{pretrained: {frozen}}}",
        "model.policy.freeze_vision_encoder=false",
        "parallel.branch_sync=all_reduce",
        # Adam divides a gradient by its size; this epsilon damps the noise of entries near zero.
        "train.adam_epsilon=1e-2",
        "train.learning_rate=0.05",
        # The command would take compiled kernels and the trainer here not: they round differently.
        "train.cpu_kernels=false",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    whole = ["train.per_device_train_batch_size=4", f"train.output_dir={one}"]
    assert build_trainer(load_run_config(run_file, [*common, *whole])).run() is None
    sharded = ["parallel.sharding_degree=2", "parallel.sharding_stage=3"]
    fleetrun(run_file, tmp_path, [*common, *sharded, f"train.output_dir={two}"])
    assert_equal_runs(two, one)
    before, after = load_file(frozen / "model.safetensors"), arrays_of(two / "checkpoint-4")
    tower = [name for name in before if name.startswith(TOWER)]
    assert len(tower) > 30
    for name in tower:
        assert np.abs(after[f"{name}/moment2"]).max() > 0, name
        # Softmax ignores a bias that all keys share.
        assert "k_proj.bias" in name or not np.array_equal(after[name], before[name]), name
