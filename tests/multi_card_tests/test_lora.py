"""LoRA runs on several ranks, against one device.

Guarantees, under tensor and sequence parallelism (two ranks share a key head), in a pipeline, and
with sharded parameters:

- loss, gradient norm, every factor of every adapter, every fully trained module and every optimizer
  state after four steps equal one device's;
- the adapters are saved as one PEFT file under every topology, and one rank continues from it;
- dropout masks agree on the ranks of a tensor-parallel group if their inputs are replicated, and
  differ if the inputs are sharded.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.qwen3_vl.processor_fit import model_config
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run
from tests.support.finished_runs import assert_close
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY

TOPOLOGIES = {
    "mp2 with sequence parallelism": [
        "parallel.mp_degree=2", "parallel.sequence_parallel=true", "data.pad_to_multiple_of=2",
        "train.recompute=full",
    ],
    "pp2": ["parallel.pp_degree=2"],
    "sharding2 stage 1": ["parallel.sharding_degree=2"],
    "sharding2 stage 3": ["parallel.sharding_degree=2", "parallel.sharding_stage=3"],
}  # fmt: skip


def train(run_file: str, output_dir: str, overrides: list[str]) -> None:
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None


def worker(run_file: str, output_dir: str, overrides: list[str]) -> dict[str, np.ndarray]:
    """A full run; with tensor parallelism, also what dropout keeps of each kind of input."""
    train(run_file, output_dir, overrides)
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    if group.nranks == 1:
        return {}
    placement = FleetPlacement(group)
    tower = placement.layers.tower(Linear(32, 32, bias=True))
    layers = {
        "whole rows": placement.layers.column_linear(32, 64),
        "own features": placement.layers.row_linear(64, 32),
        "own images": tower,
    }
    kept = {}
    for name, layer in layers.items():
        placement.layers.add_low_rank(layer, LowRankSettings(32, 1.0, dropout=0.5))
        layer.lora.A.set_value(np.eye(32, dtype=np.float32))
        layer.lora.B.set_value(np.eye(32, dtype=np.float32))
        kept[name] = layer.lora(paddle.ones([4, 32])).numpy()
    return kept


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run"), num_samples=16)


@pytest.fixture(scope="module")
def common(run_file) -> list[str]:
    """Settings of a run that adapts every linear of a base model with an untied head."""
    processor = Qwen3VLProcessor.from_pretrained(run_file.with_name("processor"))
    form: Qwen3VLConfig = model_config(MODEL | {"tie_word_embeddings": False}, processor)
    base = run_file.with_name("base")
    Qwen3VLForConditionalGeneration.from_config(form).save_pretrained(base)
    return [
        "model.config=null",
        f"model.pretrained={base}",
        "model.lora={r: 2, lora_alpha: 6, target_modules: [all-linear, lm_head]}",
        "model.lora.modules_to_save=[mergers, model.language_model.norm]",
        "train.part_learning_rates={vision: 0.02, mergers: 0.005}",
        "train.save_steps=2",
        "train.adam_epsilon=1e-2",
        "train.weight_decay=0.1",
        "train.gradient_accumulation_steps=2",
    ]


def settings(num_data_parts: int) -> list[str]:
    return [f"train.per_device_train_batch_size={4 // num_data_parts}"]


@pytest.fixture(scope="module")
def one_device(run_file, common, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), str(output_dir), [*common, *settings(1)])
    return output_dir


@pytest.fixture(scope="module")
def dropout_of_ranks() -> dict[str, list[dict[str, np.ndarray]]]:
    """Results of the workers by topology."""
    return {}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def several(request, run_file, common, tmp_path_factory, dropout_of_ranks) -> Path:
    output_dir = tmp_path_factory.mktemp("several") / "out"
    parts = 2 if "sharding" in request.param else 1
    overrides = [*common, *settings(parts), *TOPOLOGIES[request.param]]
    kept = launch(worker, 2, arguments=(str(run_file), str(output_dir), overrides))
    dropout_of_ranks[request.param] = kept
    return output_dir


def arrays_of(checkpoint: Path) -> dict[str, np.ndarray]:
    stored = read_checkpoint_headers(checkpoint, "optimizer")
    arrays = {name: tensor.read() for name, tensor in stored.items()}
    return arrays | load_file(checkpoint / "adapter_model.safetensors")


def test_every_step_and_every_adapter_equal_one_device(several, one_device):
    found, wanted = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (several, one_device)
    )
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for line, expected in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm", "learning_rate/vision"):
            assert line[key] == pytest.approx(expected[key], rel=TOPOLOGY), (line["step"], key)
    for name in ("checkpoint-2", "checkpoint-4"):
        assert_close(arrays_of(several / name), arrays_of(one_device / name))


def test_dropout_draws_the_same_where_the_input_is_the_same(several, dropout_of_ranks):
    for first, second in (kept for kept in dropout_of_ranks.values() if kept[0]):
        for name, values in first.items():
            assert set(np.unique(values)) == {0.0, 2.0}
            assert (values == second[name]).all() == (name == "whole rows"), name


def test_every_factor_was_trained(one_device):
    """Otherwise the comparison above would compare zeros."""
    for key, array in load_file(one_device / "final" / "adapter_model.safetensors").items():
        if key.endswith("lora_B.weight"):
            assert np.abs(array).max() > 0, key


def test_the_adapter_is_one_file_and_says_where_it_belongs(several, one_device):
    configs = [
        json.loads((folder / "final" / "adapter_config.json").read_text())
        for folder in (several, one_device)
    ]
    assert configs[0] == configs[1]
    assert not list((several / "final").glob("model*"))


def test_one_process_continues_what_several_saved(several, one_device, run_file, common, tmp_path):
    shutil.copytree(several / "checkpoint-2", tmp_path / "checkpoint-2")
    overrides = [*common, *settings(1), "train.resume_from_checkpoint=auto"]
    train(str(run_file), str(tmp_path), overrides)
    assert_close(arrays_of(tmp_path / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))
