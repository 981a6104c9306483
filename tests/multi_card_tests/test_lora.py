"""Adapters on several ranks.

Guarantees: dropout masks agree on the ranks of a tensor-parallel group if their inputs are
replicated, and differ if the inputs are sharded. Besides (heavy), for DoRA with a language model
that is frozen at first and rates by layer, under tensor and sequence parallelism (two ranks share a
key head) and in a pipeline, whose last stage has nothing to train at first: loss, gradient norm,
every factor of every adapter, every fully trained module and every optimizer state after four steps
equal one device's, and a resumed run is bit-identical; the adapters are one PEFT file.
"""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run
from tests.support.finished_runs import assert_close, metrics_of
from tests.support.launch import launch
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import (
    DAMPED,
    PP,
    SP,
    EqualsOneDevice,
    batch_settings,
)

TOPOLOGIES = {
    "mp2 with sequence parallelism": (2, [
        *("parallel.mp_degree=2", *SP, "train.recompute=mlp"),
        "parallel.fleet.mp_configs={sp_async_reduce_scatter: true}",
    ]),
    "pp2": (2, PP),
}  # fmt: skip


def kept_by_dropout() -> dict[str, np.ndarray]:
    """What dropout keeps of each kind of input, on two tensor-parallel ranks."""
    group = initialize(ParallelDegrees(mp_degree=2)).mp_group
    placement = FleetPlacement(group)
    paddle.seed(1)
    seed_split_random([1], group.rank)
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


def test_dropout_draws_the_same_where_the_input_is_the_same():
    first, second = launch(kept_by_dropout, 2)
    for name, values in first.items():
        assert set(np.unique(values)) == {0.0, 2.0}
        assert (values == second[name]).all() == (name == "whole rows"), name


@pytest.mark.heavy
class TestDoRA(EqualsOneDevice):
    topologies = TOPOLOGIES

    @pytest.fixture(scope="class")
    @classmethod
    def run_file(cls, tmp_path_factory) -> Path:
        """A run beside its base model, whose head is untied."""
        run_file = write_tiny_run(tmp_path_factory.mktemp("run"), num_samples=16)
        processor = Qwen3VLProcessor.from_pretrained(run_file.with_name("processor"))
        form: Qwen3VLConfig = model_config(
            Qwen3VLConfig, MODEL | {"tie_word_embeddings": False}, processor
        )
        base = Qwen3VLForConditionalGeneration.from_config(form)
        base.save_pretrained(run_file.with_name("base"))
        return run_file

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        """Those of a run that adapts every linear of the base model."""
        return [
            *("model.config=null", f"model.pretrained={run_file.with_name('base')}"),
            "model.lora={r: 2, lora_alpha: 6, target_modules: [all-linear, lm_head]}",
            "model.lora.modules_to_save=[mergers, model.language_model.norm]",
            "train.part_learning_rates={vision: 0.02, mergers: 0.005}",
            *("model.lora.use_dora=true", "train.layer_decay={vision: 0.9, language: 0.8}"),
            "train.unfreeze=[{at: 2, patterns: [language]}]",
            *("train.save_steps=2", "train.gradient_accumulation_steps=2", *DAMPED),
            *batch_settings(num_data_parts),
        ]

    @classmethod
    def arrays_of(cls, checkpoint: Path) -> dict[str, np.ndarray]:
        stored = read_checkpoint_headers(checkpoint, "optimizer")
        arrays = {name: tensor.read() for name, tensor in stored.items()}
        return arrays | load_file(checkpoint / "adapter_model.safetensors")

    def test_every_step_and_every_parameter_equal_one_device(self, several, one_device):
        found, wanted = metrics_of(several), metrics_of(one_device)
        assert [line["step"] for line in found] == [line["step"] for line in wanted]
        for line, expected in zip(found, wanted, strict=True):
            for key in ("loss", "grad_norm", "learning_rate/vision"):
                assert line[key] == pytest.approx(expected[key], rel=TOPOLOGY), (line["step"], key)
        for name in ("checkpoint-2", "checkpoint-4"):
            assert_close(self.arrays_of(several / name), self.arrays_of(one_device / name))

    def test_every_factor_was_trained(self, one_device):
        """Otherwise the comparison above would compare zeros."""
        for key, array in load_file(one_device / "final" / "adapter_model.safetensors").items():
            if key.endswith("lora_B.weight"):
                assert np.abs(array).max() > 0, key

    def test_the_adapter_is_one_file_and_says_where_it_belongs(self, several, one_device):
        configs = [
            json.loads((folder / "final" / "adapter_config.json").read_text())
            for folder in (several, one_device)
        ]
        assert configs[0] == configs[1]
        assert not list((several / "final").glob("model*"))
