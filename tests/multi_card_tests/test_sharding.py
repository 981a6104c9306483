"""Sharding stages 1 (fleet's DygraphShardingOptimizerV2), 2 and 3 on 2 ranks against one device;
stage 1 (heavy) on 3 and 2 x 2 ranks too.

The model has units that save weights in every way, frozen parameters inside and outside of units,
sizes that no group size divides, a parameter that only one rank uses, and a learning rate and decay
per parameter. Each rank has its own data. Guarantees, with every option:

- losses, norms, gradients, and every parameter and moment after three clipped steps of two
  micro-batches equal one device's, with and without recomputation and with a tied head; a second
  run, overlapped reductions and gathers, and fused states change no bit;
- every rank issues the same collectives, in the stated number; the next unit is prefetched before a
  unit computes; a reduction is awaited after the next unit's backward pass;
- at stage 3, parameters of units and tables have no storage between steps, and evaluation works;
- memory of gradients, parameters and moments is that of the stage, and at most two units are
  unsharded at a time;
- two forward passes may precede two backward passes; units that do not run are not gathered, and
  their gradients are reduced as zeros;
- bfloat16 gradients are accumulated in float32, and `reduce_dtype` halves the reduced bytes;
- shards are read, written and gathered for checkpoints, and continue to the bit; a step with an
  infinite norm changes nothing; wrong use is refused.

Every check runs and asserts on every rank.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import Tensor
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
from paddle_vl.parallel.sharding import ShardingOptions, buckets
from paddle_vl.parallel.sharding.buckets import Pending
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing import first_difference
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.sharding_memory import (
    Elements,
    ModelElements,
    at_peak,
    gradient_sums_of,
    passing_bytes,
)
from tests.support.sharding_models import (
    DIM,
    NUM_BLOCKS,
    NUM_LAYERS,
    NUM_WIDE,
    RATE,
    VOCAB,
    WIDE,
    WIDE_BYTES,
    HalfModel,
    Mode,
    Run,
    Toy,
    WideStack,
    sample,
    toy,
    trained,
)
from tests.support.tolerance import TOPOLOGY

STEPS, MICRO_BATCHES = 3, 2
# At size 0 each parameter has its own buffer.
EACH, OVERLAP = {"comm_buffer_size_MB": 0}, {"comm_overlap": True}
FUSED = {"enable_fuse_optimizer_states": True}
FLEETS = {
    "1": Mode(1),
    "1 a buffer each": Mode(1, fleets=EACH),
    "1 overlap": Mode(1, fleets=OVERLAP),
    "1 overlap, a buffer each": Mode(1, fleets=OVERLAP | EACH),
    "1 fused states": Mode(1, fleets=FUSED),
    "1 gathers overlap": Mode(1, overlaps_gathers=True),
    "1 gathers overlap, a buffer each": Mode(1, fleets=EACH, overlaps_gathers=True),
    "1 all": Mode(1, fleets=OVERLAP | EACH | FUSED, overlaps_gathers=True),
}
OWN = {
    "2": Mode(2),
    "2 once": Mode(2, ShardingOptions(reduce_once_per_step=True)),
    "3": Mode(3),
    "3 kept": Mode(3, ShardingOptions(reshard_after_forward=False)),
}
HALVES = {
    f"{name} bfloat16": Mode(OWN[name].stage, replace(OWN[name].options, reduce_dtype="bfloat16"))
    for name in ("2", "2 once", "3")
}
MODES = FLEETS | OWN | HALVES
# Each option of stage 1 alone is for two ranks; others have none, the buffers of parameters, all.
FEW = ("1", "1 a buffer each", "1 all")
UNITS = NUM_BLOCKS + NUM_LAYERS
TABLES = ("embedding.", "head.")
# For inputs and activations in the memory checks.
SLACK = WIDE_BYTES // 8
GATHER, REDUCE = "all_gather", "reduce_scatter"


def own_batches(run: Run, step: int = 0) -> list[tuple]:
    """Fleet's overlapped reductions need each gradient in every micro-batch or in none."""
    rank, always = run.ranks.data_rank, run.mode.stage == 1
    return [sample(step, micro, rank, always) for micro in range(MICRO_BATCHES)]


def made(topology: Topology, name: str, recomputed: bool = False) -> Run:
    return Run(toy(recomputed), topology, MODES[name])


def of_all(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = []
    dist.all_gather_object(found, value)
    return found


@cache
def single(num_ranks: int, stage_is_1: bool) -> dict[str, Any]:
    """One device that trains on the data of all ranks."""
    of_steps = [
        [
            sample(step, micro, rank, stage_is_1)
            for micro in range(MICRO_BATCHES)
            for rank in range(num_ranks)
        ]
        for step in range(STEPS)
    ]
    return Run(toy(), None).train(of_steps)


def assert_close(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = np.abs(np.subtract(found[name], value)).max() / max(np.abs(value).max(), 1e-12)
        assert error <= TOPOLOGY, f"{name} differs by {error}"


def assert_same(found: dict, wanted: dict) -> None:
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def trained_run(topology: Topology, name: str, recomputed: bool = False) -> dict[str, Any]:
    run = made(topology, name, recomputed)
    found = run.train([own_batches(run, step) for step in range(STEPS)])
    assert all(parameter.grad is None for parameter in run.model.parameters())
    return found


@cache
def once(topology: Topology, name: str) -> dict[str, Any]:
    return trained_run(topology, name)


def equals_one_device(topology: Topology, name: str, found: dict | None = None) -> None:
    found = dict(found or once(topology, name))
    found["losses"] = np.sum(of_all(found["losses"]), axis=0)
    assert_close(found, single(topology.data_size, MODES[name].stage == 1))


def recomputed_equals_one_device(topology: Topology, name: str) -> None:
    equals_one_device(topology, name, trained_run(topology, name, recomputed=True))


def has_the_same_bits(topology: Topology, name: str) -> None:
    """Again, or without overlap and fused states."""
    plain = name
    if name in FLEETS and name != "1":
        # Another buffer size cuts parameters elsewhere, and norms are summed in another order.
        plain = "1 a buffer each" if "comm_buffer_size_MB" in FLEETS[name].fleets else "1"
    found = trained_run(topology, name) if plain == name else once(topology, name)
    assert_same(found, once(topology, plain))


def step_collectives(run: Run, step: int = 0) -> list[Collective]:
    with record_collectives() as recording:
        run.trained.begin_step(MICRO_BATCHES)
        for batch in own_batches(run, step):
            recording.phase = "forward"
            loss = run.model(*batch)
            recording.phase = "backward"
            loss.backward()
            recording.phase = "end"
            run.trained.end_micro_batch()
        run.sum_gradients()
        recording.phase = "update"
        run.optimizer.step(RATE)
        run.optimizer.clear_gradients()
    return recording.calls


def kinds_of(calls: Iterable[Collective], *phases: str) -> list[str]:
    return [call.kind for call in calls if call.phase in phases]


def fleet_sends_the_stated_collectives(topology: Topology, name: str) -> None:
    run = made(topology, name)
    step_collectives(run)
    own = step_collectives(run, 1)
    of_ranks = of_all([call._replace(phase="") for call in own])
    assert first_difference(of_ranks) is None
    found = {p: Counter(kinds_of(own, p)) for p in ("forward", "backward", "end", "update")}
    fleets, num_trained = FLEETS[name].fleets, len(trained(run.model))
    num_buffers = num_trained if "comm_buffer_size_MB" in fleets else 1
    early = found["backward"][REDUCE]
    assert found["forward"] == Counter()
    if "comm_overlap" not in fleets:
        assert early == 0
    elif topology.data_rank > 0:
        # The bucket of the parameter that this rank does not use, and those after it, come late.
        assert early < num_buffers
        assert early > 0 or num_buffers == 1
    # Of the part of each buffer over dp, the last one's and those after it at the end.
    sums = Counter(all_reduce=num_buffers) if topology.world_size == 4 else Counter()
    assert found["backward"]["all_reduce"] == (early - 1 if early and sums else 0)
    assert found["backward"] + found["end"] == Counter({REDUCE: num_buffers}) + sums
    assert found["update"] == Counter({GATHER: num_buffers})
    sent = {kind: sum(c.num_bytes for c in own if c.kind == kind) for kind in (GATHER, REDUCE)}
    assert sent[REDUCE] == sent[GATHER] * topology.sharding_group.nranks


def sends_the_stated_collectives(topology: Topology, name: str) -> None:
    # The root's gradients fit in one bucket. At stage 2, tables are not units.
    units, times, whole = [REDUCE] * UNITS, MICRO_BATCHES, [GATHER] * (UNITS + len(TABLES))
    # The head's gradient is reduced at once. Then each chain gathers its last unit; every other
    # unit is gathered before the unit behind it computes.
    chains = [NUM_LAYERS, NUM_BLOCKS]
    ahead = [kind for n in chains for kind in [GATHER, *[GATHER, REDUCE] * (n - 1), REDUCE]]
    forward, backward, end, update = {
        "2": ([], units * times, 1 * times, 1 + UNITS),
        "2 once": ([], units, 1, 1 + UNITS),
        "3": (whole * times, [REDUCE, *ahead] * times, 2 * times, 1),
        "3 kept": (whole, [REDUCE, *units] * times, 2 * times, 1),
    }[name]
    for recomputed in (False, True):
        run = made(topology, name, recomputed)
        calls = step_collectives(run)
        assert of_all(calls) == [calls] * topology.world_size
        assert kinds_of(calls, "forward") == forward
        assert kinds_of(calls, "backward") == backward
        assert kinds_of(calls, "end") == [REDUCE] * end
        assert kinds_of(calls, "update") == [GATHER] * update


def divides_a_large_bucket(topology: Topology, name: str) -> None:
    """Buckets that cannot hold embedding and `rare`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ELEMENTS", VOCAB * DIM + DIM - 1)
        calls = step_collectives(made(topology, name))
        equals_one_device(topology, name, trained_run(topology, name))
    # Embedding, rare and head; at stage 3 only rare, when the embedding's is reduced too.
    stage = MODES[name].stage
    root = {2: 3, 3: 1}[stage]
    times = 1 if name == "2 once" else MICRO_BATCHES
    wanted = [REDUCE] * (root + (stage == 3)) * times
    assert kinds_of(calls, "end", "update") == wanted + [GATHER] * (root + UNITS * (stage == 2))


def events_of(topology: Topology, name: str) -> list[str]:
    """Of a step of one micro-batch: collectives, waits for them, and each unit's computation
    (repeated in the backward pass by activation recomputation)."""
    paddle.seed(5)
    model, events = Toy(), []

    def told(unit: str) -> Callable[..., Tensor]:
        def run(forward, *inputs):
            events.append(f"begin {unit}")
            output = forward(*inputs)
            events.append(f"end {unit}")
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

    run = Run(model, topology, MODES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "result", told_wait)
        with observed(lambda call: events.append(call.kind)):
            run.trained.begin_step(1)
            loss = run.model(*own_batches(run)[0])
            events.append("loss")
            loss.backward()
            run.trained.end_micro_batch()
            run.trained.end_backward()
    return events


def passes(unit: str, *first: str) -> list[str]:
    """Events of a unit's computation, after the events right before it."""
    return [*first, f"begin {unit}", f"end {unit}"]


SENT, CAME = "wait for reduce_scatter", "wait for all_gather"


def gathers_ahead_and_reduces_behind(topology: Topology, name: str) -> None:
    """In a backward pass, the computation is the recomputation before the unit's own backward."""
    events = events_of(topology, name)
    running = np.cumsum([(event == REDUCE) - (event == SENT) for event in events])
    assert set(running) == {0, 1}
    assert running[-1] == 0
    if MODES[name].stage < 3:
        return
    forward = [
        *passes("block 0", GATHER, CAME, GATHER),
        *passes("block 1", CAME),
        *[GATHER, CAME],
        *passes("layer 0", GATHER, CAME, GATHER),
        *passes("layer 1", CAME, GATHER),
        *passes("layer 2", CAME),
        *[GATHER, CAME, "loss"],
    ]
    backward = [
        REDUCE,
        *passes("layer 2", GATHER, CAME, GATHER),
        *passes("layer 1", SENT, REDUCE, CAME, GATHER),
        *passes("layer 0", SENT, REDUCE, CAME),
        *passes("block 1", SENT, REDUCE, GATHER, CAME, GATHER),
        *passes("block 0", SENT, REDUCE, CAME),
    ]
    if name == "3 kept":
        # What is kept is not gathered again.
        backward = [event for event in backward if event not in (GATHER, CAME)]
    assert events == [*forward, *backward, SENT, REDUCE, SENT, REDUCE, SENT, REDUCE, SENT]


def allows_a_tied_head(topology: Topology, name: str) -> None:
    """A head that shares the token table, for the same data on every rank."""
    paddle.seed(5)
    whole = Run(Toy(is_tied=True), None)
    whole.backward([sample(0, micro, 0) for micro in range(MICRO_BATCHES)] * 2)
    paddle.seed(5)
    run = Run(Toy(is_tied=True), topology, MODES[name])
    run.backward([sample(0, micro, 0) for micro in range(MICRO_BATCHES)])
    assert_close(run.gradients(), whole.gradients())


def gathers_no_units_that_do_not_run(topology: Topology, name: str) -> None:
    """In a step whose last micro-batch runs no block on any rank."""

    def without(micro: int, rank: int) -> tuple:
        ids_T, pixels_TD, uses_rare = sample(0, micro, rank)
        return ids_T, pixels_TD if micro == 0 else None, uses_rare

    whole, run = Run(toy(), None), made(topology, name)
    whole.backward([without(micro, rank) for micro in range(MICRO_BATCHES) for rank in (0, 1)])
    run.trained.begin_step(MICRO_BATCHES)
    with record_collectives() as recording:
        for micro in range(MICRO_BATCHES):
            recording.phase = f"micro-batch {micro}"
            run.model(*without(micro, topology.data_rank)).backward()
            run.trained.end_micro_batch()
        run.trained.end_backward()
    assert_close(run.gradients(), whole.gradients())
    kinds, tables = kinds_of(recording.calls, "micro-batch 1"), len(TABLES)
    assert (kinds.count(GATHER), kinds.count(REDUCE)) == {
        "2": (0, NUM_LAYERS + 1),
        # The blocks' gradients of the first micro-batch are included.
        "2 once": (0, UNITS + 1),
        "3": (2 * NUM_LAYERS + tables, NUM_LAYERS + tables + 1),
        "3 kept": (0, NUM_LAYERS + tables + 1),
    }[name]


def evaluated(run: Run, batch: tuple) -> float:
    with paddle.no_grad():
        loss = run.model(*batch)
    assert loss.stop_gradient
    return loss.item()


def has_no_storage_between_steps(topology: Topology, name: str) -> None:
    """After construction, after a step and after an evaluation, which gives the training loss."""
    run = made(topology, name)
    names = [name for name, _ in run.model.named_parameters()]
    divided = {name for name in names if name.startswith(("blocks.", "layers.", *TABLES))}
    for moment in (
        lambda: None,
        lambda: (run.backward(own_batches(run)), run.update()),
        lambda: evaluated(run, sample(9, 0, 0)),
    ):
        moment()
        without = {n for n, p in run.model.named_parameters() if not p._is_initialized()}
        assert without == (divided if MODES[name].stage == 3 else set())
    assert run.model(*sample(0, 0, 1)).item() == evaluated(run, sample(0, 0, 1))


def memory_of(topology: Topology, name: str) -> dict[str, int]:
    """Bytes of a model whose layers are all units, above those before it was made."""
    # Free the models of other checks: a layer and its replaced forward refer to each other.
    gc.collect()
    before = host_memory_stat_current_value("Allocated", 0)
    run = Run(WideStack(), topology, MODES[name])
    x_TD, figures = paddle.ones([2, WIDE]), {}

    def measure(moment: str) -> None:
        figures[moment] = host_memory_stat_current_value("Allocated", 0) - before
        figures[f"{moment}, peak"] = host_memory_stat_peak_value("Allocated", 0) - before
        host_memory_stat_reset_peak_value("Allocated", 0)

    measure("between steps")
    with paddle.no_grad():
        run.model(x_TD)
    measure("evaluation")
    run.trained.begin_step(2)
    for number in ("first", "last"):
        loss = run.model(x_TD)
        measure(f"{number} forward")
        loss.backward()
        # The graph holds its inputs.
        del loss
        measure(f"{number} backward")
        run.trained.end_micro_batch()
    run.trained.end_backward()
    measure("end of backward")
    run.optimizer.step(RATE)
    run.optimizer.clear_gradients()
    measure("after step")
    return figures


def memory_is_what_the_stages_promise(topology: Topology) -> None:
    size, whole, peaks = topology.world_size, NUM_WIDE * WIDE_BYTES, {}
    part, unit = whole // size, Elements(WIDE_BYTES // 4)
    model = ModelElements(Elements(whole // 4), Elements(), unit, 0, 4)
    about = partial(pytest.approx, abs=SLACK)
    for name, (stage, options, *_) in OWN.items():
        found = memory_of(topology, name)
        # With both moments.
        between = (part if stage == 3 else whole + part) + 2 * part
        for moment in ("between steps", "evaluation", "after step"):
            assert found[moment] == about(between), (name, moment)
        # Gradients are either full, or sharded plus one unit's that is being reduced.
        is_once = options.reduce_once_per_step
        first = found["first backward"] - found["first forward"]
        assert first == about(whole if is_once else part + WIDE_BYTES)
        assert found["end of backward"] == about(between + part)
        most = at_peak(model, stage, size, 2, options).total + passing_bytes(model, stage, options)
        peaks[name] = max(
            found[f"{n} {kind}, peak"]
            for n in ("first", "last")
            for kind in ("forward", "backward")
        )
        # The peak adds the shard that this rank receives from the running reduction.
        assert most - WIDE_BYTES <= peaks[name] <= most + WIDE_BYTES // size + SLACK, name
        if name == "3":
            # Two units are unsharded at a time; the third is gloo's copy of what it gathers.
            assert found["evaluation, peak"] == about(3 * part + 3 * WIDE_BYTES)
    assert peaks["3"] < peaks["3 kept"] < peaks["2 once"]
    assert peaks["2"] < peaks["2 once"]


def writes_and_gathers_shards(topology: Topology, name: str) -> None:
    """Own parts gathered are the whole, and values written to shards reach the model."""
    run, stage = made(topology, name), MODES[name].stage
    run.backward(own_batches(run))
    run.update()
    if stage > 1:
        for parameter in trained(run.model):
            own = run.trained.own_shard(parameter, run.trained.gathered_value(parameter).numpy())
            assert own.shape == (-(-parameter.size // topology.world_size),)
            np.testing.assert_array_equal(run.trained.shard_of(parameter).numpy(), own)
        with paddle.no_grad():
            # At stage 3 this prefetches the next block, whose values then change before their use.
            run.model.blocks[0](paddle.ones([1, DIM]))
    wanted = {}
    for key, parameter in run.model.named_parameters():
        # At stage 3 frozen parameters of units have shards too.
        if parameter.stop_gradient and (stage < 3 or key == "fixed"):
            continue
        wanted[key] = np.random.default_rng(1).normal(size=parameter.shape).astype(np.float32)
        own, updated = (
            run.trained.own_shard(parameter, wanted[key]), run.trained.shard_of(parameter),
        )  # fmt: skip
        assert (updated is None) == (own.size == 0)
        if updated is not None:
            updated.set_value(own)
    run.trained.all_gather_parameters()
    found, plain = run.parameters(), toy()
    assert_same(found, wanted)
    for key, parameter in plain.named_parameters():
        parameter.set_value(found[key])
    assert evaluated(run, sample(0, 0, 0)) == plain(*sample(0, 0, 0)).item()


def allows_two_forwards_before_two_backwards(topology: Topology, name: str) -> None:
    """As in a pipeline. One unit runs twice in each."""
    gradients = []
    for is_overlapped in (False, True):
        run = made(topology, name)

        def loss(micro: int, run: Run = run) -> Tensor:
            ids_T, pixels_TD, _ = sample(0, micro, topology.data_rank)
            return run.model(ids_T, run.model.blocks[0](pixels_TD), False)

        pending = [loss(0), loss(1)] if is_overlapped else [None, None]
        for micro, part in enumerate(pending):
            (loss(micro) if part is None else part).backward()
            run.trained.end_micro_batch()
        run.trained.end_backward()
        gradients.append(run.gradients())
    assert_same(*gradients)


def unused_parameters_have_zeros(topology: Topology, name: str) -> None:
    """No unit runs and only `rare` is used."""
    run = made(topology, name)
    (run.model.rare * 2.0).sum().backward()
    run.trained.end_micro_batch()
    run.trained.end_backward()
    for key, grad in run.gradients().items():
        value = 2.0 * topology.world_size if key.endswith(" rare") else 0.0
        np.testing.assert_array_equal(grad, np.full_like(grad, value), err_msg=key)


def adds_bfloat16_in_float32(topology: Topology, name: str) -> None:
    """A bfloat16 gradient whose micro-batches add 256, 1, 1 and 1; in bfloat16 256 + 1 is 256."""
    model = HalfModel()
    run = Run(model, topology, MODES[name])
    is_fleets = name in FLEETS
    batches = [(paddle.full([1, 3], value),) for value in (256.0, 1.0, 1.0, 1.0)]
    run.backward(batches, begins=not is_fleets or "overlap" in name)
    if is_fleets:
        assert {str(total.dtype) for total in gradient_sums_of(run.trained)} == {"paddle.float32"}
    grad = run.gradients()["gradient of units.0.weight"]
    assert grad.dtype == np.float32
    # A reduction in bfloat16 rounds the sum of 259 to 260, but not one micro-batch's gradient.
    whole = 260.0 if name == "2 once bfloat16" else 259.0
    np.testing.assert_allclose(grad, whole * topology.world_size, rtol=1e-6 if is_fleets else 0)


def reductions_of(topology: Topology, name: str) -> list[Collective]:
    run = Run(HalfModel(), topology, MODES[name])
    with record_collectives() as recording:
        run.backward([(paddle.ones([1, 3]),)] * 2)
    return [call for call in recording.calls if call.kind == REDUCE]


def halves_the_bytes(topology: Topology, name: str) -> None:
    halves, whole = (reductions_of(topology, n) for n in (name, name.removesuffix(" bfloat16")))
    assert {call.dtype for call in halves} == {"bfloat16"}
    assert {call.dtype for call in whole} == {"float32"}
    assert [2 * call.num_bytes for call in halves] == [call.num_bytes for call in whole]


def continues_bit_by_bit(topology: Topology, name: str) -> None:
    run = made(topology, name)
    run.train([own_batches(run, step) for step in range(STEPS - 1)])
    saved = run.values()
    wanted = run.train([own_batches(run, STEPS - 1)])
    model = toy()
    for key, parameter in model.named_parameters():
        parameter.set_value(saved[key])
    other = Run(model, topology, MODES[name])
    other.optimizer.load_state({key: array for key, array in saved.items() if "/" in key})
    assert_same(other.train([own_batches(other, STEPS - 1)]), wanted)


def skips_a_step_that_is_not_finite(topology: Topology, name: str) -> None:
    run, plain = made(topology, name), made(topology, name)
    for each in (run, plain):
        each.train([own_batches(each)])
    before = run.values()
    batches = own_batches(run, 1)
    if topology.rank == 0:
        batches = [(ids_T, pixels_TD * np.inf, uses) for ids_T, pixels_TD, uses in batches]
    run.train([batches])
    assert_same(run.values(), before)
    for each in (run, plain):
        each.train([own_batches(each, 2)])
    assert_same(run.values(), plain.values())


def is_fleets_class_with_its_buffer(topology: Topology, name: str) -> None:
    """And all optimizer states share the buffer after a step."""
    run = made(topology, name)
    optimizer, inner = run.trained.optimizer, run.trained.optimizer._inner_opt
    found = type(optimizer).__name__, type(inner).__name__
    assert found == ("DygraphShardingOptimizerV2", "AdamW")
    assert type(optimizer).__module__.endswith("dygraph_optimizer.dygraph_sharding_optimizer")
    run.train([own_batches(run)])
    buffer = run.optimizer._adamw.fused_states_buffer
    states = run.optimizer.state_tensors().values()
    assert all(state._is_shared_buffer_with(buffer) for state in states)


def shards_keep_what_fleet_reads(topology: Topology, name: str) -> None:
    """At stage 1 slices have the specs of their parameters, and otherwise shards none."""
    model = toy()
    model.head.weight.is_distributed = True
    run = Run(model, topology, MODES[name])
    for parameter in (model.rare, model.head.weight):
        if (shard := run.trained.shard_of(parameter)) is None:
            continue
        assert shard.is_distributed == (parameter is model.head.weight)
        if name == "1":
            spec = next(spec for each, spec in run.optimizer.tensors_with_specs if each is shard)
            assert spec is run.table[parameter]
        else:
            table = ParameterTable()
            table.add(model.parameters())
            assert shard not in table


def refuses_wrong_use(topology: Topology, name: str) -> None:
    run = made(topology, name)
    weight = run.model.blocks[0].proj.weight
    with pytest.raises(ValueError, match="is not sharded: frozen"):
        run.trained.shard_of(run.model.fixed)
    with pytest.raises(ValueError, match=r"\[2, 3\] to take a shard of does not have the shape"):
        run.trained.own_shard(weight, np.zeros([2, 3]))
    if name == "2":
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="got a gradient outside of it"):
            run.trained.end_micro_batch()
    if name == "3":
        with pytest.raises(RuntimeError, match="not initialized"):
            weight.sum()


CHECKS: dict[Callable[[Topology, str], None], Iterable[str]] = {
    equals_one_device: [*FLEETS, *OWN],
    recomputed_equals_one_device: OWN,
    has_the_same_bits: [*FLEETS, *OWN],
    fleet_sends_the_stated_collectives: FLEETS,
    sends_the_stated_collectives: OWN,
    divides_a_large_bucket: OWN,
    gathers_ahead_and_reduces_behind: OWN,
    allows_a_tied_head: OWN,
    gathers_no_units_that_do_not_run: OWN,
    has_no_storage_between_steps: OWN,
    writes_and_gathers_shards: ["1", *OWN],
    allows_two_forwards_before_two_backwards: OWN,
    unused_parameters_have_zeros: OWN,
    adds_bfloat16_in_float32: ["1", "1 overlap", *OWN, *HALVES],
    halves_the_bytes: HALVES,
    continues_bit_by_bit: ["1", "1 fused states", "1 all", "2", "3"],
    skips_a_step_that_is_not_finite: ["1", "2", "3"],
    is_fleets_class_with_its_buffer: ["1 fused states"],
    shards_keep_what_fleet_reads: ["1", "2"],
    refuses_wrong_use: ["1", "2", "3"],
}
CASES = {
    f"{check.__name__}, {name}": (check, name) for check, names in CHECKS.items() for name in names
}
_BY_OPTION = (equals_one_device, has_the_same_bits, fleet_sends_the_stated_collectives)
OF_FLEET = [
    case
    for case, (check, name) in CASES.items()
    if name in FEW or (name in FLEETS and check not in _BY_OPTION)
]
# Averages over three ranks are rounded.
MORE_RANKS = {
    "3": (3, {"sharding_degree": 3}), "2 x 2": (4, {"sharding_degree": 2, "dp_degree": 2}),
}  # fmt: skip


def worker(degrees: dict[str, int], cases: list[str]) -> dict:
    topology = initialize(ParallelDegrees(**degrees, num_micro_batches=MICRO_BATCHES))
    checks = {case: partial(CASES[case][0], topology, CASES[case][1]) for case in cases}
    if len(cases) == len(CASES):
        checks["memory"] = partial(memory_is_what_the_stages_promise, topology)
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 2, arguments=({"sharding_degree": 2}, list(CASES)), timeout=300)


@pytest.mark.parametrize("case", [*CASES, "memory"])
def test_on_two_ranks(outcomes, case):
    outcome_of(outcomes, case)


@pytest.fixture(scope="module", params=MORE_RANKS)
def outcomes_of_more(request):
    ranks, degrees = MORE_RANKS[request.param]
    return launch(worker, ranks, arguments=(degrees, OF_FLEET), timeout=300)


@pytest.mark.heavy
@pytest.mark.parametrize("case", OF_FLEET)
def test_stage_1_on_more_ranks(outcomes_of_more, case):
    outcome_of(outcomes_of_more, case)
