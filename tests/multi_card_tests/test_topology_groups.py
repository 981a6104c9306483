"""Fleet's process groups on four ranks.

Guarantees, for dp 2 x mp 2, mp 2 x pp 2 and sharding 2 x mp 2: every rank has the right coordinates
and groups, with mp ranks as neighbours; an all-reduce over a group sums over its members only; the
first and last stage of a pipeline share a group; Paddle has the same seed on every rank; dropout is
the same on all ranks of an mp group except for sharded tensors, and is reproducible; topologies may
be started in turn.
"""

from functools import partial

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest

from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.topology import ParallelDegrees, initialize
from paddle_vl.train.schedule import seed_step
from tests.support.launch import launch, outcome_of, run_checks

AXES = ("dp", "mp", "pp", "sharding")
DP_MP = {"dp_degree": 2, "mp_degree": 2}
# Degrees, the axis beside mp, how rank 2 describes itself, and data shards.
TOPOLOGIES = {
    "dp mp": (DP_MP, "dp", "rank 2 (dp 1, mp 0)", 2),
    "mp pp": (
        {"mp_degree": 2, "pp_degree": 2, "num_micro_batches": 3}, "pp", "rank 2 (mp 0, pp 1)", 1,
    ),
    "sharding mp": (
        {"sharding_degree": 2, "mp_degree": 2}, "sharding", "rank 2 (mp 0, sharding 1)", 2,
    ),
}  # fmt: skip


def place(degrees: dict[str, int], distant: str, second: str, shards: int) -> None:
    topology = initialize(ParallelDegrees(**degrees))
    rank, drawn = topology.rank, list[float]()
    dist.all_gather_object(drawn, paddle.rand([1]).item())
    # The mp groups are (0, 1) and (2, 3); the groups of the other axis are (0, 2) and (1, 3).
    across = [rank % 2, rank % 2 + 2]
    members = {axis: [rank] for axis in AXES} | {"mp": [rank // 2 * 2, rank // 2 * 2 + 1]}
    members[distant] = across
    for axis in AXES:
        group = getattr(topology, f"{axis}_group")
        assert group.ranks == members[axis]
        # One decimal digit per rank.
        value = paddle.to_tensor([10**rank])
        if group.nranks > 1:
            dist.all_reduce(value, group=group)
        assert value.item() == sum(10**member for member in members[axis])
        assert getattr(topology, f"{axis}_rank") == {"mp": rank % 2, distant: rank // 2}.get(
            axis, 0
        )
    assert (topology.data_rank, topology.data_size) == (rank // 2 if shards > 1 else 0, shards)
    assert rank != 2 or topology.describe() == second
    ends = topology.ends_group
    assert (None if ends is None else ends.ranks) == (across if distant == "pp" else None)
    assert len(set(drawn)) == 1


def dropout() -> None:
    """Masks of 64 elements in two steps, drawn in the order of a layer: they differ for sharded
    tensors, between steps, and between shards of the data."""
    ranks = FleetRanks(initialize(ParallelDegrees(**DP_MP)))

    def draw() -> list[float]:
        return F.dropout(paddle.ones([64])).tolist()

    seed_step(3, 10, ranks)
    whole = draw()
    with split_random():
        split = draw()
    seed_step(3, 11, ranks)
    assert draw() != whole != split
    # Earlier draws do not matter.
    seed_step(3, 10, ranks)
    with split_random():
        split_first = draw()
    assert (draw(), split_first) == (whole, split)
    of_ranks: list[tuple] = []
    dist.all_gather_object(of_ranks, (whole, split))
    (first, own), (second, other), (third, far), _ = of_ranks
    assert first == second != third
    assert other != own != far


def worker() -> dict:
    checks = {"dropout": dropout}
    return run_checks(checks | {name: partial(place, *of) for name, of in TOPOLOGIES.items()})


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 4)


@pytest.mark.parametrize("name", ["dropout", *TOPOLOGIES])
def test_ranks_have_their_place(outcomes, name):
    outcome_of(outcomes, name)
