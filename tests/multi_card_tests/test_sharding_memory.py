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
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor, nn

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.checkpoint.writing import save_parameters
from paddle_vl.nn.linear import gradient_of
from paddle_vl.nn.parameter_table import CheckpointRanks
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.sharding import ShardingOptions
from paddle_vl.parallel.tensor import FleetCheckpointRanks
from paddle_vl.parallel.topology import Topology, initialize
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.sharding_memory import (
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
NAMES = [*FEW, *(pytest.param(name, marks=pytest.mark.heavy) for name in OTHERS)]
WIDTHS = {"float32": 4, "bfloat16": 2}
# A bfloat16 model is only built, which options of a step do not change.
HELD = [("float32", mode) for mode in MODES] + [("bfloat16", str(stage)) for stage in STAGES]
MOMENTS = ("built", "end of backward", "after a step")
MICRO_BATCHES = 2
STEPS = 3
RECOMPUTED = ("act", "attention", "mlp", "full")
TERMS = ("MSE", "CE")


def run_of(name: str, dtype: str, topology: Topology, mode: Mode, what: str = "none") -> Run:
    model = MODELS[name](dtype)
    recompute_layers(units_of(model), what)
    return Run(model, topology, mode, [units_of(model)])


def moments_of(run: Run) -> list[Tensor]:
    states = run.optimizer.state_tensors()
    return [tensor for name, tensor in states.items() if "/moment" in name]


def counted(run: Run) -> dict[str, float]:
    return asdict(counted_bytes(run.model.parameters(), run.trained, moments_of(run)))


def held(name: str, dtype: str, mode: Mode, topology: Topology) -> dict[str, Any]:
    """Counted bytes and the formula's, by moment; bytes of fleet's padding, by kind."""
    gc.collect()
    run, stage = run_of(name, dtype, topology, mode), mode.stage
    model, is_once = run.model, mode.options.reduce_once_per_step
    elements = ModelElements.of(model.parameters(), units_of(model), WIDTHS[dtype], run.tables)
    wanted = asdict(between_steps(elements, stage, RANKS))
    found = {"built": (counted(run), wanted), "padding": {}}
    if stage == 1:
        # Fleet pads a parameter's shard to a multiple of 256 bytes on each rank.
        most = 256 * RANKS // WIDTHS[dtype]
        padding = sum(-p.size % most for p in model.parameters() if not p.stop_gradient)
        found["padding"] = {
            "gradients": 4 * padding, "masters": 4 * padding, "moments": 8 * padding
        }  # fmt: skip
    if dtype == "float32":
        run.trained.begin_step(MICRO_BATCHES)
        for _ in range(MICRO_BATCHES - 1):
            loss_of(model).backward()
            run.trained.end_micro_batch()
        loss = loss_of(model)
        if not is_once:
            loss.backward()
        in_backward = at_peak(elements, stage, RANKS, MICRO_BATCHES, mode.options)
        found["end of backward"] = (counted(run), asdict(in_backward))
        if is_once:
            loss.backward()
        run.trained.end_micro_batch()
        run.trained.end_backward()
        run.optimizer.step(0.01)
        run.optimizer.clear_gradients()
        found["after a step"] = (counted(run), wanted)
    return found


def regime(
    name: str, stage: int, topology: Topology, folder: str, ranks: CheckpointRanks
) -> dict[str, Any]:
    """dtypes and sizes of all that a bfloat16 run stores, and of its checkpoint."""
    run = run_of(name, "bfloat16", topology, Mode(stage))
    model, moments = run.model, moments_of(run)
    target = Path(folder) / f"{name} {stage}".replace(" ", "_")
    if ranks.is_first:
        target.mkdir()
    paddle.distributed.barrier()
    whole_states = {str(state.dtype) for state in states_of(run.optimizer).values()}
    save_parameters(target, model.stored_parameters(), ranks=ranks, store=run.trained)
    paddle.distributed.barrier()
    masters = [copy for copy in copies_of(run.trained) if not copy.stop_gradient]
    # Updated in place, by stages that copy half-precision parameters only.
    wide = [p for p in model.parameters() if p.dtype == paddle.float32 and stage < 2]
    wide = [own for own in map(run.trained.shard_of, wide) if own is not None]
    return {
        "parameters": {str(p.dtype) for p in model.parameters()},
        "masters": {str(copy.dtype) for copy in masters},
        "moments": {str(moment.dtype) for moment in moments},
        "saved states": whole_states,
        "saved parameters": {t.dtype for t in read_checkpoint_headers(target).values()},
        "trained": sum(p.size for p in model.parameters() if not p.stop_gradient),
        "most padding": 128 * RANKS * sum(not p.stop_gradient for p in model.parameters()),
        "num updated": sum(tensor.size for tensor in [*masters, *wide]),
        "num moments": sum(moment.size for moment in moments),
        "of the optimizer": all(
            any(tensor is copy for copy in [*masters, *wide]) for tensor in run.optimizer.tensors
        ),
    }


def half_steps(stage: int, topology: Topology) -> tuple[dict[str, np.ndarray], set[str]]:
    """Parameters, master weights and moments after some steps on the data of both ranks; dtypes of
    the gradients that the optimizer got."""
    paddle.seed(1)
    run, dtypes = Run(HalfModel(), topology, Mode(stage)), set()
    # At stage 0 this rank runs the data of both ranks.
    ranks = [topology.sharding_rank] if stage else range(RANKS)
    for step in range(STEPS):
        for rank in ranks:
            rng = np.random.default_rng([step, rank])
            x_TD = paddle.to_tensor(rng.normal(size=(4, 3)).astype(np.float32))
            (run.model(x_TD) ** 2).sum().backward()
            run.trained.end_micro_batch()
        run.trained.end_backward()
        dtypes |= {str(gradient_of(tensor).dtype) for tensor in run.optimizer.tensors}
        run.optimizer.step(0.01)
        run.optimizer.clear_gradients()
    found = run.values()
    # Of bfloat16 parameters.
    assert (found["units.0.weight/master_weight"] != found["units.0.weight"]).any()
    return found, dtypes


def stage_3(
    name: str, topology: Topology, what: str, loss: Callable[[nn.Layer], Tensor] = loss_of
) -> list[str]:
    """Gradients that differ from twice one device's by more than rounding; "loss" if it differs."""
    single = MODELS[name]("float32")
    single.materialize_all()
    wanted_loss = loss(single)
    wanted_loss.backward()
    wanted = {n: p.grad.numpy() for n, p in single.named_parameters() if p.grad is not None}
    run = run_of(name, "float32", topology, Mode(3), what)
    found_loss = loss(run.model)
    found_loss.backward()
    run.trained.end_micro_batch()
    run.trained.end_backward()
    error = abs(found_loss.item() - wanted_loss.item())
    wrong = [] if error <= 1e-6 * abs(wanted_loss.item()) else ["loss"]
    for key, grad in run.gradients().items():
        expected = RANKS * wanted.get(key.removeprefix("gradient of "), np.zeros_like(grad))
        if np.abs(grad - expected).max() > 1e-5 * max(np.abs(expected).max(), 1e-6):
            wrong.append(key)
    return wrong


def worker(folder: str, names: Sequence[str]) -> dict:
    topology = initialize(ParallelDegrees(sharding_degree=RANKS))
    ranks = FleetCheckpointRanks.of(topology)
    checks = {}
    for dtype, mode in HELD:
        for name in names:
            checks[f"held {name} {dtype} {mode}"] = partial(
                held, name, dtype, MODES[mode], topology
            )
    for stage in STAGES:
        checks[f"half {stage}"] = partial(half_steps, stage, topology)
        for name in names:
            checks[f"regime {name} {stage}"] = partial(regime, name, stage, topology, folder, ranks)
    for name in names:
        for what in RECOMPUTED:
            checks[f"recomputed {name} {what}"] = partial(stage_3, name, topology, what)
    for term in TERMS:
        loss = partial(loss_of, terms=[term])
        checks[f"{term} alone"] = partial(stage_3, "pi07", topology, "none", loss)
    return run_checks(checks)


@cache
def outcomes(names: tuple[str, ...]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(worker, RANKS, arguments=(folder, names), timeout=300)


def outcomes_of(name: str) -> list[dict]:
    return outcomes(FEW if name in FEW else OTHERS)


@pytest.mark.parametrize(("dtype", "mode"), HELD)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_formula(name, dtype, mode):
    for moments in outcome_of(outcomes_of(name), f"held {name} {dtype} {mode}"):
        padding = moments.pop("padding")
        assert set(moments) == (set(MOMENTS) if dtype == "float32" else {"built"})
        for moment, (found, wanted) in moments.items():
            for kind, size in wanted.items():
                most = 1.05 * size + padding.get(kind, 0)
                assert 0.95 * size <= found[kind] <= most, (moment, kind)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_has_one_float32_copy_and_float32_moments(name, stage):
    ranks, wide = outcome_of(outcomes_of(name), f"regime {name} {stage}"), name == "qwen3.5"
    for of_rank in ranks:
        assert of_rank["parameters"] == {"paddle.bfloat16", *(["paddle.float32"] * wide)}
        assert of_rank["masters"] == of_rank["moments"] == {"paddle.float32"}
        assert of_rank["saved parameters"] == {"BF16", *(["F32"] * wide)}
        assert of_rank["saved states"] == {"float32"}
        assert of_rank["of the optimizer"]
        assert of_rank["num moments"] == 2 * of_rank["num updated"]
    copies = sum(of_rank["num updated"] for of_rank in ranks)
    trained = ranks[0]["trained"] * (1 if stage else RANKS)
    # Sizes that no group size divides are padded; fleet pads to 256 bytes on each rank.
    padding = ranks[0]["most padding"] if stage == 1 else 0.01 * trained
    assert trained <= copies <= trained + padding


@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_stage_does_the_same_arithmetic(stage):
    wanted, dtypes = outcome_of(outcomes(FEW), "half 0")[0]
    assert dtypes == {"paddle.float32"}
    for found, seen in outcome_of(outcomes(FEW), f"half {stage}"):
        assert seen == dtypes
        for name in found:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("what", RECOMPUTED)
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_units_of_stage_3_equal_one_process(name, what):
    assert outcome_of(outcomes_of(name), f"recomputed {name} {what}") == [[], []]


@pytest.mark.parametrize("term", TERMS)
def test_a_loss_of_weight_zero_leaves_zeros_at_stage_3(term):
    assert outcome_of(outcomes(FEW), f"{term} alone") == [[], []]
