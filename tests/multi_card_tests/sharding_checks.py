"""Checks that run on every rank of a sharding group; see `test_sharding`.

All checks run under one topology, and share its model and data.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import Tensor, nn
from paddle.base.core import (
    host_memory_stat_current_value,
    host_memory_stat_peak_value,
    host_memory_stat_reset_peak_value,
)

from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import Collective, observed, record_collectives
from paddle_vl.parallel.sharding import Sharding, ShardingOptions, buckets
from paddle_vl.parallel.sharding.buckets import Pending
from paddle_vl.parallel.topology import initialize
from tests.support.launch import run_checks
from tests.support.sharding_models import (
    DIM,
    VOCAB,
    WIDE,
    HalfModel,
    Toy,
    WideStack,
    sample,
    toy,
    trained,
)
from tests.support.states import gathered

STEPS, MICRO_BATCHES = 3, 2


class Mode(NamedTuple):
    """A sharding stage and its options."""

    stage: int
    options: ShardingOptions = ShardingOptions()


RANKS = 2
MODES = {
    "2": Mode(2),
    "2 once": Mode(2, ShardingOptions(reduce_once_per_step=True)),
    "3": Mode(3),
    "3 kept": Mode(3, ShardingOptions(reshard_after_forward=False)),
}
HALVES = {
    "2 bfloat16": Mode(2, ShardingOptions(reduce_dtype="bfloat16")),
    "2 once bfloat16": Mode(2, ShardingOptions(reduce_dtype="bfloat16", reduce_once_per_step=True)),
    "3 bfloat16": Mode(3, ShardingOptions(reduce_dtype="bfloat16")),
}


def adamw(parameters: list[Tensor]) -> paddle.optimizer.AdamW:
    return paddle.optimizer.AdamW(
        0.02, parameters=parameters, weight_decay=0.1, multi_precision=True
    )


def names(model: nn.Layer) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def gradient_of(name: str) -> str:
    return f"gradient of {name}"


def single_run() -> dict[str, Any]:
    """What `train` returns, from one device that trains on the data of all ranks."""
    model = toy()
    optimizer = adamw(trained(model))
    losses, gradients = [], {}
    for step in range(STEPS):
        batches = [sample(step, m, r) for m in range(MICRO_BATCHES) for r in range(RANKS)]
        total = 0.0
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            gradients = {
                gradient_of(name): parameter.grad.numpy()
                for name, parameter in names(model).items()
                if not parameter.stop_gradient
            }
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    values = {name: value.numpy() for name, value in names(model).items()}
    return {"losses": losses} | gradients | values


class Run:
    """A model with its sharding and its optimizer."""

    def __init__(self, group, mode: Mode, recomputed: bool = False, model: Any = None):
        self.group, self.model = group, model or toy(recomputed)
        self.sharding = Sharding(
            self.model.parameters(),
            group,
            mode.stage,
            self.model.chains,
            self.model.tables,
            mode.options,
        )
        self.shards = [self.sharding.shard_of(parameter) for parameter in trained(self.model)]
        self.optimizer = adamw(self.shards)

    def backward(self, step: int = 0) -> float:
        total = 0.0
        self.sharding.begin_step(MICRO_BATCHES)
        for micro in range(MICRO_BATCHES):
            loss = self.model(*sample(step, micro, self.group.rank))
            loss.backward()
            self.sharding.end_micro_batch()
            total += loss.item()
        self.sharding.end_backward()
        return total

    def update(self) -> None:
        self.optimizer.step()
        self.sharding.all_gather_parameters()
        self.optimizer.clear_grad(set_to_zero=False)

    def gradients(self) -> dict[str, np.ndarray]:
        return {
            gradient_of(name): gathered(
                self.sharding, parameter, self.sharding.shard_of(parameter).grad
            ).numpy()
            for name, parameter in names(self.model).items()
            if not parameter.stop_gradient
        }

    def values(self) -> dict[str, np.ndarray]:
        return {
            name: self.sharding.gathered_value(parameter).numpy()
            for name, parameter in names(self.model).items()
        }


def train(group, mode: Mode, recomputed: bool) -> dict[str, Any]:
    """Losses of this rank's data, gradients of the first step, parameters after the last one."""
    run = Run(group, mode, recomputed)
    losses, gradients = [], {}
    for step in range(STEPS):
        losses.append(run.backward(step))
        assert all(parameter.grad is None for parameter in run.model.parameters())
        # Gradients are compared too: AdamW would hide a factor that all of them have.
        gradients = gradients or run.gradients()
        run.update()
        assert all(shard.grad is None for shard in run.shards)
    return {"losses": losses} | gradients | run.values()


def step_collectives(group, mode: Mode, recomputed: bool) -> list[Collective]:
    run = Run(group, mode, recomputed)
    with record_collectives() as recording:
        run.sharding.begin_step(MICRO_BATCHES)
        for micro in range(MICRO_BATCHES):
            recording.phase = "forward"
            loss = run.model(*sample(0, micro, group.rank))
            recording.phase = "backward"
            loss.backward()
            recording.phase = "end"
            run.sharding.end_micro_batch()
        run.sharding.end_backward()
        recording.phase = "update"
        run.update()
    return recording.calls


def small_buckets(group, mode: Mode) -> tuple[list[str], dict[str, Any]]:
    """A step's collectives, and `train`, with buckets that cannot hold embedding and `rare`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ELEMENTS", VOCAB * DIM + DIM - 1)
        calls = step_collectives(group, mode, False)
        return [call.kind for call in calls if call.phase in ("end", "update")], train(
            group, mode, False
        )


def storage_between_steps(group, mode: Mode) -> list[str]:
    """Parameters without storage: after construction, after a step, and after an evaluation."""
    run = Run(group, mode)
    found = []
    for moment in (
        lambda: None,
        lambda: (run.backward(), run.update()),
        lambda: evaluated(run, sample(9, 0, 0)),
    ):
        moment()
        found.append([n for n, p in names(run.model).items() if not p._is_initialized()])
    assert found[0] == found[1] == found[2]
    return found[0]


def evaluated(run: Run, batch: tuple) -> float:
    with paddle.no_grad():
        loss = run.model(*batch)
    assert loss.stop_gradient
    return loss.item()


def evaluation(group, mode: Mode) -> tuple[float, float]:
    """Loss with and without a graph, for the same data on every rank."""
    run = Run(group, mode)
    return run.model(*sample(0, 0, 1)).item(), evaluated(run, sample(0, 0, 1))


def memory(group, mode: Mode) -> dict[str, int]:
    """Bytes of a model whose layers are all units, above those before it was made."""
    # Free the models of other checks: a layer and its replaced forward refer to each other.
    gc.collect()
    before = host_memory_stat_current_value("Allocated", 0)
    model = WideStack()
    run = Run(group, mode, model=model)
    x_TD = paddle.ones([2, WIDE])
    figures = {}

    def measure(name: str) -> None:
        figures[name] = host_memory_stat_current_value("Allocated", 0) - before
        figures[f"{name}, peak"] = host_memory_stat_peak_value("Allocated", 0) - before
        host_memory_stat_reset_peak_value("Allocated", 0)

    measure("between steps")
    with paddle.no_grad():
        run.model(x_TD)
    measure("evaluation")
    run.sharding.begin_step(2)
    for name in ("first", "last"):
        loss = run.model(x_TD)
        measure(f"{name} forward")
        loss.backward()
        # The graph holds its inputs.
        del loss
        measure(f"{name} backward")
        run.sharding.end_micro_batch()
    run.sharding.end_backward()
    measure("end of backward")
    run.update()
    moments = run.optimizer._accumulators
    figures["moments"] = sum(
        state.size * state.element_size()
        for kind in ("moment1", "moment2")
        for state in moments[kind].values()
    )
    measure("after step")
    return figures


def order(group, mode: Mode) -> list[str]:
    """Events of a step of one micro-batch: collectives, waits for them, and each unit's computation
    (repeated in the backward pass by activation recomputation)."""
    paddle.seed(5)
    model, events = Toy(), []

    def told(name: str) -> Callable[..., Tensor]:
        def run(forward, *inputs):
            events.append(f"begin {name}")
            output = forward(*inputs)
            events.append(f"end {name}")
            return output

        return run

    for kind, layers in (("block", model.blocks), ("layer", model.layers)):
        for number, layer in enumerate(layers):
            wrap_layer(layer, Level.RECOMPUTE - 1, told(f"{kind} {number}"))
    recompute_layers(model.units)
    wait = Pending.result

    def told_wait(pending: Pending) -> Tensor:
        events.append(f"wait for {pending.kind}")
        return wait(pending)

    run = Run(group, mode, model=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "result", told_wait)
        with observed(lambda call: events.append(call.kind)):
            run.sharding.begin_step(1)
            loss = run.model(*sample(0, 0, group.rank))
            events.append("loss")
            loss.backward()
            run.sharding.end_micro_batch()
            run.sharding.end_backward()
    return events


def tied(group, mode: Mode) -> dict[str, float]:
    """Relative errors of the gradients of a model whose head shares the token table, for the same
    data on every rank."""

    def step(model: Toy, run: Run | None) -> None:
        for micro in range(MICRO_BATCHES):
            model(*sample(0, micro, 0)).backward()
            if run is not None:
                run.sharding.end_micro_batch()

    paddle.seed(5)
    single = Toy(is_tied=True)
    step(single, None)
    paddle.seed(5)
    run = Run(group, mode, model=Toy(is_tied=True))
    run.sharding.begin_step(MICRO_BATCHES)
    step(run.model, run)
    run.sharding.end_backward()
    errors, found = {}, run.gradients()
    for name, parameter in names(single).items():
        if not parameter.stop_gradient:
            wanted = parameter.grad.numpy() * group.nranks
            error = np.abs(found[gradient_of(name)] - wanted).max()
            errors[name] = float(error / np.abs(wanted).max())
    return errors


def text_last(group, mode: Mode) -> tuple[float, list[str]]:
    """Largest relative gradient error of a step whose last micro-batch runs no block on any rank,
    and the kinds of that micro-batch's collectives."""

    def loss(model: Toy, micro: int, rank: int) -> Tensor:
        ids_T, pixels_TD, uses_rare = sample(0, micro, rank)
        return model(ids_T, pixels_TD if micro == 0 else None, uses_rare)

    single, run = toy(), Run(group, mode)
    for micro in range(MICRO_BATCHES):
        for rank in range(group.nranks):
            loss(single, micro, rank).backward()
    run.sharding.begin_step(MICRO_BATCHES)
    with record_collectives() as recording:
        for micro in range(MICRO_BATCHES):
            recording.phase = f"micro-batch {micro}"
            loss(run.model, micro, group.rank).backward()
            run.sharding.end_micro_batch()
        run.sharding.end_backward()
    found, errors = run.gradients(), []
    for name, parameter in names(single).items():
        if not parameter.stop_gradient:
            wanted = parameter.grad.numpy()
            error = np.abs(found[gradient_of(name)] - wanted).max()
            errors.append(float(error / np.abs(wanted).max()))
    return max(errors), [call.kind for call in recording.of("micro-batch 1")]


def half_bytes(group, mode: Mode) -> list[tuple[str, int]]:
    """dtype and bytes of each reduction in a step of a model with a bfloat16 weight."""
    run = Run(group, mode, model=HalfModel())
    with record_collectives() as recording:
        run.sharding.begin_step(2)
        for _ in range(2):
            run.model(paddle.ones([1, 3])).backward()
            run.sharding.end_micro_batch()
        run.sharding.end_backward()
    calls = [call for call in recording.calls if call.kind == "reduce_scatter"]
    return [(call.dtype, call.num_bytes) for call in calls]


def round_trip(group, mode: Mode) -> list[str]:
    """Parameters whose gathered shards differ from the original."""
    run = Run(group, mode)
    run.backward()
    run.update()
    wrong = []
    for name, parameter in names(run.model).items():
        whole = run.sharding.gathered_value(parameter).numpy()
        own = run.sharding.own_shard(parameter, whole)
        length = -(-parameter.size // group.nranks)
        back = gathered(run.sharding, parameter, paddle.to_tensor(own)).numpy()
        doubled = gathered(run.sharding, parameter, paddle.to_tensor(2 * own)).numpy()
        if own.shape != (length,) or not (
            np.array_equal(back, whole) and np.array_equal(doubled, 2 * whole)
        ):
            wrong.append(name)
        if not parameter.stop_gradient and not np.array_equal(
            run.sharding.shard_of(parameter).numpy(), own
        ):
            wrong.append(f"shard of {name}")
    return wrong


def restored(group, mode: Mode) -> list[str]:
    """Parameters that did not take the values written to their shards."""
    run = Run(group, mode)
    with paddle.no_grad():
        # At stage 3 this prefetches the next block, whose values then change before it is used.
        run.model.blocks[0](paddle.ones([1, DIM]))
    divided = [n for n, p in names(run.model).items() if not (p.stop_gradient and mode.stage < 3)]
    divided = [name for name in divided if name != "fixed"]
    wanted = {}
    for name in divided:
        parameter = names(run.model)[name]
        wanted[name] = np.random.default_rng(1).normal(size=parameter.shape).astype(np.float32)
        own = run.sharding.own_shard(parameter, wanted[name])
        run.sharding.shard_of(parameter).set_value(own)
    run.sharding.all_gather_parameters()
    values = run.values()
    wrong = [name for name in divided if not np.array_equal(values[name], wanted[name])]
    loss = evaluated(run, sample(0, 0, 0))
    plain = toy()
    for name, value in wanted.items():
        names(plain)[name].set_value(value)
    return wrong if loss == plain(*sample(0, 0, 0)).item() else [*wrong, "loss"]


def overlapping(group, mode: Mode) -> float:
    """Largest gradient difference when two forward passes precede two backward passes, as in a
    pipeline. One unit runs twice in each."""
    gradients = []
    for is_overlapped in (False, True):
        run = Run(group, mode)

        def loss(micro, run=run):
            ids_T, pixels_TD, _ = sample(0, micro, group.rank)
            block = run.model.blocks[0]
            return run.model(ids_T, block(pixels_TD), False)

        if is_overlapped:
            for part in [loss(0), loss(1)]:
                part.backward()
                run.sharding.end_micro_batch()
        else:
            for micro in range(2):
                loss(micro).backward()
                run.sharding.end_micro_batch()
        run.sharding.end_backward()
        gradients.append([shard.grad.numpy() for shard in run.shards])
    return max(float(np.abs(a - b).max()) for a, b in zip(*gradients, strict=True))


def never_used(group, mode: Mode) -> list[str]:
    """Parameters whose shards have wrong gradients when no unit runs and only `rare` is used."""
    run = Run(group, mode)
    (run.model.rare * 2.0).sum().backward()
    run.sharding.end_micro_batch()
    run.sharding.end_backward()
    wrong = []
    for name, parameter in names(run.model).items():
        if not parameter.stop_gradient:
            value = 2.0 * group.nranks if name == "rare" else 0.0
            wanted = run.sharding.own_shard(parameter, np.full(parameter.shape, value))
            if not np.array_equal(run.sharding.shard_of(parameter).grad.numpy(), wanted):
                wrong.append(name)
    return wrong


def half_gradients(group, mode: Mode) -> tuple[str, set[float]]:
    """dtype and values of a bfloat16 gradient whose micro-batches add 256, 1, 1 and 1."""
    run = Run(group, mode, model=HalfModel())
    run.sharding.begin_step(4)
    for value in (256.0, 1.0, 1.0, 1.0):
        run.model(paddle.full([1, 3], value)).backward()
        run.sharding.end_micro_batch()
    run.sharding.end_backward()
    weight = run.model.units[0].weight
    grad = run.sharding.shard_of(weight).grad
    whole = gathered(run.sharding, weight, grad)
    return str(grad.dtype), set(whole.numpy().reshape(-1).tolist())


def specs(group) -> list[tuple[bool, bool]]:
    """For two shards: whether they have a spec of their own, and their `is_distributed`."""
    model, table = toy(), ParameterTable()
    table.add(model.parameters())
    model.head.weight.is_distributed = True
    sharding = Sharding(model.parameters(), group, 2)
    shards = [sharding.shard_of(p) for p in (model.rare, model.head.weight)]
    return [(shard in table, shard.is_distributed) for shard in shards]


def refused(group) -> dict[str, str]:
    """Error messages of wrong uses."""
    messages = {}

    def refuse(name, error, function):
        with pytest.raises(error) as raised:
            function()
        messages[name] = str(raised.value)

    run = Run(group, MODES["2"])
    refuse("frozen", ValueError, lambda: run.sharding.shard_of(run.model.fixed))
    weight = run.model.blocks[0].proj.weight
    refuse("shape", ValueError, lambda: run.sharding.own_shard(weight, np.zeros([2, 3])))
    weight.sum().backward()
    refuse("outside", RuntimeError, run.sharding.end_micro_batch)
    freed = Run(group, MODES["3"]).model.blocks[0].proj.weight
    refuse("no storage", RuntimeError, lambda: freed.sum())
    return messages


def worker() -> dict:
    group = initialize(ParallelDegrees(sharding_degree=RANKS)).sharding_group
    checks: dict[str, Any] = {"single": single_run}
    for name, mode in MODES.items():
        for recomputed in (False, True):
            case = f"{name} {recomputed}"
            checks[f"train {case}"] = partial(train, group, mode, recomputed)
            checks[f"collectives {case}"] = partial(step_collectives, group, mode, recomputed)
        checks[f"again {name}"] = partial(train, group, mode, False)
        checks[f"small buckets {name}"] = partial(small_buckets, group, mode)
        for check in (
            storage_between_steps,
            evaluation,
            memory,
            round_trip,
            restored,
            overlapping,
            never_used,
            half_gradients,
            tied,
            text_last,
        ):
            checks[f"{check.__name__} {name}"] = partial(check, group, mode)
        if mode.stage > 1:
            checks[f"order {name}"] = partial(order, group, mode)
            checks[f"half_bytes {name}"] = partial(half_bytes, group, mode)
    for name, mode in HALVES.items():
        checks[f"half_gradients {name}"] = partial(half_gradients, group, mode)
        checks[f"half_bytes {name}"] = partial(half_bytes, group, mode)
    return run_checks(checks | {"specs": partial(specs, group), "refused": partial(refused, group)})
