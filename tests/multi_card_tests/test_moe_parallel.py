"""Qwen3-VL with experts under tensor parallelism, which shards the inner features of each expert.

Guarantees, with and without sequence parallelism, against one device:

- loss, auxiliary loss and every gradient of every rank are equal, on padded batches with images and
  on text;
- fresh weights, saved files, and parameter-shaped values gathered to full ones are equal, with gate
  and up sharded separately;
- routing needs no collective of its own, and every rank has the same tokens per expert;
- layers that return their routing beside their rows can be sharding units.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.sharding import Sharding
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, patches, token_rows
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.states import gathered
from tests.support.tiny import tiny_config, tiny_model
from tests.support.tolerance import TOPOLOGY

BATCHES = ("images", "text")
# A weight that makes the auxiliary loss as large as the cross entropy.
SETTINGS = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 1.0}


def batch(name: str) -> dict:
    if name == "text":
        ids, media = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8]), {}
    else:
        pixels, grid = patches([[1, 4, 4], [1, 2, 4]])
        ids = token_rows([1, 9, ("image", 4), 2, 5, 7], [4, ("image", 2), 6], length=12)
        media = {"pixel_values": pixels, "image_grid_thw": grid}
    return {
        "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64),
        "labels": np.where((ids != IMAGE) & (ids != 0), ids, -100), **media,
    }  # fmt: skip


def reference(name: str) -> tuple[list[float], dict[str, np.ndarray], list[list[int]]]:
    model = tiny_model(**SETTINGS)
    output = model(**batch(name))
    output.loss.backward()
    counts = [count.tolist() for count in model.tokens_per_expert().values()]
    return [output.loss.item(), output.aux_loss.item()], gradients(model), counts


def gradients(model) -> dict[str, np.ndarray]:
    return {
        item.key: item.layout.to_stored(item.of_own(item.parameter.grad.numpy()))
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }


def worst_difference(folder: str, group, sequence_parallel: bool, name: str) -> tuple[float, str]:
    """Largest relative error of losses and gradients against one device, and its tensor."""
    placement = FleetPlacement(group, sequence_parallel)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    output = model(**batch(name))
    output.loss.backward()
    all_reduce_partial_gradients(placement.parameter_table.with_specs(model.parameters()), group)
    losses, wanted, counts = reference(name)
    assert [count.tolist() for count in model.tokens_per_expert().values()] == counts
    found = [output.loss.item(), output.aux_loss.item()]
    worst = max((abs(a - b) / b, "loss") for a, b in zip(found, losses, strict=True))
    for item in model.stored_parameters():
        if item.key in wanted:
            error = item.of_own(item.parameter.grad.numpy()) - item.from_stored(wanted[item.key])
            error = float(np.abs(error).max() / np.abs(wanted[item.key]).max())
            worst = max(worst, (error, item.key))
    return worst


def fresh_weights_and_files(folder: str, group) -> list[str]:
    """Keys of tensors that differ from one device's: after a rank draws them, after all ranks save
    them, or after values of a parameter's layout are gathered."""
    paddle.seed(7)
    config = tiny_config(**SETTINGS)
    wanted = Qwen3VLForConditionalGeneration.from_config(config).hf_state_dict()
    paddle.seed(7)
    placement = FleetPlacement(group, sequence_parallel=True)
    model = Qwen3VLForConditionalGeneration.from_config(config, placement)
    drawn = model.hf_state_dict()
    model.save_pretrained(f"{folder}/saved", max_shard_bytes=20_000)
    dist.barrier()
    saved = Qwen3VLForConditionalGeneration.from_pretrained(f"{folder}/saved").hf_state_dict()
    doubled = {
        item.key: item.layout.to_stored(
            item.of_full(item.table.full_value(item.parameter, 2 * item.parameter))
        )
        for item in model.stored_parameters()
    }
    return [
        key
        for key, array in wanted.items()
        if not (np.array_equal(drawn[key], array) and np.array_equal(saved[key], array))
        or not np.array_equal(doubled[key], 2 * array)
    ]


def held(folder: str, group) -> dict[str, list[int]]:
    """Shapes of an expert layer's parameters on this rank."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=FleetPlacement(group))
    layer = model.decoder_layers[0].mlp
    return {name: list(parameter.shape) for name, parameter in layer.named_parameters()}


def kinds_of_collectives(group, sequence_parallel: bool, settings: dict) -> list[str]:
    placement = FleetPlacement(group, sequence_parallel)
    config = tiny_config(**settings)
    model = Qwen3VLForConditionalGeneration.from_config(config, placement)
    with record_collectives() as recording:
        model(**batch("images")).loss.backward()
    return [call.kind for call in recording.calls]


def sharded_difference(group, stage: int, recomputed: bool) -> tuple[float, str]:
    """Largest gradient error of two micro-batches on two ranks against one device."""
    names = BATCHES if group.rank == 0 else BATCHES[::-1]
    whole = tiny_model(**SETTINGS)
    for name in BATCHES:
        # Each of the two ranks sees every batch once.
        (2 * whole(**batch(name)).loss).backward()
    wanted = dict(whole.hf_named_parameters())
    model = tiny_model(**SETTINGS)
    units = model.decoder_layers
    if recomputed:
        recompute_layers(units)
    sharding = Sharding(model.parameters(), group, stage, [units])
    for name in names:
        model(**batch(name)).loss.backward()
        sharding.end_micro_batch()
    sharding.end_backward()
    worst = (0.0, "")
    for key, parameter in model.hf_named_parameters():
        found = gathered(sharding, parameter, sharding.shard_of(parameter).grad).numpy()
        expected = wanted[key].grad.numpy()
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        worst = max(worst, (error, key))
    return worst


def uneven_width(group) -> str:
    config = tiny_config(**SETTINGS | {"moe_intermediate_size": 7})
    try:
        Qwen3VLForConditionalGeneration(config, FleetPlacement(group))
    except ValueError as error:
        return str(error)
    return ""


def worker(folder: str) -> dict:
    group = initialize(ParallelDegrees(mp_degree=2)).mp_group
    if group.rank == 0:
        tiny_model(**SETTINGS).save_pretrained(folder)
    dist.barrier()
    checks = {
        f"{name} sp={sp}": partial(worst_difference, folder, group, sp, name)
        for name in BATCHES
        for sp in (False, True)
    }
    checks["files"] = partial(fresh_weights_and_files, folder, group)
    checks["held"] = partial(held, folder, group)
    checks["uneven"] = partial(uneven_width, group)
    for sp in (False, True):
        for kind, settings in (("experts", SETTINGS), ("dense", {})):
            checks[f"collectives {kind} {sp}"] = partial(kinds_of_collectives, group, sp, settings)
    for stage in (2, 3):
        for recomputed in (False, True):
            checks[f"sharded {stage} {recomputed}"] = partial(
                sharded_difference, group, stage, recomputed
            )
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    with tempfile.TemporaryDirectory() as folder:
        yield launch(worker, 2, arguments=(str(Path(folder)),))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_losses_and_every_gradient_equal_one_device(outcomes, name, sp):
    for rank, (error, where) in enumerate(outcome_of(outcomes, f"{name} sp={sp}")):
        assert error <= TOPOLOGY, f"rank {rank}: {where}"


def test_fresh_weights_saved_files_and_put_together_values_are_those_of_one_device(outcomes):
    assert outcome_of(outcomes, "files") == [[], []]


def test_ranks_hold_half_of_each_expert_and_the_whole_router(outcomes):
    wanted = {
        "gate.weight": [16, 6],
        "experts.gate_up_proj": [6, 16, 8],
        "experts.down_proj": [6, 4, 16],
    }
    assert outcome_of(outcomes, "held") == [wanted, wanted]


@pytest.mark.parametrize("sp", [False, True])
def test_experts_need_no_collective_beside_those_of_a_dense_mlp(outcomes, sp):
    dense = outcome_of(outcomes, f"collectives dense {sp}")
    assert len(dense[0]) > 10
    assert outcome_of(outcomes, f"collectives experts {sp}") == dense


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_layers_with_experts_may_be_units_of_sharding(outcomes, stage, recomputed):
    for error, where in outcome_of(outcomes, f"sharded {stage} {recomputed}"):
        assert error <= TOPOLOGY, where


def test_a_width_that_ranks_do_not_divide_is_refused(outcomes):
    for message in outcome_of(outcomes, "uneven"):
        assert "moe_intermediate_size 7 does not divide by the model-parallel degree 2" in message
