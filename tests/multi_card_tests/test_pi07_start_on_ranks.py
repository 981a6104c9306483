"""A pi07 policy from a folder of Gemma 3 on several ranks.

Guarantees: with parameters sharded, tensor parallelism and a pipeline, a run begins with the
weights of one device bit for bit, those of the folder and those that are drawn.
"""

from pathlib import Path

import pytest
import yaml

from paddle_vl.checkpoint.safetensors_io import read_header
from tests.single_card_tests.families.pi07.test_pi07_start import HUB
from tests.single_card_tests.train.tiny_policy_run import MODEL, write_tiny_policy_run
from tests.support.launch import launch
from tests.support.pi07_golden import character_tokenizer
from tests.support.topology_runs import train

TOPOLOGIES = {
    "sharding2 stage 3": ["parallel.sharding_degree=2", "parallel.sharding_stage=3"],
    "mp2": ["parallel.mp_degree=2"],
    "pp2": ["parallel.pp_degree=2"],
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    file = write_tiny_policy_run(tmp_path_factory.mktemp("run"))
    character_tokenizer().save_pretrained(file.parent / "processor")
    settings = yaml.safe_load(file.read_text())
    expert = {"hidden_size": 16, "intermediate_size": 32, "adarms_cond_dim": 16, "vocab_size": 8}
    config = MODEL | {"vlm_config": {"gemma_expert_config": expert}}
    settings["model"] = {"pretrained": str(HUB), "config": config}
    settings["train"] |= {"max_steps": 1, "learning_rate": 0.0, "warmup_steps": 0}
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> dict[str, bytes]:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(run_file, output_dir, [])
    return saved(output_dir)


def saved(output_dir: Path) -> dict[str, bytes]:
    return {
        key: tensor.read().tobytes()
        for key, tensor in read_header(output_dir / "final" / "model.safetensors").items()
    }


def worker(run_file: str, output_dir: str, overrides: list[str]) -> None:
    train(run_file, output_dir, overrides)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_begin_with_the_weights_of_one_device(topology, run_file, one_device, tmp_path):
    launch(worker, 2, arguments=(str(run_file), str(tmp_path / "out"), TOPOLOGIES[topology]))
    assert saved(tmp_path / "out") == one_device
