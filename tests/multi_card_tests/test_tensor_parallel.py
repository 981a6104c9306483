"""Qwen3-VL under tensor and sequence parallelism, against one device.

Guarantees, on 2 and 4 ranks (4 ranks share 2 key heads), with and without sequence parallelism, and
with the tower's work sharded or replicated: loss and every gradient of every rank are equal, on
batches that mix images, videos and text, with the loss weights and the sums of sources, that leave
ranks without an image, and of text only; fresh weights and saved files are equal; each image is
encoded once; all feature levels are gathered in one collective; simulated ranks
(`paddle_vl.testing`) issue the collectives of real ones.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.families.vlm.modeling.model import VLOutput
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing import run_ranks, sum_partial_gradients, tiny_qwen3_vl
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, patches, token_rows
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tiny import tiny_config, tiny_model
from tests.support.tolerance import TOPOLOGY

BATCHES = ("images", "mixed", "one_image", "text")
PLACEMENTS = [(sp, vision) for sp in (False, True) for vision in ("spread", "replicate")]


def batch(name: str) -> dict:
    pixels, grid = patches([[1, 4, 4], [1, 2, 4], [1, 2, 2]])
    second = [4, ("image", 2), 6, ("image", 1)]
    if name == "text":
        ids, media = token_rows([1, 2, 3, 4], [5, 6, 7, 8]), {}
    elif name == "one_image":
        # Fewer images than ranks.
        ids = token_rows([1, 2, 3, 4], [5, ("image", 1), 6, 7])
        media = {"pixel_values": pixels[-4:], "image_grid_thw": grid[-1:]}
    else:
        first = [1, 9, ("image", 4), 2, 5, 7]
        media = {"pixel_values": pixels, "image_grid_thw": grid}
        if name == "mixed":
            first = [1, ("video", 2), 3, ("video", 2), 2, ("image", 4)]
            videos, video_grid = patches([[2, 2, 4]], seed=1)
            media |= {"pixel_values_videos": videos, "video_grid_thw": video_grid}
        ids = token_rows(first, second, [7, 8, 9, 3], length=12)
    labels = np.where(np.isin(ids, (IMAGE, VIDEO)), -100, ids)
    labels[:, 9:] = -100
    fields: Any = {"input_ids": ids, "labels": labels, **media}
    if name == "mixed":
        numbers = np.arange(ids.size).reshape(ids.shape)
        fields |= {"label_sources": numbers % 2, "num_sources": 2}
        fields |= {"loss_weights": (1 + numbers % 3).astype("float32")}
        fields["attention_mask"] = np.ones_like(ids)
        fields = prepared(fields)
    return fields


def freeze_tower(model) -> None:
    for parameter in model.visual.parameters():
        parameter.stop_gradient = True


def reference(name: str, frozen: bool) -> tuple[VLOutput, dict[str, np.ndarray]]:
    model = tiny_model()
    if frozen:
        freeze_tower(model)
    output = model(**batch(name))
    output.loss.backward()
    grads = {
        item.key: item.layout.to_stored(item.of_own(item.parameter.grad.numpy()))
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }
    return output, grads


def worst_difference(
    folder: str, group, sequence_parallel: bool, vision: str, name: str, frozen: bool = False
) -> tuple[float, str]:
    """Largest relative error of loss, sums of sources and gradients against one device, and its
    tensor."""
    placement = FleetPlacement(group, sequence_parallel, vision)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    if frozen:
        freeze_tower(model)
    output = model(**batch(name))
    output.loss.backward()
    all_reduce_partial_gradients(placement.parameter_table.with_specs(model.parameters()), group)
    one, wanted = reference(name, frozen)
    worst = (abs(output.loss.item() / one.loss.item() - 1), "loss")
    if name == "mixed":
        error = (output.source_sums / one.source_sums - 1).abs().max()
        worst = max(worst, (error.item(), "sources"))
    for item in model.stored_parameters():
        if item.key not in wanted:
            # Text only: one device has no tower gradients, and ranks have zeros.
            grad = item.parameter.grad
            assert grad is None or not grad.numpy().any(), item.key
            continue
        expected = item.from_stored(wanted[item.key])
        error = np.abs(item.of_own(item.parameter.grad.numpy()) - expected).max()
        worst = max(worst, (float(error / np.abs(wanted[item.key]).max()), item.key))
    return worst


def fresh_weights_and_files(folder: str, group) -> list[str]:
    """Names of tensors that differ from one device's after a rank draws them and all save them."""
    paddle.seed(7)
    wanted = Qwen3VLForConditionalGeneration.from_config(tiny_config()).hf_state_dict()
    paddle.seed(7)
    placement = FleetPlacement(group, sequence_parallel=True)
    model = Qwen3VLForConditionalGeneration.from_config(tiny_config(), placement)
    drawn = model.hf_state_dict()
    model.save_pretrained(f"{folder}/saved", max_shard_bytes=20_000)
    dist.barrier()
    saved = Qwen3VLForConditionalGeneration.from_pretrained(f"{folder}/saved").hf_state_dict()
    return [
        key
        for key, array in wanted.items()
        if not (np.array_equal(drawn[key], array) and np.array_equal(saved[key], array))
    ]


def tower_work(folder: str, group, vision: str) -> tuple[int, list[str], list[str]]:
    """Patches that this rank encodes, and its collectives in forward and in backward."""
    placement = FleetPlacement(group, sequence_parallel=True, vision=vision)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    encoded: list[int] = []
    model.visual.register_forward_pre_hook(lambda layer, inputs: encoded.append(len(inputs[0])))
    inputs = batch("images")
    with record_collectives() as recording:
        recording.phase = "forward"
        features = model.encode_visual(called_batch(model.config, placement.ops, **inputs))
        recording.phase = "backward"
        paddle.concat([features.merged, *features.levels]).sum().backward()
    kinds = [[call.kind for call in recording.of(phase)] for phase in ("forward", "backward")]
    return sum(encoded), *kinds


def step_collectives(folder: str, group, sequence_parallel: bool, name: str) -> list[Collective]:
    """All collectives of a step, in order."""
    placement = FleetPlacement(group, sequence_parallel)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    with record_collectives() as recording:
        recording.phase = "forward"
        loss = model(**batch(name)).loss
        recording.phase = "backward"
        loss.backward()
        recording.phase = "gradients"
        all_reduce_partial_gradients(
            placement.parameter_table.with_specs(model.parameters()), group
        )
    return recording.calls


def simulated_collectives(placement: FleetPlacement, name: str) -> list[Collective]:
    """The same of a simulated rank."""
    model = tiny_qwen3_vl(placement, num_attention_heads=4)
    with record_collectives() as recording:
        recording.phase = "forward"
        loss = model(**batch(name)).loss
        recording.phase = "backward"
        loss.backward()
        recording.phase = "gradients"
        sum_partial_gradients(model)
    return recording.calls


def worker(folder: str, num_ranks: int) -> dict:
    group = initialize(ParallelDegrees(mp_degree=num_ranks)).mp_group
    if group.rank == 0:
        tiny_model().save_pretrained(folder)
    dist.barrier()
    checks = {
        f"{name} sp={sp} {vision}": partial(worst_difference, folder, group, sp, vision, name)
        for name in BATCHES
        for sp, vision in PLACEMENTS
    }
    for vision in ("spread", "replicate"):
        checks[f"frozen {vision}"] = partial(
            worst_difference, folder, group, True, vision, "one_image", True
        )
    checks["files"] = partial(fresh_weights_and_files, folder, group)
    for vision in ("spread", "replicate"):
        checks[f"tower {vision}"] = partial(tower_work, folder, group, vision)
    for name in BATCHES:
        for sp in (False, True):
            checks[f"order {name} {sp}"] = partial(step_collectives, folder, group, sp, name)
    return run_checks(checks)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.heavy)])
def outcomes(request):
    with tempfile.TemporaryDirectory() as folder:
        yield launch(worker, request.param, arguments=(str(Path(folder)), request.param))


@pytest.mark.parametrize(("sp", "vision"), PLACEMENTS)
@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_every_gradient_equal_one_device(outcomes, name, sp, vision):
    for rank, (error, where) in enumerate(outcome_of(outcomes, f"{name} sp={sp} {vision}")):
        assert error <= TOPOLOGY, f"rank {rank}: {where}"


@pytest.mark.parametrize("vision", ["spread", "replicate"])
def test_a_frozen_tower_keeps_ranks_in_step_when_some_have_no_image(outcomes, vision):
    for rank, (error, where) in enumerate(outcome_of(outcomes, f"frozen {vision}")):
        assert error <= TOPOLOGY, f"rank {rank}: {where}"


def test_fresh_weights_and_saved_files_are_those_of_one_device(outcomes):
    assert outcome_of(outcomes, "files") == [[]] * len(outcomes)


def test_every_image_is_encoded_once_when_the_tower_is_spread(outcomes):
    spread = [work[0] for work in outcome_of(outcomes, "tower spread")]
    # Images of 16, 8 and 4 patches: the largest gets a rank of its own.
    assert (sum(spread), max(spread)) == (28, 16)
    assert [work[0] for work in outcome_of(outcomes, "tower replicate")] == [28] * len(outcomes)


def test_all_levels_travel_in_one_collective_there_and_one_back(outcomes):
    for _, forward, backward in outcome_of(outcomes, "tower spread"):
        assert (forward, backward) == (["all_gather"], ["all_reduce"])
    for _, forward, backward in outcome_of(outcomes, "tower replicate"):
        assert (forward, backward) == ([], ["all_reduce"])


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_sends_the_same_collectives_in_the_same_order(outcomes, name, sp):
    first, *others = outcome_of(outcomes, f"order {name} {sp}")
    assert len(first) > 10
    for other in others:
        assert other == first


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_simulated_ranks_issue_the_collectives_of_real_ones(outcomes, name, sp):
    step = partial(simulated_collectives, name=name)
    simulated = run_ranks(step, len(outcomes), sequence_parallel=sp).results
    assert simulated == outcome_of(outcomes, f"order {name} {sp}")
