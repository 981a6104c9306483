"""The exchange of expert parallelism: host reads and collectives of a step, and padding.

Guarantees, on two ranks with different padding, and with one that has nothing but padding:

- the host reads sizes once per layer with experts, in the forward pass; neither the backward pass
  nor a recomputed forward reads or sends sizes;
- every gradient equals one device's, with and without recomputation;
- padded rows are not sent: ranks exchange the real rows of each other's experts.
"""

import tempfile
from collections import Counter
from functools import partial

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.objective import empty_batch
from paddle_vl.nn.operations import use_kernels
from paddle_vl.parallel.collectives import all_reduce_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing import record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS, token_rows
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tiny import tiny_model
from tests.support.tolerance import TOPOLOGY

LAYERS = 2  # Layers with experts.
TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7]], [[9, 8], [7, 6, 5, 4]]
FILLS = {"padding": (10, 16), "none": (6, 4), "a rank of padding": (10, None)}
CASES = [(fill, recomputed) for fill in FILLS for recomputed in (False, True)]


def batches(fill: str) -> list[dict]:
    """A batch for each rank."""
    found = []
    for texts, length in zip(TEXTS, FILLS[fill], strict=True):
        if length is None:
            found.append(empty_batch(3))
            continue
        # Without padding all rows are equally long.
        texts = [(2 * text)[:length] for text in texts] if fill == "none" else texts
        ids = token_rows(*texts, length=length)
        mask = (ids != 0).astype(np.int64)
        found.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": np.where(mask, ids, -100),
                "has_left_padding": False,
                "real_row_indices": np.flatnonzero(mask),
            }
        )
    return found


def one_device(fill: str) -> dict[str, np.ndarray]:
    """Gradients of the summed loss of both batches."""
    model = tiny_model(**EXPERTS)
    for batch in batches(fill):
        model(**batch).loss_sum.backward()
    return {
        item.key: item.layout.to_stored(item.of_own(item.parameter.grad.numpy()))
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }


def step(topology: Topology, folder: str, fill: str, recomputed: bool) -> dict:
    """Reads and collectives by pass, sent rows, and the largest gradient error with its tensor."""
    placement = FleetPlacement(topology.mp_group, ep_group=topology.ep_group)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    if recomputed:
        recompute_layers(model.decoder_layers)
    batch = batches(fill)[dist.get_rank()]
    reading, sending = record_host_reads(), record_collectives()
    with gpu_stubs(), reading as reads, sending as recording, use_kernels("gpu"):
        recording.phase = "forward"
        loss = model(**batch).loss_sum
        num_forward = len(reads)
        recording.phase = "backward"
        loss.backward()
    # Gloo's own reads of host memory do not exist on a GPU.
    places = ["" if "gloo_fleet" in place else place.partition(":")[0] for place in reads]
    table = placement.parameter_table
    shared = [t for t, spec in table.with_specs(model.parameters()) if not spec.is_expert]
    all_reduce_gradients(shared, topology.dp_group)
    wanted, worst = one_device(fill), (0.0, "")
    for item in model.stored_parameters():
        if item.key in wanted:
            error = item.of_own(item.parameter.grad.numpy()) - item.from_stored(wanted[item.key])
            scale = max(np.abs(wanted[item.key]).max(), 1e-6)
            worst = max(worst, (float(np.abs(error).max() / scale), item.key))
    return {
        "reads": [list(filter(None, of)) for of in (places[:num_forward], places[num_forward:])],
        "calls": Counter((call.phase, call.kind) for call in recording.calls),
        "counts": {i: count.tolist() for i, count in model.tokens_per_expert().items()},
        "worst": worst,
    }


def worker(folder: str) -> dict:
    topology = initialize(ParallelDegrees(dp_degree=2, ep_degree=2))
    if dist.get_rank() == 0:
        tiny_model(**EXPERTS).save_pretrained(folder)
    dist.barrier()
    return run_checks({str(case): partial(step, topology, folder, *case) for case in CASES})


@pytest.fixture(scope="module")
def outcomes():
    with tempfile.TemporaryDirectory() as folder:
        yield launch(worker, 2, arguments=(folder,))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_reads_sizes_once_per_layer_in_the_forward_pass_only(outcomes, case):
    for found in outcome_of(outcomes, str(case)):
        assert found["reads"] == [["parallel/expert_parallel.py"] * LAYERS, []]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes_are_sent_once_per_layer(outcomes, case):
    _, recomputed = case
    for found in outcome_of(outcomes, str(case)):
        # Rows go and return in each pass; a recomputed forward sends them again.
        assert found["calls"] == {
            ("forward", "all_gather"): LAYERS,
            ("forward", "alltoall_single"): 2 * LAYERS,
            ("backward", "alltoall_single"): (4 if recomputed else 2) * LAYERS,
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_equals_one_devices(outcomes, case):
    for error, where in (found["worst"] for found in outcome_of(outcomes, str(case))):
        assert error <= TOPOLOGY, where


@pytest.mark.parametrize("fill", FILLS)
def test_tokens_per_expert_are_those_of_real_rows(outcomes, fill):
    for recomputed in (False, True):
        found = outcome_of(outcomes, str((fill, recomputed)))
        for rank, batch in enumerate(batches(fill)):
            total = 2 * int(batch["attention_mask"].sum())
            assert [sum(count) for count in found[rank]["counts"].values()] == [total] * LAYERS
