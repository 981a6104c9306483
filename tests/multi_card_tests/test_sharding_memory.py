"""Memory per rank at every sharding stage, of a small pi07, Qwen3-VL and Qwen3.5, on 2 ranks.

Guarantees, with every option of the stages:

- bytes of parameters, master weights, gradients and Adam's moments match the formula within 5 %:
  after building, at the end of a backward pass and after a step, in float32 and (except for
  gradients) bfloat16, also with frozen parameters;
- a bfloat16 model has bfloat16 parameters at every stage, but for the few that Qwen3.5 keeps in
  float32, which no stage copies a second time. Its master weights, moments and the
  gradients passed to the optimizer are float32, once per trained value over all ranks, and so in
  checkpoints;
- three steps from bfloat16 gradients give the same master weights, moments and parameters at every
  stage;
- at stage 3, losses and gradients of recomputed units equal one device's, also for one of pi07's
  losses alone, which leaves parameters without a gradient.
"""

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
import pytest
from paddle import Tensor, nn

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, parameters_to_write, write_tensors
from paddle_vl.nn.linear import gradient_of
from paddle_vl.nn.parameter_table import CheckpointRanks
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.sharding import ShardingOptions
from paddle_vl.parallel.tensor import FleetCheckpointRanks
from paddle_vl.parallel.topology import Topology, initialize
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.sharding_memory import (
    HeldBytes,
    ModelElements,
    at_peak,
    between_steps,
    copies_of,
    counted_bytes,
)
from tests.support.sharding_models import HalfModel, Mode, Run
from tests.support.small_families import loss_of, pi07, qwen3_5_fresh, qwen_fresh, units_of
from tests.support.states import states_of

RANKS = 2
STAGES = (0, 1, 2, 3)
MODES = {str(stage): Mode(stage) for stage in STAGES}
MODES["2 once"] = Mode(2, ShardingOptions(reduce_once_per_step=True))
MODES["3 kept"] = Mode(3, ShardingOptions(reshard_after_forward=False))
MODELS: dict[str, Callable[[str], nn.Layer]] = {
    "qwen": qwen_fresh,
    "qwen3.5": qwen3_5_fresh,
    "pi07": partial(pi07, is_fresh=False),
    "pi07 frozen tower": partial(pi07, is_fresh=False, frozen=True),
}
# By default; the others are heavy.
FEW = ("qwen", "pi07")
OTHERS = tuple(name for name in MODELS if name not in FEW)
WIDTHS = {"float32": 4, "bfloat16": 2}
# A bfloat16 model is only built, which options of a step do not change.
HELD = [("float32", mode) for mode in MODES] + [("bfloat16", str(stage)) for stage in STAGES]
MICRO_BATCHES = 2
STEPS = 3
RECOMPUTED = ("act", "attention", "mlp", "full")
TERMS = ("MSE", "CE")


class World(NamedTuple):
    """What all checks share."""

    topology: Topology
    folder: Path
    ranks: CheckpointRanks


def run_of(name: str, dtype: str, topology: Topology, mode: Mode, what: str = "none") -> Run:
    model = MODELS[name](dtype)
    recompute_layers(units_of(model), what)
    return Run(model, topology, mode, [units_of(model)])


def moments_of(run: Run) -> list[Tensor]:
    states = run.optimizer.state_tensors()
    return [tensor for name, tensor in states.items() if "/moment" in name]


def holds_the_bytes_of_the_formula(world: World, name: str, dtype: str, mode: str) -> None:
    gc.collect()
    run = run_of(name, dtype, world.topology, MODES[mode])
    model, (stage, options, *_) = run.model, run.mode
    elements = ModelElements.of(model.parameters(), units_of(model), WIDTHS[dtype], run.tables)
    padding = {}
    if stage == 1:
        # Fleet pads a parameter's shard to a multiple of 256 bytes on each rank.
        most = 256 * RANKS // WIDTHS[dtype]
        number = sum(-p.size % most for p in model.parameters() if not p.stop_gradient)
        padding = {"gradients": 4 * number, "masters": 4 * number, "moments": 8 * number}

    def assert_held(wanted: HeldBytes) -> None:
        found = asdict(counted_bytes(model.parameters(), run.trained, moments_of(run)))
        for kind, size in asdict(wanted).items():
            assert 0.95 * size <= found[kind] <= 1.05 * size + padding.get(kind, 0), kind

    assert_held(between_steps(elements, stage, RANKS))
    if dtype != "float32":
        return
    run.trained.begin_step(MICRO_BATCHES)
    for _ in range(MICRO_BATCHES - 1):
        loss_of(model).backward()
        run.trained.end_micro_batch()
    loss = loss_of(model)
    if not options.reduce_once_per_step:
        loss.backward()
    assert_held(at_peak(elements, stage, RANKS, MICRO_BATCHES, options))
    if options.reduce_once_per_step:
        loss.backward()
    run.trained.end_micro_batch()
    run.trained.end_backward()
    run.optimizer.step(0.01)
    run.optimizer.clear_gradients()
    assert_held(between_steps(elements, stage, RANKS))


def has_one_float32_copy_and_float32_moments(world: World, name: str, stage: int) -> None:
    """Of a bfloat16 run, and so has its checkpoint."""
    topology, folder, ranks = world
    run = run_of(name, "bfloat16", topology, Mode(stage))
    model, moments, is_wide = run.model, moments_of(run), name == "qwen3.5"
    target = folder / f"{name} {stage}".replace(" ", "_")
    if ranks.is_first:
        target.mkdir()
    paddle.distributed.barrier()
    saved_states = {str(state.dtype) for state in states_of(run.optimizer).values()}
    tensors = parameters_to_write(model.stored_parameters(), store=run.trained)
    write_tensors(target, "model", tensors, DEFAULT_SHARD_BYTES, ranks)
    paddle.distributed.barrier()
    masters = [copy for copy in copies_of(run.trained) if not copy.stop_gradient]
    # Updated in place, by stages that copy half-precision parameters only.
    wide = [p for p in model.parameters() if p.dtype == paddle.float32 and stage < 2]
    updated = [*masters, *(o for o in map(run.trained.shard_of, wide) if o is not None)]
    num_updated: list[int] = []
    paddle.distributed.all_gather_object(num_updated, sum(tensor.size for tensor in updated))
    of_model = {str(p.dtype) for p in model.parameters()}
    assert of_model == {"paddle.bfloat16", *(["paddle.float32"] * is_wide)}
    for copies in (masters, moments):
        assert {str(copy.dtype) for copy in copies} == {"paddle.float32"}
    saved = {tensor.dtype for tensor in read_checkpoint_headers(target).values()}
    assert saved == {"BF16", *(["F32"] * is_wide)}
    assert saved_states == {"float32"}
    assert all(any(one is copy for copy in updated) for one in run.optimizer.tensors)
    assert sum(moment.size for moment in moments) == 2 * num_updated[topology.rank]
    sizes = [p.size for p in model.parameters() if not p.stop_gradient]
    trained = sum(sizes) * (1 if stage else RANKS)
    # Sizes that no group size divides are padded; fleet pads to 256 bytes on each rank.
    padding = 128 * RANKS * len(sizes) if stage == 1 else 0.01 * trained
    assert trained <= sum(num_updated) <= trained + padding


@cache
def half_steps(stage: int, topology: Topology) -> dict[str, np.ndarray]:
    """Parameters, master weights and moments after some steps on the data of both ranks."""
    paddle.seed(1)
    run = Run(HalfModel(), topology, Mode(stage))
    # At stage 0 this rank runs the data of both ranks.
    ranks = [topology.sharding_rank] if stage else range(RANKS)
    for step in range(STEPS):
        for rank in ranks:
            rng = np.random.default_rng([step, rank])
            x_TD = paddle.to_tensor(rng.normal(size=(4, 3)).astype(np.float32))
            (run.model(x_TD) ** 2).sum().backward()
            run.trained.end_micro_batch()
        run.trained.end_backward()
        gradients = [gradient_of(tensor) for tensor in run.optimizer.tensors]
        assert {str(grad.dtype) for grad in gradients} == {"paddle.float32"}
        run.optimizer.step(0.01)
        run.optimizer.clear_gradients()
    found = run.values()
    # Of bfloat16 parameters.
    assert (found["units.0.weight/master_weight"] != found["units.0.weight"]).any()
    return found


def does_the_same_arithmetic(world: World, stage: int) -> None:
    found, wanted = (half_steps(number, world.topology) for number in (stage, 0))
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def recomputed_units_of_stage_3_equal_one_device(
    world: World, name: str, what: str, loss: Callable[[nn.Layer], Tensor] = loss_of
) -> None:
    """The loss, and twice the gradients."""
    single = MODELS[name]("float32")
    single.materialize_all()
    wanted_loss = loss(single)
    wanted_loss.backward()
    wanted = {n: p.grad.numpy() for n, p in single.named_parameters() if p.grad is not None}
    run = run_of(name, "float32", world.topology, Mode(3), what)
    found_loss = loss(run.model)
    found_loss.backward()
    run.trained.end_micro_batch()
    run.trained.end_backward()
    assert found_loss.item() == pytest.approx(wanted_loss.item(), rel=1e-6)
    for key, grad in run.gradients().items():
        expected = RANKS * wanted.get(key.removeprefix("gradient of "), np.zeros_like(grad))
        error = np.abs(grad - expected).max()
        assert error <= 1e-5 * max(np.abs(expected).max(), 1e-6), key


def cases_of(name: str) -> dict[str, tuple]:
    """A model's checks and their arguments."""
    cases: dict[str, tuple] = {
        f"bytes, {dtype} {mode}": (holds_the_bytes_of_the_formula, name, dtype, mode)
        for dtype, mode in HELD
    }
    for stage in STAGES:
        cases[f"copies, {stage}"] = (has_one_float32_copy_and_float32_moments, name, stage)
    for what in RECOMPUTED:
        cases[f"recomputed, {what}"] = (recomputed_units_of_stage_3_equal_one_device, name, what)
    if name == "pi07":
        cases |= {f"{term} alone": (weight_of_zero, name, term) for term in TERMS}
    if name == "qwen":
        cases |= {f"half, {stage}": (does_the_same_arithmetic, stage) for stage in STAGES[1:]}
    return cases


def weight_of_zero(world: World, name: str, term: str) -> None:
    """A loss of weight zero leaves zeros at stage 3."""
    loss = partial(loss_of, terms=[term])
    recomputed_units_of_stage_3_equal_one_device(world, name, "none", loss)


def worker(folder: str, names: Sequence[str]) -> dict:
    topology = initialize(ParallelDegrees(sharding_degree=RANKS))
    world = World(topology, Path(folder), FleetCheckpointRanks.of(topology))
    return run_checks(
        {
            f"{name}: {case}": partial(check, world, *given)
            for name in names
            for case, (check, *given) in cases_of(name).items()
        }
    )


@cache
def outcomes(names: tuple[str, ...]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(worker, RANKS, arguments=(folder, names), timeout=300)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[pytest.mark.heavy] * (name not in FEW))
        for name in MODELS
        for case in cases_of(name)
    ],
)
def test_memory_and_numbers_are_those_of_the_stage(name, case):
    outcome_of(outcomes(FEW if name in FEW else OTHERS), f"{name}: {case}")
