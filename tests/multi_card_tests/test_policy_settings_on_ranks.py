"""`model.policy` on several ranks.

Guarantee: a checkpoint with a frozen tower, unfrozen by one override on two ranks that shard the
parameters (stage 3), gives one device's metrics, parameters and moments, on samples of which some
lack a camera; the tower's gradients are not zero and its parameters move.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.finished_runs import arrays_of, assert_equal_runs
from tests.support.launch import launch
from tests.support.topology_runs import DAMPED, SHARDING, STAGE_3, batch_settings, train

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
    train(run_file, run_file.parent / "out", grow)
    return run_file.parent / "out" / "final"


def test_a_checkpoint_unfrozen_under_stage_3_trains_as_on_one_device(run_file, frozen, tmp_path):
    common = [
        f"model={{pretrained: {frozen}}}",
        "model.policy.freeze_vision_encoder=false",
        "parallel.branch_sync=all_reduce",
        *(*DAMPED, "train.learning_rate=0.05"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    train(run_file, one, [*common, *batch_settings(1)])
    sharded = [*SHARDING, STAGE_3, *batch_settings(2)]
    launch(train, 2, arguments=(run_file, two, [*common, *sharded]))
    assert_equal_runs(two, one)
    before, after = load_file(frozen / "model.safetensors"), arrays_of(two / "checkpoint-4")
    tower = [name for name in before if name.startswith(TOWER)]
    assert len(tower) > 30
    for name in tower:
        assert np.abs(after[f"{name}/moment2"]).max() > 0, name
        # Softmax ignores a bias that all keys share.
        assert "k_proj.bias" in name or not np.array_equal(after[name], before[name]), name
