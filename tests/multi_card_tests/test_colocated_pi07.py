"""pi07's policy and planner under the colocated schedule, in full runs against one device.

Guarantees, on samples with missing cameras, dropped goals and dropped pasts, so that items and loss
counts differ from step to step, with a tower whose weights matter and move:

- losses, norms, evaluations, parameters and moments equal one device's, with recomputation, rows on
  the host and a sharded optimizer state; a resumed run is bit-identical; `final/` has its weights
  in one file;
- (heavy) the same on four ranks, with sequence parallelism, fewer encoder lanes than data lanes and
  sharded parameters, with a partly frozen tower, and of the planner; a plain run continues
  colocated; dropout in the decoder draws the same numbers as under the plain schedule.

`test_colocated_schedule` compares gradients themselves, and sees broken schedules.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import ClassVar

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.families.pi07.flow import PolicyModel
from tests.single_card_tests.train.tiny_policy_run import MODEL, PLANNER, write_tiny_policy_run
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_equal_runs,
    assert_one_file_of_weights,
)
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    GLOBAL_BATCH,
    RESUME,
    EqualsOneDevice,
    continue_run,
    num_data_parts,
    train,
)

COLOCATED = "parallel.schedule=colocated"
PP2, DP2, MP2 = (f"parallel.{axis}_degree=2" for axis in ("pp", "dp", "mp"))
STATE, RECOMPUTE = "parallel.encoder.sharding_stage=1", "train.recompute=full"
OFFLOAD = "parallel.encoder.offload_rows=true"
SP = (MP2, "parallel.sequence_parallel=true")
TOWER = {"hidden_size": 32, "num_attention_heads": 4}
_TOWER, _PROJECTOR = ".vision_tower.", ".mm_input_projection_weight"


def with_tower(model: dict, **settings: object) -> dict:
    """The model with a tower that four ranks divide, for data that may lack a camera."""
    model = deepcopy(model) | {"empty_cameras": 1} | settings
    model["vlm_config"]["gemma3_config"]["vision_config"].update(TOWER)
    return model


def encoder_mp(degree: int) -> str:
    return f"parallel.encoder.mp_degree={degree}"


# Other runs, each compared with one device: name -> overrides, layout on two ranks.
VARIANTS = {
    "partly frozen tower": (
        ["model.freeze=['*vision_model.encoder.layers.0.*']"],
        [PP2, encoder_mp(2)],
    ),
    "planner": ([f"model.config={json.dumps(with_tower(PLANNER))}"], [PP2]),
}
DROPOUT = f"model.config={json.dumps(with_tower(MODEL, dropout=0.2))}"


@contextmanager
def stirred_tower() -> Iterator[None]:
    """The tower matters in the first step.

    A fresh projector is zero, and attention of a fresh tower this small is nearly uniform.
    """
    materialize = PolicyModel.materialize

    def materialized(self):
        keys = {id(item.parameter): item.key for item in self.stored_parameters()}
        for parameter in materialize(self):
            key = keys[id(parameter)]
            if key.endswith(_PROJECTOR):
                rng = np.random.default_rng(0)
                parameter.set_value(rng.standard_normal(parameter.shape, np.float32))
            elif _TOWER in key and key.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.set_value(20 * parameter)
            yield parameter

    PolicyModel.materialize = materialized
    try:
        yield
    finally:
        PolicyModel.materialize = materialize


def train_stirred(run_file: str, output_dir: str, overrides: list[str]) -> None:
    with stirred_tower():
        train(run_file, output_dir, overrides)


def train_and_resume_stirred(run_file: str, output_dir: str, overrides: list[str]) -> None:
    train_stirred(run_file, output_dir, overrides)
    dist.barrier()
    continue_run(run_file, output_dir, f"{output_dir}-resumed", overrides)


def common(run_file: Path, num_data_parts: int = 1) -> list[str]:
    # Of the five samples of evaluation one lane has none left while the other goes on.
    return [
        f"data.eval=[{run_file.with_name('few.jsonl')}]",
        *("data.action_errors=false", "train.ema={decay: 0.9}"),
        *("train.save_steps=2", "train.eval_steps=2", "train.per_device_eval_batch_size=1"),
        *(*DAMPED, "parallel.branch_sync=all_reduce", "train.gradient_accumulation_steps=2"),
        f"train.per_device_train_batch_size={GLOBAL_BATCH // num_data_parts}",
    ]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = write_tiny_policy_run(tmp_path_factory.mktemp("run"), 40, **with_tower(MODEL))
    file = path.with_name("arm-joint.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for number, record in enumerate(records):
        if number % 3 == 0:
            del record["camera1"]
            record.pop("subgoal1", None)
    lines = [json.dumps(record) + "\n" for record in records]
    file.write_text("".join(lines))
    path.with_name("few.jsonl").write_text("".join(lines[:5]))
    text = path.read_text().replace(
        "subgoal_drop_prob: 0.6", "subgoal_drop_prob: 0.6\n    history_state_drop_prob: 0.5"
    )
    assert "history_state" in text
    path.write_text(text)
    return path


class TestRuns(EqualsOneDevice):
    topologies: ClassVar = {"pp2": (2, [COLOCATED, PP2, STATE, OFFLOAD, RECOMPUTE])}

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return common(run_file, num_data_parts)

    @pytest.fixture(scope="class")
    @classmethod
    def one_device(cls, run_file: Path, tmp_path_factory) -> Path:
        output_dir = tmp_path_factory.mktemp("one") / "out"
        train_stirred(str(run_file), str(output_dir), common(run_file))
        return output_dir

    @classmethod
    def launch(cls, num_ranks, run_file, output_dir, overrides):
        arguments = (str(run_file), str(output_dir), overrides)
        launch(train_and_resume_stirred, num_ranks, arguments=arguments, timeout=300)

    def test_the_tower_moves(self, one_device):
        first, last = (arrays_of(one_device / f"checkpoint-{step}") for step in (2, 4))
        # A softmax ignores the biases of keys.
        of_tower = [key for key in first if _TOWER in key and "k_proj.bias" not in key]
        assert of_tower
        assert [key for key in of_tower if np.array_equal(first[key], last[key])] == []

    def test_the_trained_policy_is_one_file(self, several, one_device):
        assert_one_file_of_weights(several / "final", one_device / "final")


@pytest.mark.heavy
class TestMoreRuns(TestRuns):
    topologies: ClassVar = {
        "pp2 dp2": (4, [COLOCATED, PP2, DP2, encoder_mp(4)]),
        "sequence parallelism": (4, [COLOCATED, PP2, *SP]),
        "sharding": (4, [COLOCATED, PP2, "parallel.sharding_degree=2", encoder_mp(2), STATE]),
    }

    def test_a_plain_run_continues_colocated(self, run_file, one_device, tmp_path):
        size, layout = self.topologies["pp2 dp2"]
        settings = [*common(run_file, num_data_parts(layout)), *layout]
        shutil.copytree(one_device / "checkpoint-2", tmp_path / "checkpoint-2")
        launch(train, size, arguments=(run_file, tmp_path, [*settings, RESUME]))
        wanted = arrays_of(one_device / "checkpoint-4")
        assert_close(arrays_of(tmp_path / "checkpoint-4"), wanted)


@pytest.mark.heavy
@pytest.mark.parametrize("name", VARIANTS)
def test_other_runs_equal_one_device(run_file, tmp_path, name):
    settings, layout = VARIANTS[name]
    settings = [*common(run_file), *settings]
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    train_stirred(str(run_file), one, settings)
    launch(train_stirred, 2, arguments=(str(run_file), two, [*settings, COLOCATED, *layout]))
    assert_equal_runs(Path(two), Path(one))


@pytest.mark.heavy
def test_dropout_draws_the_same_numbers_as_under_the_plain_schedule(run_file, tmp_path):
    settings = [*common(run_file), DROPOUT, PP2]
    plain, colocated = str(tmp_path / "plain"), str(tmp_path / "colocated")
    launch(train_stirred, 2, arguments=(str(run_file), plain, settings))
    launch(train_stirred, 2, arguments=(str(run_file), colocated, [*settings, COLOCATED]))
    assert_equal_runs(Path(colocated), Path(plain))
