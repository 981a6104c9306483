"""Preference training on several ranks, against one device. `tests/routes` has more on two ranks.

Guarantees, on pairs with shared images, images of their own and none, with the reference computed
in the run: losses, rewards, accuracies, log-probabilities, evaluation by group, and every parameter
after four steps are those of one device on data ranks, and (heavy) in a pipeline with tensor and
sequence parallelism, where a resumed run is bit-identical. So it is (heavy) with rated answers
(KTO), whose baseline is a mean over all ranks, experts with their balance loss in a pipeline,
sharded adapters, the colocated schedule and stages of two chunks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from tests.single_card_tests.train.tiny_run import MODEL, write_records
from tests.support.finished_runs import arrays_of, assert_near, lasting_metrics
from tests.support.launch import launch
from tests.support.preference_runs import base_settings, write_preference_run
from tests.support.topology_runs import (
    DAMPED,
    PP,
    SHARDING,
    SP,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
    num_data_parts,
    train,
)

MP2 = ["parallel.mp_degree=2", *SP]
# Rewards are differences of sums of some tens of nats, which float32 rounds to 4e-6.
OF_REWARDS = 4e-6
KTO = ("preference.loss_type=[kto]", "train.learning_rate=0.05")
MPO = "preference.loss_type=[sigmoid, bco_pair, sft]"
LORA = "model.lora={r: 2, target_modules: [all-linear], modules_to_save: [mergers]}"
# Every rank encodes images of both data lanes.
DIVIDED_TOWER = [
    *PP, "parallel.dp_degree=2", "parallel.schedule=colocated", "parallel.encoder.mp_degree=4",
]  # fmt: skip
HEADS = MODEL | {"vision_config": MODEL["vision_config"] | {"hidden_size": 16, "num_heads": 4}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
           "output_router_logits": True}  # fmt: skip


def common(run_file: Path) -> list[str]:
    tests = [run_file.with_name(name) for name in ("test.jsonl", "train.jsonl")]
    return [
        *base_settings(run_file),
        f"data.eval=[{tests[0]}, {tests[1]}]",
        *("train.save_steps=2", "train.eval_steps=2", *DAMPED),
        *("train.gradient_accumulation_steps=2", "train.per_device_eval_batch_size=2"),
    ]


def assert_equal_metrics(found: Path, wanted: Path, *left_out: str) -> None:
    for ours, theirs in zip(lasting_metrics(found), lasting_metrics(wanted), strict=True):
        for key, value in theirs.items():
            if not key.startswith(("sequence_length", "packing_efficiency", *left_out)):
                close = pytest.approx(value, rel=1e-6, abs=OF_REWARDS)
                assert ours[key] == close, (theirs["step"], key)
    arrays = [_arrays_of(run / "checkpoint-4") for run in (found, wanted)]
    assert_near(*arrays)


def _arrays_of(checkpoint: Path) -> dict[str, np.ndarray]:
    file = checkpoint / "adapter_model.safetensors"
    if not file.is_file():
        return arrays_of(checkpoint)
    stored = read_checkpoint_headers(checkpoint, "optimizer")
    return {name: tensor.read() for name, tensor in stored.items()} | load_file(file)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_preference_run(tmp_path_factory.mktemp("run"), 16)


@pytest.mark.heavy
class TestPairs(EqualsOneDevice):
    topologies: ClassVar = {"mp2 pp2": (4, [*MP2, *PP])}

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), MPO, *batch_settings(num_data_parts)]

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        assert_equal_metrics(several, one_device)


def assert_equals_one_device(
    run_file: Path, folder: Path, ranks: int, topology: Sequence[str], settings: Sequence[str]
) -> None:
    train(run_file, folder / "one", [*common(run_file), *settings, *batch_settings(1)])
    parts = batch_settings(num_data_parts(topology))
    several = [*common(run_file), *settings, *parts, *topology]
    launch(train, ranks, arguments=(str(run_file), str(folder / "several"), several), timeout=300)
    assert_equal_metrics(folder / "several", folder / "one")


def test_rewards_and_groups_are_those_of_one_device(run_file, tmp_path):
    assert_equals_one_device(run_file, tmp_path, 2, ["parallel.dp_degree=2"], [MPO])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "topology", "model"),
    [
        (2, PP, MODEL),
        (4, DIVIDED_TOWER, HEADS),
    ],
    ids=["pp2", "divided tower"],
)
def test_the_baseline_of_rated_answers_is_that_of_all_ranks(tmp_path, ranks, topology, model):
    run_file = write_preference_run(tmp_path, 16, model)
    rated, left_out = run_file.with_name("rated.jsonl"), []
    if (parts := num_data_parts(topology)) > 1:
        # Answers are exchanged within micro-batches, which data ranks divide in another way: with
        # equal answers that does not matter. An evaluation has a baseline for each batch.
        rows = [json.loads(line) for line in rated.read_text().splitlines()]
        for row in rows:
            row["messages"][-1]["content"] = "red"
        rated, left_out = rated.with_name("same.jsonl"), ["eval_"]
        write_records(rated, rows)
    settings = [*KTO, f"data.train=[{rated}]", f"data.eval=[{rated}]"]
    settings += ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=4"]
    several = [*topology, f"train.gradient_accumulation_steps={4 // parts}"]
    train(run_file, tmp_path / "one", [*common(run_file), *settings])
    arguments = (str(run_file), str(tmp_path / "two"), [*common(run_file), *settings, *several])
    launch(train, ranks, arguments=arguments, timeout=300)
    assert_equal_metrics(tmp_path / "two", tmp_path / "one", *left_out)
    assert any(line["kl"] for line in lasting_metrics(tmp_path / "one") if "kl" in line)


@pytest.mark.heavy
def test_experts_and_their_balance_loss_equal_one_device(tmp_path):
    """The balance loss is a mean over micro-batches, which are the same here."""
    text = MODEL["text_config"] | EXPERTS
    model = MODEL | {"model_type": "qwen3_vl_moe", "text_config": text}
    run_file = write_preference_run(tmp_path, 16, model)
    assert_equals_one_device(run_file, tmp_path, 2, PP, [])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "topology", "settings"),
    [
        (2, [*SHARDING, STAGE_3], [LORA, "model.lora.use_dora=true"]),
        (4, [*PP, "parallel.dp_degree=2", "parallel.schedule=colocated"], [MPO]),
    ],
    ids=["sharded adapters", "colocated dp2"],
)
def test_other_runs_equal_one_device(run_file, tmp_path, ranks, topology, settings):
    assert_equals_one_device(run_file, tmp_path, ranks, topology, settings)


@pytest.mark.heavy
def test_stages_with_two_chunks_equal_one_device(tmp_path):
    """dualpipev needs four layers and four micro-batches."""
    text = MODEL["text_config"] | {"num_hidden_layers": 4}
    run_file = write_preference_run(tmp_path, 16, MODEL | {"text_config": text})
    settings = ["train.gradient_accumulation_steps=4", "train.per_device_train_batch_size=1"]
    topology = [*PP, "parallel.pp_schedule=dualpipev"]
    assert_equals_one_device(run_file, tmp_path, 2, topology, settings)
