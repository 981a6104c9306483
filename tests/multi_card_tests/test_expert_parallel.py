"""Training runs with expert parallelism, against the same run file on one device.

Guarantees, on batches of different lengths, with and without images: loss, auxiliary loss, gradient
norm, tokens per expert and every parameter after four optimizer steps equal one device's; a resumed
run is bit-identical; checkpoints hold all experts, and one rank continues from them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.multi_card_tests.test_training import (
    MODEL,
    SHARDING,
    SP,
    common,
    train,
    worker,
)
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_equal_runs,
    lasting_metrics,
)
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "mlp_only_layers": [1], "num_hidden_layers": 3,
}  # fmt: skip
MOE = MODEL | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODEL["text_config"] | EXPERTS,
}
EP = ["parallel.dp_degree=2", "parallel.ep_degree=2"]
TOPOLOGIES = {"dp2 ep2": (2, EP, 2)}
HEAVY = {
    "dp2 ep2 mp2 with sequence parallelism": (4, [*EP, "parallel.mp_degree=2", *SP], 2),
    "dp2 ep2 sharding2 stage 2": (4, [*EP, *SHARDING, "parallel.sharding_stage=2"], 4),
    "dp2 ep2 sharding2 stage 1": (4, [*EP, *SHARDING], 4),
    "dp2 ep2 pp2": (4, [*EP, "parallel.pp_degree=2", "train.recompute=full"], 2),
    "dp4 ep2": (4, ["parallel.dp_degree=4", "parallel.ep_degree=2"], 4),
}
GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = write_tiny_run(tmp_path_factory.mktemp("run"), num_samples=24, model=MOE)
    records = [json.loads(line) for line in path.with_name("train.jsonl").read_text().splitlines()]
    for record in records[::3]:
        question = record["messages"][0]
        question["content"] = question["content"].replace("<image>", "Guess: ")
        record["images"] = []
    write_records(path.with_name("train.jsonl"), records)
    return path


def settings(num_parts: int) -> list[str]:
    return [f"train.per_device_train_batch_size={GLOBAL_BATCH // num_parts}"]


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), str(output_dir), [*common(run_file), *settings(1)])
    return output_dir


@pytest.fixture(
    scope="module",
    params=[*TOPOLOGIES, *(pytest.param(name, marks=pytest.mark.heavy) for name in HEAVY)],
)
def several(request, run_file, tmp_path_factory) -> Path:
    processes, topology, num_parts = (TOPOLOGIES | HEAVY)[request.param]
    output_dir = tmp_path_factory.mktemp("several") / "out"
    overrides = [*common(run_file), *settings(num_parts), *topology]
    launch(worker, processes, arguments=(str(run_file), str(output_dir), overrides))
    return output_dir


def test_every_step_and_every_parameter_equal_one_device(several, one_device):
    for found, wanted in zip(lasting_metrics(several), lasting_metrics(one_device), strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=TOPOLOGY), (wanted["step"], key)
    assert_close(arrays_of(several / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
    experts = arrays_of(several / "checkpoint-4")[
        "model.language_model.layers.0.mlp.experts.down_proj"
    ]
    assert experts.shape == (6, 8, 16)


def test_a_resumed_run_is_bit_identical(several):
    found = arrays_of(Path(f"{several}-resumed") / "checkpoint-4")
    for key, array in arrays_of(several / "checkpoint-4").items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_one_process_continues_what_several_saved(several, one_device, run_file, tmp_path):
    shutil.copytree(several / "checkpoint-2", tmp_path / "checkpoint-2")
    overrides = [*common(run_file), *settings(1), "train.resume_from_checkpoint=auto"]
    train(str(run_file), str(tmp_path), overrides)
    assert_close(arrays_of(tmp_path / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))


def test_the_load_balancing_loss_travels_through_a_pipeline(tmp_path):
    """Micro-batches, and so the loss of each, are the same as on one device."""
    model = MOE | {
        "text_config": MOE["text_config"]
        | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    }
    run_file = write_tiny_run(tmp_path / "run", num_samples=24, model=model)
    one, two = tmp_path / "one", tmp_path / "two"
    train(str(run_file), str(one), [*common(run_file), *settings(1)])
    overrides = [*common(run_file), *settings(1), "parallel.pp_degree=2"]
    launch(train, 2, arguments=(str(run_file), str(two), overrides))
    assert_equal_runs(two, one)
