"""Qwen3-VL on slices of its token rows, against one device.

Guarantees, on two context-parallel ranks, and on two times two tensor-parallel ones with sequence
parallelism, by the gather of keys and by the exchange of heads: loss, its parts by source, and
every gradient are those of one device, for rows with images and videos, packed rows, rows of text
and experts with their balance, in the checked mode of the visual indices, from the patches of a
rank's own items and (experts) from all; each item is encoded once; a layer sends the bytes of the
formula and keeps those of the slice and the keys of all. With a hidden gather the bits are the
same, and attention runs between the start and the end of half of its collectives. All with the
kernels of a command, also at the quickstart's head width; and some with the others.
"""

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.base.core import host_memory_stat_current_value

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.batch.row_slices import own_indices
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import checked_values
from paddle_vl.families.vlm.inputs.collate import (
    PackedCollator,
    SourcesCollator,
    VLCollator,
    prepared,
)
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.families.vlm.training.objective import sliced
from paddle_vl.families.vlm.training.own_pixels import with_own_pixels
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel import context_parallel
from paddle_vl.parallel.collectives import all_reduce_gradients, all_reduce_partial_gradients
from paddle_vl.parallel.context_parallel import ContextGroup
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recorder import Collective, observed, record_collectives
from paddle_vl.parallel.sharding.buckets import Pending
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing.qwen3_vl import IMAGE, MIXED, VIDEO, Image, Video, tiny_qwen3_vl_batch
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.implementations import implementation
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.states import stored_gradients, worst_gradient
from tests.support.tiny import tiny_model
from tests.support.tolerance import TOPOLOGY

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "output_router_logits": True, "router_aux_loss_coef": 1.0,
}  # fmt: skip
SAMPLES: dict[str, list[Any]] = {
    "images and videos": [*MIXED[:3]],
    "one image": [(1, 2, 3), (Image(4, 4), 7, 8, 9)],
    "text": [(1, 2, 3, 4, 5), (6, 7, 8)],
    "packed": [(1, Image(4, 4), 3, 4), (5, 6, 7), (8, Video(2, 2, 4), 9), (3, 4, 5, 6, 7, 8)],
    # The second slice has no target.
    "short": [(1, 2, 3)],
    # Several blocks of queries.
    "long": [(*range(1, 60), Image(8, 8), *range(1, 60)) * 3, (*range(1, 60), Image(4, 4), 5)],
}
BATCHES = [*SAMPLES, "experts"]
OTHER_KERNELS = [
    *("cpu gather packed", "cpu gather long", "cpu ulysses long", "plain hidden packed"),
    *("a100 hidden packed", "h100 hidden long", "a100 ulysses packed"),
]
# Heads of the quickstart.
LONG = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]},
}  # fmt: skip
LAYER = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 128}
LAYER |= {"num_attention_heads": 8, "num_key_value_heads": 4}


# Settings of `ContextGroup`.
WAYS: dict[str, dict[str, bool]] = {
    "gather": {}, "hidden": {"hides_gather": True}, "ulysses": {"exchanges_heads": True},
}  # fmt: skip


def placement_of(topology: Topology, way: str) -> FleetPlacement:
    context = ContextGroup(topology.cp_group, topology.cp_mp_group, **WAYS[way])
    return FleetPlacement(topology.mp_group, topology.degrees.sequence_parallel, context=context)


def model_of(name: str, topology: Topology | None = None, way: str = "gather") -> Any:
    values = {"experts": EXPERTS, "long": LONG}.get(name, {})
    model = tiny_model(**values)
    if topology is None:
        return model
    placement = placement_of(topology, way)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)


def batch_of(name: str, model: Any) -> VLBatch:
    """The batch of this rank, on the device."""
    collate = VLCollator(0, IMAGE, VIDEO, pad_to_multiple_of=8, lists_real_rows=name == "experts")
    samples = []
    for number, items in enumerate(SAMPLES.get(name, SAMPLES["images and videos"])):
        fields = tiny_qwen3_vl_batch(items, pad_to_multiple_of=1, seed=number)
        arrays = {key: fields[key][0] for key in ("input_ids", "labels")}
        visual = {key: value for key, value in fields.items() if "pixel" in key or "grid" in key}
        samples.append({**arrays, **visual, "source": np.array(number % 2)})
    rows = {"packed": [samples[:3], samples[3:]], "long": [samples]}.get(name)
    of_rows = SourcesCollator(PackedCollator(collate) if rows else collate, ("even", "odd"))
    batch: Any = prepared(of_rows(rows or samples), model.config.vision_config)
    ops = model.placement.ops
    if ops.context.size > 1:
        batch = sliced(batch, ops.context)
    batch = own_indices(batch, ops.row_part, ops.expert_part)
    if name != "experts":
        batch = with_own_pixels(batch, model.config.vision_config, ops)
    return on_device(batch)


def differences(topology: Topology, name: str, way: str) -> tuple[float, str]:
    """The largest relative error of loss, sums and gradients against one device, and its name."""
    model, single = model_of(name, topology, way), model_of(name)
    with checked_values():
        output = model(batch_of(name, model))
    output.loss.backward()
    table, parameters = model.placement.parameter_table, model.parameters()
    if topology.mp_group.nranks > 1:
        all_reduce_partial_gradients(table.with_specs(parameters), topology.mp_group)
    all_reduce_gradients(parameters, topology.sharding_group)
    wanted = single(batch_of(name, single))
    wanted.loss.backward()
    sums = wanted.source_sums.numpy()
    error = np.abs(output.source_sums.numpy() - sums).max() / sums.max()
    return max(
        (abs(output.loss.item() / wanted.loss.item() - 1), "loss"),
        (float(error), "sources"),
        worst_gradient(model, stored_gradients(single)),
    )


def with_other_bits(topology: Topology) -> list[str]:
    """What has other bits with a hidden gather: loss, and gradients by name."""
    found = []
    for way in ("gather", "hidden"):
        model = model_of("packed", topology, way)
        loss = model(batch_of("packed", model)).loss
        loss.backward()
        grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.numpy(), **grads})
    gather, hidden = found
    assert gather.keys() == hidden.keys()
    return [name for name, x in gather.items() if not np.array_equal(x, hidden[name])]


def events(topology: Topology) -> list[str]:
    """What a hidden gather starts and waits for, and the attention between, forward and back."""
    model, group = model_of("packed", topology, "hidden"), topology.cp_group
    assert group is not None
    batch, found = batch_of("packed", model), list[str]()

    def noting(name: str, own: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return own(*args, **kwargs)

        return noted

    def started(call: Collective) -> None:
        if call.kind in ("all_gather", "reduce_scatter") and call.ranks == tuple(group.ranks):
            found.append(call.kind)

    attend, back = context_parallel.masked_attention, paddle.autograd.backward
    with (
        observed(started),
        mock.patch.object(context_parallel, "masked_attention", noting("attend", attend)),
        mock.patch.object(paddle.autograd, "backward", noting("attend", back)),
        mock.patch.object(Pending, "result", noting("wait", Pending.result)),
    ):
        model(batch).loss.backward()
    return found


def traffic(topology: Topology, way: str) -> list[tuple[str, int]]:
    """Kind and bytes of this rank's calls over its context-parallel group, forward and back."""
    model = model_of("packed", topology, way)
    batch = batch_of("packed", model)
    with record_collectives() as recording:
        model(batch).loss.backward()
    group: Any = topology.cp_group
    ranks = tuple(group.ranks)
    return [(call.kind, call.num_bytes) for call in recording.calls if call.ranks == ranks]


def kept(topology: Topology) -> list[int]:
    """Bytes that a layer of one device keeps, and of each way."""
    return [kept_by(None, 64), *(kept_by(topology, 64, way) for way in WAYS)]


def kept_by(topology: Topology | None, tokens: int, way: str = "gather") -> int:
    """Bytes that a decoder layer keeps for its backward pass."""
    found = []
    for layers in (3, 4):
        sizes = {"num_hidden_layers": layers, **LAYER}
        model = tiny_model(**sizes)
        if topology is not None:
            model = type(model).from_config(model.config, placement_of(topology, way))
        model.train()
        ids = np.ones([1, tokens], np.int64)
        fields: Any = {
            "input_ids": ids, "labels": ids, "attention_mask": ids, "num_target_tokens": tokens - 1,
            "position_ids": np.tile(np.arange(tokens), [3, 1, 1]), "has_left_padding": False,
        }  # fmt: skip
        if topology is not None:
            fields = sliced(prepared(fields), model.placement.ops.context)
        batch = called_batch(model.config, model.placement.ops, **fields)
        with paddle.no_grad():
            model(batch)  # Makes the tables that stay.
        gc.collect()
        before = host_memory_stat_current_value("Allocated", 0)
        loss = model(batch).loss
        gc.collect()
        found.append(host_memory_stat_current_value("Allocated", 0) - before)
        del loss
    return found[1] - found[0]


def worker(degrees: dict[str, Any]) -> dict:
    topology = initialize(ParallelDegrees(sharding_degree=2, cp_degree=2, **degrees))
    checks: dict[str, Any] = {
        f"{way} {name}": partial(differences, topology, name, way)
        for way in ("gather", "ulysses")
        for name in BATCHES
    }
    checks["bits"] = partial(with_other_bits, topology)
    for case in OTHER_KERNELS:
        kernels, way, name = case.split()
        checks[case] = partial(with_kernels, kernels, partial(differences, topology, name, way))
    if not degrees:
        checks |= {
            "events": partial(events, topology),
            "gather traffic": partial(traffic, topology, "gather"),
            "ulysses traffic": partial(traffic, topology, "ulysses"),
            "kept": partial(kept, topology),
            "cpu kept": partial(with_kernels, "cpu", partial(kept, topology)),
        }
    return run_checks(checks)


def with_kernels(kernels: str, check: Callable[[], Any]) -> Any:
    with gpu_stubs(), implementation(kernels):
        return check()


@pytest.fixture(scope="module")
def of_two() -> list[dict]:
    return launch(worker, 2, arguments=({},))


@pytest.fixture(scope="module")
def of_four() -> list[dict]:
    return launch(worker, 4, arguments=({"mp_degree": 2, "sequence_parallel": True},))


RANKS = ["of_two", pytest.param("of_four", marks=pytest.mark.heavy)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("way", ["gather", "ulysses"])
@pytest.mark.parametrize("ranks", RANKS)
def test_loss_and_gradients_are_those_of_one_device(ranks, way, name, request):
    for error, where in outcome_of(request.getfixturevalue(ranks), f"{way} {name}"):
        assert error <= TOPOLOGY, where


@pytest.mark.parametrize("case", OTHER_KERNELS)
def test_other_kernels_give_the_same(case, of_two):
    for error, where in outcome_of(of_two, case):
        assert error <= TOPOLOGY, where


@pytest.mark.parametrize("ranks", RANKS)
def test_a_hidden_gather_has_the_same_bits(ranks, request):
    for found in outcome_of(request.getfixturevalue(ranks), "bits"):
        assert not found


def test_attention_runs_while_half_of_the_keys_are_under_way(of_two):
    """Keys and values of two parts are four calls, of which two each are waited for together."""
    gather, scatter, wait = ["all_gather"] * 2, ["reduce_scatter"] * 2, ["wait"] * 2
    forward = [*gather, *gather, *wait, "attend", *wait, "attend"]
    backward = ["attend", *scatter, "attend", *scatter, *wait, *wait]
    for found in outcome_of(of_two, "events"):
        assert found == 3 * forward + 3 * backward


@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_a_layer_sends_the_bytes_of_the_formula(of_two, way):
    """Two rows of 24 tokens on two ranks; heads of width 8. By gathers, keys and values of 2 heads
    of three layers, forward and back; by exchange, queries of 4 heads and keys, values of 2, and
    outputs back."""
    tokens, head = 2 * 24, 8 * 4
    wanted = {("all_gather", tokens // 2 * 2 * head): 6, ("reduce_scatter", tokens * 2 * head): 6}
    if way == "ulysses":
        wanted = {("alltoall_single", tokens // 2 * heads * head): 3 * 2 * 2 for heads in (4, 2)}
    for calls in outcome_of(of_two, f"{way} traffic"):
        assert {call: calls.count(call) for call in wanted} == wanted
        # Rows of the tower, their gradients, the loss and its parts by source.
        others = [call[0] for call in calls if call not in wanted]
        assert sorted(others) == ["all_reduce"] * 2 + ["alltoall_single"] * 2


@pytest.mark.parametrize("kernels", ["", "cpu "])
def test_a_layer_keeps_the_rows_of_its_slice_and_the_keys_of_all(of_two, kernels):
    """Of 64 tokens a slice has 32, and keys and values of the other 32, 4 heads of width 8. Heads
    that come in parts keep the output once more, 32 rows of 8 heads; so do those that return, and
    kernels that keep copies of queries, keys and values keep these once more."""
    rows = 32 * 8 * 8 * 4
    copies, returned = (3 * rows, 0) if kernels else (0, rows)
    for whole, *own in outcome_of(of_two, f"{kernels}kept"):
        gather = whole // 2 + 32 * (2 * 4 * 8 * 4) + copies
        assert own == [gather, gather + rows, whole // 2 + returned]
