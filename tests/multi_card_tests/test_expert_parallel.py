"""Training runs with expert parallelism, against the same run file on one device.

Guarantees, on batches of different lengths, with and without images: loss, auxiliary loss, gradient
norm, tokens per expert and every parameter after four optimizer steps equal one device's; a resumed
run is bit-identical; checkpoints hold all experts, and one rank continues from them.
"""

from pathlib import Path

import pytest

from tests.multi_card_tests.test_training import MODEL, common
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import arrays_of, assert_equal_runs
from tests.support.launch import launch
from tests.support.topology_runs import (
    SHARDING,
    SP,
    EqualsOneDevice,
    batch_settings,
    train,
    write_mixed_run,
)

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "mlp_only_layers": [1], "num_hidden_layers": 3,
}  # fmt: skip
MOE = MODEL | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODEL["text_config"] | EXPERTS,
}
EP = ["parallel.dp_degree=2", "parallel.ep_degree=2"]
TOPOLOGIES = {"dp2 ep2": (2, [*EP, "train.recompute=mlp"])}
HEAVY = {
    "dp2 ep2 mp2 with sequence parallelism": (4, [*EP, "parallel.mp_degree=2", *SP]),
    "dp2 ep2 sharding2 stage 2": (4, [*EP, *SHARDING, "parallel.sharding_stage=2"]),
    "dp2 ep2 sharding2 stage 1": (4, [*EP, *SHARDING]),
    "dp2 ep2 pp2": (4, [*EP, "parallel.pp_degree=2", "train.recompute=full"]),
    "dp4 ep2": (4, ["parallel.dp_degree=4", "parallel.ep_degree=2"]),
}


class TestExpertParallel(EqualsOneDevice):
    topologies, heavy = TOPOLOGIES, HEAVY

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        return write_mixed_run(tmp_path_factory.mktemp("run"), 24, MOE)

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file), *batch_settings(num_data_parts)]

    def test_a_checkpoint_has_all_experts(self, several):
        arrays = arrays_of(several / "checkpoint-4")
        assert arrays["model.language_model.layers.0.mlp.experts.down_proj"].shape == (6, 8, 16)


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
