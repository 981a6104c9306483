"""Memory of a model, counted per rank before it is materialized, and refused beyond the machine."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.cli.main import main
from paddle_vl.config.parallel_settings import EncoderConfig, ParallelConfig
from paddle_vl.families.vlm.settings import VLParallelConfig
from paddle_vl.nn.linear import default_dtype
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology
from paddle_vl.train import memory_needed
from paddle_vl.train.build import needed_memory
from paddle_vl.train.memory_needed import GB, NeededMemory, available_memory, check_memory
from tests.single_card_tests.train.tiny_run import write_tiny_run

STAGE_3: dict = {"sharding_degree": 2, "sharding_stage": 3}


def parameters(dtype: str = "float32") -> list[paddle.Tensor]:
    trained, frozen = paddle.zeros([10, 10], dtype), paddle.zeros([100, 3], dtype)
    trained.stop_gradient = False
    return [trained, frozen]


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        ("float32", {}, (1600, 400, 800)),
        ("bfloat16", {}, (800, 200, 1200)),
        ("float32", {"sharding_degree": 2}, (1600, 400, 400)),
        ("float32", {"sharding_degree": 2, "sharding_stage": 2}, (1600, 200, 400)),
        ("float32", {"sharding_degree": 2, "sharding_stage": 3}, (800, 200, 400)),
        # What a step keeps whole.
        ("float32", {**STAGE_3, "reshard_after_forward": False}, (1600, 200, 400)),
        (
            "float32", {**STAGE_3, "sharding_stage": 2, "reduce_once_per_step": True},
            (1600, 400, 400),
        ),
    ],
)  # fmt: skip
def test_what_is_held_is_counted_as_it_is_divided(dtype, settings, expected):
    needed = NeededMemory.of(parameters(dtype), ParallelConfig(**settings))
    assert (needed.weights, needed.gradients, needed.optimizer) == expected
    assert (needed.parameters, needed.total) == (400, sum(expected))


@pytest.mark.parametrize(("stage", "state"), [(0, 800), (1, 200)])
def test_a_colocated_encoder_is_whole_on_every_rank_but_for_its_state(stage, state):
    # The language model's sharding does not divide the encoder.
    parallel = ParallelConfig(
        sharding_degree=2, schedule="colocated", encoder=EncoderConfig(sharding_stage=stage)
    )
    encoder = NeededMemory.of(parameters(), parallel, encoder_lanes=4)
    assert (encoder.weights, encoder.gradients, encoder.optimizer) == (1600, 400, state)
    both = NeededMemory.of(parameters(), parallel) + encoder
    assert (both.parameters, both.weights, both.optimizer) == (800, 3200, 400 + state)


def test_the_limit_is_what_the_machine_has():
    have, _ = available_memory()
    check_memory(NeededMemory(1, have / 2, have / 4, have / 4))
    with pytest.raises(ValueError, match=r"1 parameters .* need .* GB .*machine has .* GB"):
        check_memory(NeededMemory(1, have, 1, 1))


def test_a_model_beyond_the_machine_is_refused_at_once(tmp_path, capsys):
    file = write_tiny_run(tmp_path / "run")
    sizes = {"hidden_size": 65536, "intermediate_size": 1000000, "num_hidden_layers": 1000}
    settings = [f"model.config.text_config.{name}={size}" for name, size in sizes.items()]
    settings.append("model.config.vision_config.out_hidden_size=65536")
    begin = time.monotonic()
    assert main(["train", str(file), *settings]) == 1
    assert time.monotonic() - begin < 60
    message = capsys.readouterr().err
    assert "GB before any activation" in message
    assert "choose a smaller model" in message


@pytest.mark.parametrize(
    ("size", "num_ranks"), [("qwen3-vl-30b-a3b", 8), ("qwen3-vl-235b-a22b", 64)]
)
def test_mixtures_of_experts_fit_gpus_of_80_gb(size, num_ranks, monkeypatch):
    """Rows of docs/gpu.md, by shapes alone: experts folded over all ranks, the rest at stage 3."""
    degrees = {"sharding_degree": num_ranks, "sharding_stage": 3, "ep_degree": num_ranks}
    topology = Topology.single(ParallelDegrees(**degrees))
    one, ep = (SimpleNamespace(rank=0, nranks=ranks) for ranks in (1, num_ranks))
    with default_dtype("bfloat16"):
        model = Qwen3VLForConditionalGeneration.from_config(
            Qwen3VLConfig.named(size), FleetPlacement(one, ep_group=ep), materialize=False
        )
    config: Any = SimpleNamespace(parallel=VLParallelConfig(**degrees))
    needed = needed_memory(config, topology, model)
    monkeypatch.setattr(memory_needed, "available_memory", lambda: (80 * GB, "a GPU"))
    check_memory(needed)
    row = f"| {size} | {num_ranks} | {needed.total / GB:.1f} |"
    assert row in Path("docs/gpu.md").read_text(encoding="utf-8"), row
