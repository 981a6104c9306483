"""Full training runs of a pi07 policy on several ranks. `tests/routes` has more on two.

Guarantees, on data ranks and (heavy) over mixes of tensor and sequence parallelism, sharding and a
pipeline: both losses, gradient norm, evaluation losses and every parameter and moment after four
optimizer steps equal one device's, on samples with every kind of drop, with the tower trained; so
do the moving average of the weights, evaluated and in `final/`, and the errors of actions, which a
pipeline cannot sample. Besides (heavy): a resumed run is bit-identical; `final/` has its weights in
one file, where ranks divide those of a checkpoint. The same holds for low-rank adapters on both
streams with all else trained in full, for virtual stages and dualpipev, and for a planner whose
ends are on one rank, which shares the token table.

A sample's loss depends on the optional inputs of the other samples in its batch. Under
`branch_sync: all_reduce` these are all samples of a global micro-batch, and the reference is one
device with the full micro-batch. Under `hoisted` they are the rank's own samples, and the reference
is one device that runs the ranks' shards one by one.
"""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers, read_header
from tests.single_card_tests.train.tiny_policy_run import MODEL, PLANNER, write_tiny_policy_run
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_equal_runs,
    assert_one_file_of_weights,
    metrics_of,
)
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    GLOBAL_BATCH,
    EqualsOneDevice,
    num_data_parts,
    train,
    train_and_resume,
)

SP = "parallel.sequence_parallel=true"
SHARDING, PP = "parallel.sharding_degree=2", "parallel.pp_degree=2"
TOPOLOGIES = {
    "sharding2 mp2": (4, [SHARDING, "parallel.sharding_stage=3", "parallel.mp_degree=2", SP]),
    "pp2 mp2": (4, [PP, "parallel.mp_degree=2", SP, "train.recompute=attention"]),
    "pp2 sharding2 stage 1": (4, [PP, SHARDING]),
}


def worker(
    run_file: str, output_dir: str, overrides: list[str], hoisted: list[str], lora: list[str]
) -> None:
    """A full run; one that continues its checkpoint of step 2; one in which each rank lays out the
    inputs of its own samples; one of adapters."""
    train_and_resume(run_file, output_dir, overrides)
    train(run_file, f"{output_dir}-hoisted", [*overrides, *hoisted])
    if lora:
        train(run_file, f"{output_dir}-lora", [*overrides, *lora])


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """A run beside a base policy for adapters."""
    path = write_tiny_policy_run(tmp_path_factory.mktemp("run"), num_samples=40)
    base = path.with_name("of_base")
    train(path, base, ["train.max_steps=1", "train.learning_rate=0.0"])
    (base / "final").rename(path.with_name("base"))
    return path


def common(run_file: Path) -> list[str]:
    lines = run_file.with_name("arm-joint.jsonl").read_text().splitlines(keepends=True)
    # With an odd number one of two data ranks has none left while the other evaluates.
    run_file.with_name("few.jsonl").write_text("".join(lines[:5]))
    drops = "data.drops={subgoal_drop_prob: 0.7, response_drop_prob: 0.5, metadata_drop_all_prob: "
    return [
        f"data.eval=[{run_file.with_name('few.jsonl')}]",
        f"{drops}0.5, history_state_drop_prob: 0.3}}",
        "parallel.branch_sync=all_reduce",
        "data.action_groups={gripper: [2, 3]}",
        "train.ema={decay: 0.9}",
        "train.save_steps=2",
        "train.eval_steps=2",
        *DAMPED,
        "train.per_device_eval_batch_size=1",
    ]


def batches(samples: int, accumulation: int) -> list[str]:
    return [
        f"train.per_device_train_batch_size={samples}",
        f"train.gradient_accumulation_steps={accumulation}",
    ]


def hoisted(num_data_parts: int) -> list[str]:
    return ["parallel.branch_sync=hoisted", *batches(1, 2 * GLOBAL_BATCH // num_data_parts)]


def adapters(run_file: Path) -> list[str]:
    base = run_file.with_name("base")
    return ["model.config=null", f"model.pretrained={base}", "model.lora=openpi", "train.ema=null"]


def test_errors_of_actions_and_averages_are_those_of_one_device(run_file, tmp_path):
    """Of two data ranks, of which one has no sample left while the other evaluates."""
    settings = common(run_file)
    train(run_file, tmp_path / "one", [*settings, *batches(GLOBAL_BATCH, 2)])
    several = [*settings, *batches(GLOBAL_BATCH // 2, 2), "parallel.dp_degree=2"]
    launch(train, 2, arguments=(str(run_file), str(tmp_path / "two"), several))
    assert "eval_action_mae/gripper" in metrics_of(tmp_path / "one")[-1]
    assert_equal_runs(tmp_path / "two", tmp_path / "one")


@pytest.mark.heavy
class TestPolicy(EqualsOneDevice):
    topologies = TOPOLOGIES

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *batches(GLOBAL_BATCH // num_data_parts, 2)]

    @classmethod
    def launch(cls, num_ranks, run_file, output_dir, overrides):
        own = hoisted(num_data_parts(overrides))
        lora = adapters(run_file) if "train.recompute" in " ".join(overrides) else []
        arguments = (str(run_file), str(output_dir), overrides, own, lora)
        launch(worker, num_ranks, arguments=arguments, timeout=300)

    @staticmethod
    def lacking(several: Path) -> str:
        """Metrics that the topology lacks: stages of a pipeline sample no actions."""
        is_pipeline = "pp_degree: 2" in (several / "config.yaml").read_text()
        return "eval_action_" if is_pipeline else "-"

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        assert_equal_runs(several, one_device, lacking=self.lacking(several))

    @pytest.fixture(scope="class")
    @classmethod
    def one_device_with_adapters(cls, run_file, tmp_path_factory) -> Path:
        output_dir = tmp_path_factory.mktemp("lora") / "out"
        train(run_file, output_dir, [*cls.settings(run_file, 1), *adapters(run_file)])
        return output_dir

    def test_adapters_equal_one_device(self, one_device_with_adapters, several):
        found, wanted = Path(f"{several}-lora"), one_device_with_adapters
        if not found.is_dir():
            return
        for file in ("checkpoint-4/adapter_model.safetensors", "final/model.safetensors"):
            assert_close(load_file(found / file), load_file(wanted / file))
        states = (read_checkpoint_headers(f / "checkpoint-4", "optimizer") for f in (found, wanted))
        assert_close(*({name: t.read() for name, t in state.items()} for state in states))
        configs = [f / "checkpoint-4" / "adapter_config.json" for f in (found, wanted)]
        assert configs[0].read_text() == configs[1].read_text()

    @pytest.fixture(scope="class")
    @classmethod
    def one_by_one(cls, run_file, tmp_path_factory) -> Path:
        output_dir = tmp_path_factory.mktemp("parts") / "out"
        train(run_file, output_dir, [*common(run_file), *hoisted(1)])
        return output_dir

    def test_ranks_that_lay_out_their_own_equal_one_device_part_by_part(self, several, one_by_one):
        lacking = self.lacking(several)
        assert_equal_runs(Path(f"{several}-hoisted"), one_by_one, lacking=lacking)

    def test_every_tensor_is_in_one_file(self, several):
        files = (several / "checkpoint-4").glob("model*.safetensors")
        names = [name for file in files for name in read_header(file)]
        assert len(names) == len(set(names))

    def test_the_trained_policy_is_one_file(self, several, one_device):
        assert_one_file_of_weights(several / "final", one_device / "final")


# Virtual stages, on micro-batches of different lengths.
PP3 = ("parallel.pp_degree=3", "parallel.num_virtual_stages=2")
OPEN = {"knowledge_insulation": False}
# The prefix is not trained, so its rows need no gradient in the later stages.
FLOW_ALONE = ["train.loss_weighting={CE: 0.0}"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("processes", "overrides", "losses", "model"),
    [
        (3, [*PP3, "train.recompute=full"], [], OPEN),
        (2, [PP, "parallel.pp_schedule=dualpipev"], [], OPEN),
        (4, ["parallel.pp_degree=4"], FLOW_ALONE, {"freeze_vision_encoder": True}),
    ],
)
def test_longer_pipelines_equal_one_device(processes, overrides, losses, model, tmp_path):
    vlm = deepcopy(MODEL["vlm_config"])
    for decoder in (vlm["gemma3_config"]["text_config"], vlm["gemma_expert_config"]):
        # With more layers, norms of small rows amplify the gradients of this small model.
        decoder.update(num_hidden_layers=6, rms_norm_eps=1e-2)
    run_file = str(write_tiny_policy_run(tmp_path, 40, vlm_config=vlm, **model))
    settings = [*common(Path(run_file)), *batches(1, 6), *losses]
    assert_pipeline_equals_one_device(run_file, tmp_path, settings, overrides, processes)


@pytest.mark.heavy
def test_a_planner_whose_ends_are_on_one_process_equals_one_device(run_file, tmp_path):
    planner = deepcopy(PLANNER)
    text = planner["vlm_config"]["gemma3_config"]["text_config"]
    text.update(num_hidden_layers=4, rms_norm_eps=1e-2)
    settings = [*common(run_file), *batches(2, 4), f"model.config={json.dumps(planner)}"]
    overrides = [PP, "parallel.pp_schedule=dualpipev"]
    assert_pipeline_equals_one_device(str(run_file), tmp_path, settings, overrides)


@pytest.mark.heavy
def test_what_stages_drop_depends_on_the_seed_alone(tmp_path):
    run_file = write_tiny_policy_run(tmp_path, 40, dropout=0.2)
    overrides = [*common(run_file), *batches(2, 2), PP, "parallel.mp_degree=2", SP]
    overrides += ["train.recompute=full"]
    launch(worker, 4, arguments=(str(run_file), str(tmp_path / "one"), overrides, [], []))
    wanted = arrays_of(tmp_path / "one" / "checkpoint-4")
    for other in ("one-resumed", "one-hoisted"):
        found = arrays_of(tmp_path / other / "checkpoint-4")
        for key, array in wanted.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)


def assert_pipeline_equals_one_device(
    run_file: str, folder: Path, settings: list[str], overrides: list[str], processes: int = 2
) -> None:
    settings = [*settings, "data.action_errors=false"]
    train(run_file, str(folder / "one"), settings)
    arguments = (run_file, str(folder / "several"), [*settings, *overrides])
    launch(train, processes, arguments=arguments)
    assert_equal_runs(folder / "several", folder / "one")
