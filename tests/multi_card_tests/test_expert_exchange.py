"""The exchange of expert parallelism: rows, host reads and collectives of a step, and padding.

Guarantees, over dp ranks, and over mp ranks, which send their T / mp rows each; with different
padding, and with a rank that has nothing but padding:

- the host reads sizes once per layer with experts, in the forward pass; neither the backward pass
  nor a recomputed forward reads or sends sizes;
- with a capacity the host reads nothing, and a rank sends as many rows as there is room for;
- every gradient equals one device's, with and without recomputation;
- padded rows are not sent: a rank sends K copies of its real rows, once per expert;
- of these only rows of other ranks' experts leave it;
- under sequence parallelism nothing is gathered before experts, nor scattered after them.
"""

import math
import tempfile
from collections import Counter
from functools import cache, partial

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.training.objective import empty_batch
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.experts import ExpertCapacity
from paddle_vl.parallel.agree import gather_values
from paddle_vl.parallel.collectives import all_reduce_gradients, all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing import record_host_reads
from paddle_vl.testing.qwen3_vl import EXPERTS, token_rows
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.states import stored_gradients, worst_gradient
from tests.support.tiny import tiny_model
from tests.support.tolerance import TOPOLOGY

LAYERS = 2  # Layers with experts, of three.
MODEL = EXPERTS | {"num_experts": 8}
WIDTH, COPIES = 16, 2
TEXTS = [[1, 2, 3, 4, 5, 6], [5, 6, 7]], [[9, 8], [7, 6, 5, 4]]
FILLS = {"padding": (10, 16), "none": (6, 4), "a rank of padding": (10, None)}
DP2 = {"dp_degree": 2, "ep_degree": 2}
MP2 = {"mp_degree": 2, "ep_degree": 2, "sequence_parallel": True}
SHARDING2_MP2 = MP2 | {"sharding_degree": 2, "ep_degree": 4}
MP4 = MP2 | {"mp_degree": 4, "ep_degree": 4}
RUNS = {"dp2": DP2, "mp2": MP2}
FOUR = {"sharding2 mp2": SHARDING2_MP2, "mp4": MP4}
CASES = [(name, fill, recomputed, None) for name in RUNS for fill in FILLS for recomputed in (0, 1)]
# A batch of padding belongs to a data rank that mp ranks alone do not have.
CASES = [case for case in CASES if case[:2] != ("mp2", "a rank of padding")]
# Room for all rows of a rank at one other.
CASES += [("dp2", "padding", 1, 2.0), ("dp2", "a rank of padding", 0, 2.0), ("mp2", "none", 1, 2.0)]
HEAVY = [(name, "padding", 1, factor) for name in FOUR for factor in (None, 4.0)]


def batches(fill: str) -> list[dict]:
    """A batch for each rank."""
    found = []
    for texts, length in zip(TEXTS, FILLS[fill], strict=True):
        if length is None:
            found.append(empty_batch(4))
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


def one_device(fill: str, num_batches: int) -> dict[str, np.ndarray]:
    """Gradients of the summed loss of all batches."""
    model = tiny_model(**MODEL)
    for batch in batches(fill)[:num_batches]:
        model(**batch).loss_sum.backward()
    return stored_gradients(model)


def step(
    topology: Topology, folder: str, fill: str, recomputed: bool, factor: float | None
) -> dict:
    """Reads and collectives by pass, sent rows, and the largest gradient error with its tensor."""
    placement = FleetPlacement(
        topology.mp_group, topology.mp_group.nranks > 1, ep_group=topology.ep_group
    )
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, placement=placement)
    if recomputed:
        recompute_layers(model.decoder_layers)
    batch = batches(fill)[topology.data_rank]
    if "real_row_indices" in batch:
        rows, size = batch["real_row_indices"], batch["attention_mask"].size
        batch["real_row_indices"] = placement.ops.expert_part.of_numbers(rows, size)
        batch["num_real_rows"] = len(rows)
    capacity = None
    if factor is not None:
        most = max(gather_values(len(batch.get("real_row_indices", ()))))
        batch["expert_capacity"] = capacity = ExpertCapacity(math.ceil(factor * most))
    reading, sending = record_host_reads(), record_collectives()
    with gpu_stubs(), reading as reads, sending as recording, use_kernels("gpu"):
        recording.phase = "forward"
        loss = model(**batch).loss_sum
        num_forward = len(reads)
        recording.phase = "backward"
        loss.backward()
    # Gloo's own reads of host memory do not exist on a GPU.
    places = ["" if "gloo_fleet" in place else place.partition(":")[0] for place in reads]
    specs = placement.parameter_table.with_specs(model.parameters())
    if topology.mp_group.nranks > 1:
        all_reduce_partial_gradients(specs, topology.mp_group)
    for group in (topology.dp_group, topology.sharding_group):
        if group.nranks > 1:
            all_reduce_gradients([t for t, spec in specs if not spec.is_expert], group)
    return {
        "reads": [list(filter(None, of)) for of in (places[:num_forward], places[num_forward:])],
        "calls": Counter((call.phase, call.kind) for call in recording.calls),
        "bytes": [c.num_bytes for c in recording.calls if c.kind == "alltoall_single"],
        "leaving": leaving(model, topology),
        "counts": {i: count.tolist() for i, count in model.tokens_per_expert().items()},
        "worst": worst_gradient(model, one_device(fill, topology.data_size)),
        "room": capacity and capacity.room(COPIES, topology.ep_group.nranks),
        "overflows": capacity and [each.item() for each in capacity.overflows],
    }


def leaving(model: Qwen3VLForConditionalGeneration, topology: Topology) -> int:
    """Rows that other ranks' experts get from this rank in a pass, of all layers."""
    rank, size = topology.ep_group.rank, topology.ep_group.nranks
    counts = [np.split(count.numpy(), size) for count in model.tokens_per_expert().values()]
    return int(sum(part.sum() for of in counts for n, part in enumerate(of) if n != rank))


def worker(folder: str, runs: dict[str, dict], cases: list[tuple]) -> dict:
    found = {}
    for name, degrees in runs.items():
        topology = initialize(ParallelDegrees(**degrees))
        if dist.get_rank() == 0:
            tiny_model(**MODEL).save_pretrained(folder)
        dist.barrier()
        own = [case for case in cases if case[0] == name]
        checks = {str(case): partial(step, topology, folder, *case[1:]) for case in own}
        found |= run_checks(checks)
    return found


@cache
def outcomes_of(num_ranks: int) -> list[dict]:
    arguments = {2: (RUNS, CASES), 4: (FOUR, HEAVY)}[num_ranks]
    with tempfile.TemporaryDirectory() as folder:
        return launch(worker, num_ranks, arguments=(folder, *arguments), timeout=300)


def assert_exchanged(found: dict, degrees: dict, fill: str, recomputed: bool, data_rank: int):
    """Gradients, and what was read, sent and gathered, of one rank."""
    error, where = found["worst"]
    assert error <= TOPOLOGY, where
    # The host reads sizes once per layer, in the forward pass only.
    has_room = found["room"] is not None
    num_reads = 0 if has_room else LAYERS
    assert found["reads"] == [["parallel/expert_parallel.py"] * num_reads, []]
    calls = found["calls"]
    # Rows go and return in each pass; a recomputed forward sends them again, but no sizes.
    assert calls["forward", "alltoall_single"] == 2 * LAYERS
    assert calls["backward", "alltoall_single"] == (4 if recomputed else 2) * LAYERS
    mp = degrees.get("mp_degree", 1)
    if mp == 1:
        assert calls["forward", "all_gather"] == LAYERS
        assert calls.total() == (7 if recomputed else 5) * LAYERS
    else:
        # The embedding's rows stay with the ranks: heads and the dense MLP of three layers, the
        # output head, and the sizes.
        assert calls["forward", "all_gather"] == 3 + 1 + 1 + LAYERS
        assert calls["forward", "reduce_scatter"] == 3 + 1
    # Every pass of a layer sends K copies of this rank's real rows, and brings as many back.
    real = sum(sum(count) for count in found["counts"].values())
    outward = found["bytes"][: 2 * LAYERS : 2]
    if has_room:
        assert found["overflows"] == [False] * LAYERS
        assert outward == [degrees["ep_degree"] * found["room"] * WIDTH * 4] * LAYERS
        return
    # A row of padding stands in where a rank has no other.
    assert sum(outward) == (real or COPIES * LAYERS) * WIDTH * 4
    mask = batches(fill)[data_rank]["attention_mask"]
    routed = COPIES * LAYERS * int(mask.sum()) / mp
    # Every mp rank sends about 1 / mp of the batch's rows, exactly so without padding.
    if fill == "none" or mp == 1:
        assert real == routed


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.heavy) for case in HEAVY)], ids=str
)
def test_each_rank_sends_its_real_rows_and_gets_one_devices_gradients(case):
    name, fill, recomputed, _ = case
    of_ranks = outcome_of(outcomes_of(2 if name in RUNS else 4), str(case))
    for rank, found in enumerate(of_ranks):
        data_rank = {"dp2": rank, "sharding2 mp2": rank // 2}.get(name, 0)
        assert_exchanged(found, (RUNS | FOUR)[name], fill, recomputed, data_rank)


@pytest.mark.parametrize("fill", ["padding", "none"])
def test_mp_ranks_send_the_rows_of_a_batch_once_between_them(fill):
    """T / mp rows each: K T copies in all, where each of them would send all T otherwise."""
    found = outcome_of(outcomes_of(2), str(("mp2", fill, 0, None)))
    real = [sum(sum(count) for count in of["counts"].values()) for of in found]
    assert sum(real) == COPIES * LAYERS * int(batches(fill)[0]["attention_mask"].sum())
    for of, rows in zip(found, real, strict=True):
        assert 0 < of["leaving"] < rows
