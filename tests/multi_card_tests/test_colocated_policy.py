"""Training runs of pi07's policy and planner under the colocated schedule, against one device.

Guarantees, with more and fewer encoder lanes than data lanes, the tower whole and divided, on
samples with every kind of drop, in both ways of agreeing on optional inputs: both losses, gradient
norm, evaluation losses and every parameter and moment after four optimizer steps are equal; a
resumed run is bit-identical; so it is with a frozen tower, whose images are encoded a step ahead.
"""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import MODEL, PLANNER, write_tiny_policy_run
from tests.support.finished_runs import arrays_of, assert_equal_runs
from tests.support.launch import launch

# Four heads, which four ranks divide.
TOWER = {"hidden_size": 32, "num_attention_heads": 4}
COLOCATED, PP2 = "parallel.schedule=colocated", "parallel.pp_degree=2"
DP2, SHARDING2 = "parallel.dp_degree=2", "parallel.sharding_degree=2"
SP = ("parallel.mp_degree=2", "parallel.sequence_parallel=true")
HOISTED = "parallel.branch_sync=hoisted"
FROZEN = "model.freeze=['model.gemma3_with_expert.gemma3.model.vision_tower.*']"


def encoder_mp(degree: int) -> str:
    return f"parallel.encoder.mp_degree={degree}"


def with_tower(model: dict) -> dict:
    model = deepcopy(model)
    model["vlm_config"]["gemma3_config"]["vision_config"].update(TOWER)
    return model


# World size -> name -> settings of the run, layout.
RUNS = {
    2: {
        "fan-in": ([], [PP2, "train.recompute=full"]),
        "divided tower": ([HOISTED], [PP2, encoder_mp(2)]),
        "frozen tower": ([HOISTED, FROZEN], [PP2]),
        "planner": ([f"model.config={json.dumps(with_tower(PLANNER))}"], [PP2, encoder_mp(2)]),
    },
    4: {
        "fan-in": ([], [PP2, DP2]),
        "fan-out": ([], [PP2, DP2, encoder_mp(4)]),
        "sequence parallelism": ([], [PP2, *SP]),
        "sharding": ([], [PP2, SHARDING2, encoder_mp(2), "parallel.encoder.sharding_stage=1"]),
    },
}


def train(run_file: str, output_dir: Path, overrides: list[str]) -> None:
    # One launch runs several layouts; without this, fleet keeps the first one's strategy.
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None


def worker(run_file: str, folder: str, runs: dict[str, list[str]]) -> None:
    """Every run, and the last of them from its checkpoint of step 2."""
    for name, overrides in runs.items():
        train(run_file, Path(folder) / name, overrides)
    dist.barrier()
    resumed = Path(folder) / f"{name}-resumed"
    if dist.get_rank() == 0:
        shutil.copytree(Path(folder) / name / "checkpoint-2", resumed / "checkpoint-2")
    dist.barrier()
    train(run_file, resumed, [*overrides, "train.resume_from_checkpoint=auto"])


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.heavy)], ids="{} ranks".format
)
def folders(request, tmp_path_factory) -> tuple[Path, Path, list[str]]:
    """Folders of the runs on one device and on several ranks, and the names of the runs."""
    folder = tmp_path_factory.mktemp("run")
    run_file = write_tiny_policy_run(folder, 40, vlm_config=with_tower(MODEL)["vlm_config"])
    drops = "data.drops={subgoal_drop_prob: 0.7, response_drop_prob: 0.5, metadata_drop_all_prob: "
    common = [
        f"data.eval=[{folder / 'arm-joint.jsonl'}]",
        f"{drops}0.5, history_state_drop_prob: 0.3}}",
        *("parallel.branch_sync=all_reduce", "train.save_steps=2", "train.eval_steps=2"),
        # Adam divides a gradient by its size; this epsilon damps the noise of entries near zero.
        *("train.adam_epsilon=1e-2", "train.weight_decay=0.1"),
        *("train.per_device_eval_batch_size=1", "train.gradient_accumulation_steps=2"),
    ]
    one, several, every = folder / "one", folder / "several", {}
    for name, (settings, layout) in RUNS[request.param].items():
        size = 2 if {DP2, SHARDING2} & set(layout) else 4
        full = [*common, *settings]
        train(str(run_file), one / name, [*full, "train.per_device_train_batch_size=4"])
        size_of_rank = f"train.per_device_train_batch_size={size}"
        every[name] = [*full, size_of_rank, COLOCATED, *layout]
    launch(worker, request.param, arguments=(str(run_file), str(several), every), timeout=400)
    return one, several, list(every)


def test_every_step_and_every_parameter_equal_one_device(folders):
    one, several, names = folders
    for name in names:
        assert_equal_runs(several / name, one / name)


def test_a_resumed_run_is_bit_identical(folders):
    _, several, names = folders
    found = arrays_of(several / f"{names[-1]}-resumed" / "checkpoint-4")
    for key, array in arrays_of(several / names[-1] / "checkpoint-4").items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
