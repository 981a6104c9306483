"""Checks that run on every rank of a sharding group at stage 1; see `test_fleet_sharding`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor, nn
from paddle.distributed import fleet

from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import gradient_of
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.sharding import FleetSharding
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.train.optimizer import Optimizer
from tests.support import sharding_models
from tests.support.launch import run_checks
from tests.support.sharding_memory import gradient_sums_of
from tests.support.sharding_models import HalfModel, toy
from tests.support.states import gathered, states_of

STEPS, MICRO_BATCHES, RATE = 3, 2, 0.02
TRAIN = TrainConfig(output_dir="unused", learning_rate=RATE, weight_decay=0.1, max_grad_norm=0.5)
# Fleet's options by name, and whether gathers overlap. At size 0 each parameter has its own buffer.
OPTIONS = {
    "plain": ({}, False),
    "a buffer each": ({"comm_buffer_size_MB": 0}, False),
    "overlap": ({"comm_overlap": True}, False),
    "overlap, a buffer each": ({"comm_overlap": True, "comm_buffer_size_MB": 0}, False),
    "fused states": ({"enable_fuse_optimizer_states": True}, False),
    "gathers overlap": ({}, True),
    "gathers overlap, a buffer each": ({"comm_buffer_size_MB": 0}, True),
    "all": (
        {"comm_overlap": True, "comm_buffer_size_MB": 0, "enable_fuse_optimizer_states": True},
        True,
    ),
}
DEFAULTS = {
    "comm_buffer_size_MB": 256,
    "comm_overlap": False,
    "enable_fuse_optimizer_states": False,
}


def sample(step: int, micro: int, rank: int) -> tuple:
    """A micro-batch; only rank 0 uses the rare parameter."""
    ids_T, pixels_TD, _ = sharding_models.sample(step, micro, rank)
    return ids_T, pixels_TD, rank == 0


def set_options(options: dict[str, Any]) -> None:
    configs = fleet.fleet._user_defined_strategy.strategy.hybrid_configs.sharding_configs
    for name, value in {**DEFAULTS, **options}.items():
        setattr(configs, name, value)


def table_of(model: nn.Layer) -> ParameterTable:
    table = ParameterTable()
    for parameter in model.parameters():
        table.add([parameter], ParamSpec())
    return table


class Run:
    """A model with its optimizer, sharded over the topology's ranks or on one device."""

    def __init__(self, model: nn.Layer, topology: Topology | None, options: str = "plain"):
        self.model, self.topology = model, topology
        self.ranks = None if topology is None else FleetRanks(topology)
        fleets, overlaps_gathers = OPTIONS[options]
        self.table = table_of(model)
        if topology is None:
            self.trained = MasterWeights(model.parameters())
        else:
            set_options(fleets)
            self.trained = FleetSharding(
                model.parameters(), topology, self.table, model.units, overlaps_gathers
            )
        named = [(n, p) for n, p in model.named_parameters() if not p.stop_gradient]
        decayed = {name for name, _ in named if not name.endswith("norm")}
        factors = {name: 0.5 for name, _ in named if "up" in name}
        self.optimizer = Optimizer(
            named, TRAIN, decayed, self.trained, self.table, rate_factors=factors
        )

    def sum_gradients(self) -> None:
        self.trained.end_backward()
        if self.ranks is not None:
            self.ranks.sum_gradients(self.optimizer.tensors_with_specs)

    def micro_batches(self, step: int) -> list[tuple]:
        if self.topology is None:
            return []
        rank = self.topology.data_rank
        return [sample(step, micro, rank) for micro in range(MICRO_BATCHES)]

    def norm(self) -> Tensor:
        if self.ranks is None:
            return self.optimizer.squared_norm().sqrt()
        squares = self.optimizer.squared_norm(self.ranks)
        return self.ranks.sum_over_all(squares).sqrt()

    def train_step(self, batches: list[tuple]) -> tuple[float, float, dict[str, np.ndarray]]:
        """Loss of this rank's batches, gradient norm, and gradients."""
        total = 0.0
        for batch in batches:
            loss = self.model(*batch)
            loss.backward()
            self.trained.end_micro_batch()
            total += loss.item()
        self.sum_gradients()
        gradients, norm = self.gradients(), self.norm()
        if np.isfinite(norm.item()):
            self.optimizer.update(RATE, norm.item())
        self.optimizer.clear_gradients()
        return total, norm.item(), gradients

    def gradients(self) -> dict[str, np.ndarray]:
        found = {}
        for name, parameter in self.optimizer.parameters:
            updated = self.trained.shard_of(parameter)
            grad = paddle.zeros([0]) if updated is None else gradient_of(updated)
            whole = gathered(self.trained, parameter, grad)
            found[f"gradient of {name}"] = whole.numpy().copy()
        return found

    def values(self) -> dict[str, np.ndarray]:
        """Full parameters and optimizer states."""
        parameters = {
            name: self.trained.gathered_value(parameter).astype("float32").numpy().copy()
            for name, parameter in self.model.named_parameters()
        }
        return parameters | states_of(self.optimizer)


def trained_run(run: Run, of_steps: list[list[tuple]]) -> dict[str, Any]:
    """Losses and norms of all steps, gradients of the first step, values after the last one."""
    losses, norms, first = [], [], {}
    for batches in of_steps:
        loss, norm, gradients = run.train_step(batches)
        losses.append(loss)
        norms.append(norm)
        first = first or gradients
    return {"losses": losses, "norms": norms} | first | run.values()


def single(num_ranks: int) -> dict[str, Any]:
    of_steps = [
        [sample(step, micro, rank) for micro in range(MICRO_BATCHES) for rank in range(num_ranks)]
        for step in range(STEPS)
    ]
    return trained_run(Run(toy(), None), of_steps)


def train(topology: Topology, options: str) -> dict[str, Any]:
    run = Run(toy(), topology, options)
    found = trained_run(run, [run.micro_batches(step) for step in range(STEPS)])
    assert all(parameter.grad is None for parameter in run.model.parameters())
    return found


def continued(topology: Topology, options: str) -> list[str]:
    """Names of values that differ, bit for bit, when the last step resumes from saved values."""
    run = Run(toy(), topology, options)
    trained_run(run, [run.micro_batches(step) for step in range(STEPS - 1)])
    saved = run.values()
    wanted = trained_run(run, [run.micro_batches(STEPS - 1)])
    model = toy()
    for name, parameter in model.named_parameters():
        parameter.set_value(saved[name])
    other = Run(model, topology, options)
    other.optimizer.load_state({n: a for n, a in saved.items() if "/" in n})
    found = trained_run(other, [other.micro_batches(STEPS - 1)])
    return [name for name, value in wanted.items() if not np.array_equal(value, found[name])]


def collectives(topology: Topology, options: str) -> list[Collective]:
    """The collectives of the second step."""
    run = Run(toy(), topology, options)
    run.train_step(run.micro_batches(0))
    with record_collectives() as recording:
        for batch in run.micro_batches(1):
            recording.phase = "forward"
            loss = run.model(*batch)
            recording.phase = "backward"
            loss.backward()
        recording.phase = "end"
        run.sum_gradients()
        recording.phase = "update"
        run.optimizer.step(RATE)
        run.optimizer.clear_gradients()
    return recording.calls


def skipped(topology: Topology) -> list[str]:
    """Names of values that a step with an infinite norm changes, or that differ one step later from
    a run without that step."""
    run, plain = (Run(toy(), topology) for _ in range(2))
    for each in (run, plain):
        each.train_step(each.micro_batches(0))
    before = run.values()
    ids_T, pixels_TD, uses_rare = run.micro_batches(1)[0]
    if topology.rank == 0:
        pixels_TD = pixels_TD * np.inf
    run.train_step([(ids_T, pixels_TD, uses_rare)])
    wrong = [
        name for name, value in run.values().items() if not np.array_equal(value, before[name])
    ]
    for each in (run, plain):
        each.train_step(each.micro_batches(2))
    wanted = plain.values()
    return wrong + [n for n, value in run.values().items() if not np.array_equal(value, wanted[n])]


def written(topology: Topology) -> list[str]:
    """Parameters that did not take the values written to their shards."""
    run, wrong = Run(toy(), topology), []
    wanted = {}
    for name, parameter in run.optimizer.parameters:
        wanted[name] = np.random.default_rng(1).normal(size=parameter.shape).astype(np.float32)
        own, updated = (
            run.trained.own_shard(parameter, wanted[name]),
            run.trained.shard_of(parameter),
        )
        assert (updated is None) == (own.size == 0)
        if updated is not None:
            updated.set_value(own)
    run.trained.all_gather_parameters()
    values = run.values()
    wrong += [name for name, value in wanted.items() if not np.array_equal(values[name], value)]
    return wrong


def half_gradients(topology: Topology, options: str) -> tuple[set[str], set[float]]:
    """dtypes and values of a bfloat16 gradient whose micro-batches add 256, 1, 1 and 1."""
    model = HalfModel()
    run = Run(model, topology, options)
    if run.trained.optimizer.comm_overlap:
        run.trained.begin_step(4)
    for value in (256.0, 1.0, 1.0, 1.0):
        model(paddle.full([1, 3], value)).backward()
    run.sum_gradients()
    weight = model.units[0].weight
    dtypes = {str(t.dtype) for t in gradient_sums_of(run.trained)} | {str(weight.dtype)}
    values = run.gradients()["gradient of units.0.weight"]
    return dtypes, set(values.reshape(-1).tolist())


def half_steps(topology: Topology | None, num_ranks: int) -> dict[str, np.ndarray]:
    """Master weights, moments and parameters of a bfloat16 model after some steps."""
    paddle.seed(1)
    run = Run(HalfModel(), topology)
    ranks = range(num_ranks) if topology is None else [topology.data_rank]
    for step in range(STEPS):
        for rank in ranks:
            rng = np.random.default_rng([step, rank])
            x_TD = paddle.to_tensor(rng.normal(size=(4, 3)).astype(np.float32))
            (run.model(x_TD) ** 2).sum().backward()
            run.trained.end_micro_batch()
        run.sum_gradients()
        run.optimizer.step(RATE)
        run.optimizer.clear_gradients()
    return run.values()


def classes(topology: Topology) -> tuple[str, str, str]:
    run = Run(toy(), topology)
    fleets = run.trained.optimizer
    return type(fleets).__name__, type(fleets).__module__, type(fleets._inner_opt).__name__


def fused(topology: Topology) -> bool:
    """Whether all optimizer states share fleet's buffer after a step."""
    run = Run(toy(), topology, "fused states")
    run.train_step(run.micro_batches(0))
    buffer = run.optimizer._adamw.fused_states_buffer
    states = run.optimizer.state_tensors().values()
    return all(state._is_shared_buffer_with(buffer) for state in states)


def specs(topology: Topology) -> list[tuple]:
    """For two shards: whether the optimizer uses the parameter's spec, and its `is_distributed`."""
    model = toy()
    model.head.weight.is_distributed = True
    run = Run(model, topology)
    found = []
    for parameter in (model.rare, model.head.weight):
        updated = run.trained.shard_of(parameter)
        if updated is None:
            found.append(None)
            continue
        spec = next(s for t, s in run.optimizer.tensors_with_specs if t is updated)
        found.append((spec is run.table[parameter], updated.is_distributed))
    return found


def refused(topology: Topology) -> dict[str, str]:
    messages = {}

    def refuse(name, error, function):
        with pytest.raises(error) as raised:
            function()
        messages[name] = str(raised.value)

    run = Run(toy(), topology)
    refuse("frozen", ValueError, lambda: run.trained.shard_of(run.model.fixed))
    head = run.model.head.weight
    refuse("shape", ValueError, lambda: run.trained.own_shard(head, np.zeros([2, 3])))
    return messages


def worker(degrees: dict[str, int], options: Sequence[str]) -> dict:
    topology = initialize(ParallelDegrees(**degrees, num_micro_batches=MICRO_BATCHES))
    size = topology.data_size
    checks: dict[str, Any] = {"single": partial(single, size)}
    checks |= {f"train {name}": partial(train, topology, name) for name in options}
    checks |= {f"collectives {name}": partial(collectives, topology, name) for name in options}
    for name in ("plain", "fused states", "all"):
        checks[f"continued {name}"] = partial(continued, topology, name)
    for name in ("plain", "overlap"):
        checks[f"half_gradients {name}"] = partial(half_gradients, topology, name)
    checks["half single"] = partial(half_steps, None, size)
    checks["half"] = partial(half_steps, topology, size)
    for check in (skipped, written, classes, fused, specs, refused):
        checks[check.__name__] = partial(check, topology)
    return run_checks(checks)
