"""The topology of one rank."""

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.distributed.fleet.base.topology import CommunicateTopology

from paddle_vl.parallel.degrees import ParallelDegrees, experts_fold
from paddle_vl.parallel.mesh import (
    expert_shards,
    groups_of_axes,
    mesh,
    stage_seats,
)
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.topology import Topology, initialize


def test_one_process_is_the_whole_of_every_axis_and_starts_no_fleet():
    topology = initialize(ParallelDegrees(num_micro_batches=4))
    assert topology.degrees.num_micro_batches == 4
    for axis in ("dp", "mp", "pp", "sharding"):
        group = getattr(topology, f"{axis}_group")
        assert (group.rank, group.nranks, group.ranks) == (0, 1, [0])
        assert getattr(topology, f"{axis}_rank") == 0
    assert (topology.rank, topology.world_size) == (0, 1)
    assert (topology.data_rank, topology.data_size) == (0, 1)
    assert topology.describe() == "rank 0"
    assert not dist.is_initialized()


def test_degrees_that_do_not_fit_are_refused_together_before_fleet_starts():
    with pytest.raises(ValueError, match="2 problems") as refusal:
        initialize(ParallelDegrees(dp_degree=2, sequence_parallel=True))
    assert "= 2, but the run has 1 rank:" in str(refusal.value)
    assert "parallel.mp_degree is 1" in str(refusal.value)
    assert not dist.is_initialized()


# Sizes of dp, sharding and cp, and of each rank its data rank and description.
SPLITS = [
    ((3, 2, 1), lambda r: r, lambda r: f"rank {r} (dp {r // 2}, sharding {r % 2})"),
    # Slices of a sample have one data rank.
    ((1, 4, 2), lambda r: r // 2, lambda r: f"rank {r} (sharding {r}, cp {r % 2})"),
]


@pytest.mark.parametrize(("sizes", "data_rank", "described"), SPLITS)
def test_samples_split_over_dp_then_sharding(sizes, data_rank, described):
    dp, sharding, cp = sizes
    given = ParallelDegrees(dp_degree=dp, sharding_degree=sharding, cp_degree=cp)
    one = _group(0, 1)
    for rank in range(dp * sharding):
        of_dp, own = _group(rank // sharding, dp), _group(rank % sharding, sharding)
        groups = [of_dp, one, one, own, one, own, of_dp]
        topology = Topology(given, rank, *groups, cp_group=_group(rank % cp, cp))
        assert (topology.data_rank, topology.data_size) == (data_rank(rank), dp * sharding // cp)
        assert topology.describe() == described(rank)
        ranks = FleetRanks(topology)
        assert ranks.counts_data == ranks.counts_losses == (rank % cp == 0)
        # Rows of slices are others.
        assert ranks.random_place == (rank, 0)


def _group(rank: int, size: int) -> dist.collective.Group:
    return dist.collective.Group(rank, -1, list(range(size)))


FLEET = {"dp": "data", "pp": "pipe", "sharding": "sharding", "mp": "model"}


def degrees(dp: int, pp: int, sharding: int, mp: int, ep: int) -> ParallelDegrees:
    return ParallelDegrees(
        dp_degree=dp, pp_degree=pp, sharding_degree=sharding, mp_degree=mp, ep_degree=ep
    )


def topologies() -> list[tuple[int, ...]]:
    """Runs of 8 and of 512 ranks with the ep degrees that fold, and some of no powers of two."""
    found = [
        (dp, pp, sharding, mp, ep)
        for num_ranks in (8, 512)
        for pp in (1, 2)
        for mp in (1, 4)
        for sharding in (1, 2, 8, 64, 512)
        for ep in (1, 2, 8, 64, 512)
        if (dp := num_ranks // (pp * sharding * mp)) and experts_fold(ep, dp, sharding * mp)
    ]
    return [*found, (2, 1, 3, 2, 6), (3, 2, 1, 2, 6), (6, 1, 1, 1, 3), (1, 2, 6, 4, 12)]


def test_groups_cover_every_rank_once_and_dense_ones_are_fleets():
    assert len(topologies()) > 60
    for sizes in topologies():
        axes = groups_of_axes(degrees(*sizes))
        for lines in axes.values():
            np.testing.assert_array_equal(np.sort(lines, axis=None), np.arange(lines.size))
        names = [*FLEET.values()]
        fleet = CommunicateTopology(names, list(sizes[:4]))
        for axis, name in FLEET.items():
            assert sorted(axes[axis].tolist()) == sorted(fleet.get_comm_list(name)), sizes


def test_experts_have_every_replica_in_their_sums():
    for sizes in topologies():
        dp, pp, sharding, mp, ep = sizes
        run = degrees(*sizes)
        axes = groups_of_axes(run)
        stage = {rank: rank // (sharding * mp) % pp for rank in range(dp * pp * sharding * mp)}
        # Rank of the ep group, which says what experts a rank has.
        part = {int(rank): n for line in axes["ep"] for n, rank in enumerate(line)}
        assert axes["ep"].shape[1] == ep
        shards = {int(r): n for line in axes["expert_sharding"] for n, r in enumerate(line)}
        for line in axes["expert_sharding"]:
            assert len({part[r] for r in line.tolist()}) == 1
            assert len({stage[r] for r in line.tolist()}) == 1
            # Within one dp rank: replicas of the optimizer state are on others.
            assert len({r // (pp * sharding * mp) for r in line.tolist()}) == 1
        seen = set()
        for line in axes["expert_dp"]:
            kinds = {(part[r], stage[r], shards[r]) for r in line.tolist()}
            assert len(kinds) == 1
            assert not kinds & seen, sizes
            seen |= kinds
        if sharding > 1 and (sharding * mp) % ep == 0:
            assert axes["expert_sharding"].shape[1] == expert_shards(run) == sharding * mp // ep
        assert axes["expert_sharding"].shape[1] * axes["expert_dp"].shape[1] * ep * pp == len(part)
        # Ranks that save together have each share of each parameter of their stage.
        seats = dict(zip([r for r in part if stage[r] == 0], stage_seats(run), strict=True))
        for line in axes["model"]:
            assert len({stage[r] for r in line.tolist()}) == 1
            assert len({(part[r], shards[r]) for r in line.tolist()}) == ep * expert_shards(run)
            assert len({r % (sharding * mp * pp) for r in line.tolist()}) >= sharding * mp
            if stage[line[0]] == 0:
                # Each has other rows of a table.
                assert [seats[r].table for r in line.tolist()] == [*range(len(line))]
                assert len({seats[r].group for r in line.tolist()}) == 1
        for rank, seat in seats.items():
            assert (seat.ep, seat.expert_sharding) == (part[rank], shards[rank])
            assert (seat.mp, seat.sharding) == (rank % mp, rank // mp % sharding)


def test_context_parallel_ranks_are_neighbours_along_sharding():
    """pp 2, sharding 4, mp 2."""
    run = ParallelDegrees(pp_degree=2, sharding_degree=4, mp_degree=2, cp_degree=2)
    found = mesh(run, 13)
    assert (found["sharding"], found["mp"]) == ([9, 11, 13, 15], [12, 13])
    assert (found["cp"], found["cp_mp"]) == ([13, 15], [12, 13, 14, 15])


@pytest.mark.parametrize(
    ("sizes", "rank", "ranks"),
    [
        # The table of docs/parallelism.md: mp 2, sharding 4, ep 4.
        ((1, 1, 4, 2, 4), 1, {"ep": [0, 1, 2, 3], "expert_sharding": [1, 5], "expert_dp": [1]}),
        # ep beyond sharding x mp spans dp.
        ((4, 1, 2, 1, 4), 5, {"ep": [4, 5, 6, 7], "expert_sharding": [5], "expert_dp": [1, 5]}),
        # Over dp alone.
        ((4, 1, 1, 1, 2), 2, {"ep": [2, 3], "expert_sharding": [2], "expert_dp": [0, 2]}),
        # Two copies of the experts in the mp ranks of a stage, without sharding.
        ((1, 2, 1, 4, 2), 6, {"ep": [6, 7], "expert_sharding": [6], "expert_dp": [4, 6]}),
        # A machine of eight, 64 replicas of its sharded state.
        ((64, 1, 8, 1, 8), 500, {"ep": list(range(496, 504)), "expert_sharding": [500]}),
    ],
)
def test_a_rank_has_these_ranks(sizes, rank, ranks):
    found = mesh(degrees(*sizes), rank)
    assert {axis: found[axis] for axis in ranks} == ranks
