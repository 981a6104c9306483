"""Training runs with experts, against the same run file on one device.

Guarantees: the load-balancing loss travels through a pipeline. Besides (heavy), with experts over
several axes, on batches of different lengths, with and without images: loss, auxiliary loss,
gradient norm, tokens per expert and every parameter after four optimizer steps are equal; a resumed
run is bit-identical, and a checkpoint continues where experts lie elsewhere.

`test_expert_sharding` has the steps of every way in which experts fold, `tests/routes` runs on two
ranks.
"""

from pathlib import Path

import paddle.distributed as dist
import pytest

from tests.multi_card_tests.test_training import MODEL, common
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import arrays_of, assert_close, assert_equal_runs
from tests.support.launch import launch
from tests.support.topology_runs import (
    CP,
    SHARDING,
    SP,
    STAGE_3,
    EqualsOneDevice,
    batch_settings,
    continue_run,
    num_data_parts,
    train,
    write_mixed_run,
)

EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "mlp_only_layers": [1], "num_hidden_layers": 3,
}  # fmt: skip
MOE = MODEL | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODEL["text_config"] | EXPERTS,
}
EP2, EP4 = "parallel.ep_degree=2", "parallel.ep_degree=4"
MP2, SHARDING_4 = ("parallel.mp_degree=2", *SP), "parallel.sharding_degree=4"
OVERLAPS = (
    "parallel.fleet.sharding_configs={comm_overlap: true}",
    "parallel.sharding_gather_overlap=true",
)
FULL = "train.recompute=full"
FOLDED = [*MP2, *SHARDING, EP2]
TOPOLOGIES = {
    # Experts over mp ranks, sharded over two ranks; reductions and gathers overlap, as on GPUs.
    "mp2 sharding2 ep2 stage 1": (4, [*FOLDED, *OVERLAPS]),
    "cp2 mp2 ep4": (4, [*MP2, *CP[:-1], EP4, "data.pad_to_multiple_of=4"]),
    "sharding4 ep2 stage 3": (4, [SHARDING_4, EP2, STAGE_3, FULL]),
    "sharding2 ep2 pp2": (4, [*SHARDING, EP2, "parallel.pp_degree=2", FULL, *OVERLAPS]),
}


@pytest.mark.heavy
class TestExpertParallel(EqualsOneDevice):
    topologies = TOPOLOGIES

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        return write_mixed_run(tmp_path_factory.mktemp("run"), 24, MOE)

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *batch_settings(num_data_parts)]


def test_the_load_balancing_loss_travels_through_a_pipeline(tmp_path):
    """Micro-batches, and so the loss of each, are the same as on one device."""
    model = MOE | {
        "text_config": MOE["text_config"]
        | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    }
    run_file = write_tiny_run(tmp_path / "run", num_samples=24, model=model)
    one, two = tmp_path / "one", tmp_path / "two"
    train(str(run_file), str(one), [*common(run_file), *batch_settings(1)])
    overrides = [*common(run_file), *batch_settings(1), "parallel.pp_degree=2"]
    launch(train, 2, arguments=(str(run_file), str(two), overrides))
    assert_equal_runs(two, one)


def train_and_move(run_file: str, output_dir: str, settings: list[list[str]]) -> None:
    """A run, whose checkpoint of step 2 continues under another topology."""
    train(run_file, f"{output_dir}/one", settings[0])
    dist.barrier()
    continue_run(run_file, f"{output_dir}/one", f"{output_dir}/two", settings[1])


@pytest.mark.heavy
def test_a_checkpoint_continues_where_experts_lie_elsewhere(tmp_path):
    """Steps 3 and 4 as of the run that goes on where it began."""
    run_file = write_mixed_run(tmp_path / "run", 24, MOE)
    topologies = [SHARDING_4, EP4, STAGE_3], FOLDED
    settings = [[*common(run_file), *batch_settings(num_data_parts(of)), *of] for of in topologies]
    launch(train_and_move, 4, arguments=(str(run_file), str(tmp_path), settings), timeout=500)
    found, wanted = (arrays_of(tmp_path / name / "checkpoint-4") for name in ("two", "one"))
    assert_close(found, wanted)
