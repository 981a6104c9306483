"""Steps of a model with experts whose weights are sharded over groups of their own, on four ranks.

Guarantees, for every way in which experts fold over dp, sharding and mp, at every stage, with the
load-balancing loss: terms and norm of each step, and every parameter and optimizer state after the
last one, equal one device's; and a rank has 1 / (ep x ranks with the same experts) of their state.
"""

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.config.families import ModelShape
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.settings import VLParallelConfig
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.mesh import expert_shards
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing.qwen3_vl import EXPERTS, token_rows
from paddle_vl.train.layout import Layout
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import train_step
from tests.single_card_tests.train.batches import vl_runner
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.states import states_of
from tests.support.tiny import tiny_model
from tests.support.tolerance import TOPOLOGY

MODEL = EXPERTS | {"num_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 1.0}
SHAPE = ModelShape(4, 2, 64, 24, 3, 8, 8)
# Adam divides a gradient by its size; a large epsilon keeps rounding noise small.
TRAIN = TrainConfig(
    output_dir="unused", learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5, adam_epsilon=0.01
)
STEPS = 2
TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7], [9, 8, 7, 7], [2, 4, 6, 8, 1, 3, 5]]
SP, S2, S4 = (
    {"mp_degree": 2, "sequence_parallel": True},
    {"sharding_degree": 2},
    {"sharding_degree": 4},
)
STAGES = {n: {"sharding_stage": n} for n in (1, 2, 3)}
CASES = {
    **{f"sharding4 ep2 stage {n}": {**S4, "ep_degree": 2, **STAGES[n]} for n in STAGES},
    **{f"sharding4 ep4 stage {n}": {**S4, "ep_degree": 4, **STAGES[n]} for n in (1, 3)},
    **{f"mp2 sharding2 ep2 stage {n}": {**SP, **S2, "ep_degree": 2, **STAGES[n]} for n in STAGES},
    **{f"mp2 sharding2 ep4 stage {n}": {**SP, **S2, "ep_degree": 4, **STAGES[n]} for n in STAGES},
    **{
        f"dp2 sharding2 ep{ep} stage {n}": {"dp_degree": 2, **S2, "ep_degree": ep, **STAGES[n]}
        for ep, n in ((2, 1), (2, 3), (4, 1), (4, 2))
    },
    "dp2 mp2 ep2": {"dp_degree": 2, **SP, "ep_degree": 2},
    "dp2 mp2 ep4": {"dp_degree": 2, **SP, "ep_degree": 4},
    "dp4 ep2": {"dp_degree": 4, "ep_degree": 2},
    "mp4 ep2": {**SP, "mp_degree": 4, "ep_degree": 2},
}
# By default; the others are heavy.
FEW = ("sharding4 ep2 stage 1", "mp2 sharding2 ep4 stage 3")
OTHERS = tuple(name for name in CASES if name not in FEW)
# As on GPUs: flat buckets of the optimizer.
FLAT = ("sharding4 ep2 stage 2", "mp2 sharding2 ep4 stage 3", "mp4 ep2")


def batch(number: int) -> dict:
    """A text and padding, of a length of its own."""
    ids = token_rows(TEXTS[number], length=8 + 4 * (number % 2))
    mask = (ids != 0).astype(np.int64)
    labels = np.where(mask, ids, -100)
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels, "has_left_padding": False,
        "num_target_tokens": int((labels[:, 1:] != -100).sum()),
    }  # fmt: skip


class Run:
    """A model and its optimizer on one rank of a topology, and steps with four batches."""

    def __init__(self, folder: str, topology: Topology, parallel: VLParallelConfig):
        config: Any = SimpleNamespace(parallel=parallel, model=None)
        layout = Layout(config, topology, SHAPE, ([1, 1, 1], 0, 0), pad_to_multiple_of=4)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, placement=layout.placement(), materialize=False
        )
        for parameter in self.model.visual.parameters():
            parameter.stop_gradient = True
        self.table = self.model.placement.parameter_table
        self.store = layout.parameter_store(self.model)
        self.ranks = FleetRanks(topology) if topology.world_size > 1 else ONE_RANK
        named = [(n, p) for n, p in self.model.hf_named_parameters() if not p.stop_gradient]
        decayed = {name for name, _ in named if "norm" not in name}
        self.optimizer = Optimizer(named, TRAIN, decayed, self.store, self.table)

    def step(self) -> list[float]:
        """Terms and norm."""
        own = range(self.ranks.data_rank, len(TEXTS), self.ranks.data_size)
        batches = [*map(batch, own)]
        runner = vl_runner(self.model, self.ranks)
        outcome = train_step(runner, self.optimizer, batches, 0.02, self.ranks)
        return [*map(float, outcome.terms.numpy()), float(outcome.grad_norm)]

    def values(self) -> dict[str, np.ndarray]:
        """Full parameters and states."""
        found = {
            item.key: item.layout.to_stored(
                item.of_full(
                    self.table.full_value(item.parameter, self.store.gathered_value(item.parameter))
                )
            )
            for item in self.model.stored_parameters()
        }
        return {key: np.array(value) for key, value in found.items()} | states_of(self.optimizer)

    def state_of_experts(self) -> int:
        """Elements of this rank's first moments of experts."""
        found = 0
        for _, parameter in self.optimizer.parameters:
            shard = self.store.shard_of(parameter)
            if self.table[parameter].is_expert and shard is not None:
                found += shard.size
        return found


def compared(folder: str, wanted: tuple, name: str) -> dict:
    """Largest relative errors, and the share of the experts' state."""
    degrees = CASES[name]
    topology = initialize(ParallelDegrees(**degrees))
    run = Run(folder, topology, VLParallelConfig(**degrees))
    if name in FLAT:
        run.optimizer.use_buckets()
    steps, values = [run.step() for _ in range(STEPS)], run.values()
    wanted_steps, wanted_values = wanted
    assert values.keys() == wanted_values.keys()
    worst = (0.0, "")
    for key, value in wanted_values.items():
        assert values[key].shape == value.shape, key
        error = np.abs(values[key] - value).max() / max(np.abs(value).max(), 1e-6)
        worst = max(worst, (float(error), key))
    return {
        "steps": float(np.abs(np.array(steps) / np.array(wanted_steps) - 1).max()),
        "worst": worst,
        "state": run.state_of_experts(),
    }


def worker(folder: str, names: Sequence[str]) -> dict:
    initialize(ParallelDegrees(dp_degree=4))
    if dist.get_rank() == 0:
        tiny_model(**MODEL).save_pretrained(folder)
    dist.barrier()
    one = Run(folder, Topology.single(), VLParallelConfig())
    wanted = [one.step() for _ in range(STEPS)], one.values()
    return run_checks({name: partial(compared, folder, wanted, name) for name in names})


@cache
def outcomes(names: tuple[str, ...]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(worker, 4, arguments=(folder, names), timeout=900)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] * (name not in FEW)) for name in CASES]
)
def test_steps_parameters_and_states_equal_one_devices(name):
    of_ranks = outcomes(FEW if name in FEW else OTHERS)
    for found in outcome_of(of_ranks, name):
        error, where = found["worst"]
        assert found["steps"] <= TOPOLOGY
        assert error <= TOPOLOGY, where
    # Two layers of eight experts, 16 x 16 and 8 x 16 values each; slices may be padded.
    degrees = ParallelDegrees(**CASES[name])
    share = 2 * 8 * (256 + 128) / degrees.ep_degree / expert_shards(degrees)
    held = [found["state"] for found in outcome_of(of_ranks, name)]
    assert sum(held) / len(held) == pytest.approx(share, rel=0.1)
