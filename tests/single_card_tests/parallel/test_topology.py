"""The topology of one rank.

Guarantees: a single rank is rank 0 of groups of one, takes all samples and does not start fleet;
samples are sharded over dp and sharding together; degrees that do not match the world size are
refused before fleet starts.
"""

import paddle.distributed as dist
import pytest

from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.topology import ParallelDegrees, Topology, initialize

AXES = ("dp", "mp", "pp", "sharding")


def test_one_process_is_the_whole_of_every_axis():
    topology = Topology.single()
    for axis in AXES:
        group = getattr(topology, f"{axis}_group")
        assert (group.rank, group.nranks, group.ranks) == (0, 1, [0])
        assert getattr(topology, f"{axis}_rank") == 0
    assert (topology.rank, topology.world_size) == (0, 1)
    assert (topology.data_rank, topology.data_size) == (0, 1)
    assert topology.describe() == "rank 0"


def test_one_process_starts_no_fleet():
    topology = initialize(ParallelDegrees(num_micro_batches=4))
    assert topology.degrees.num_micro_batches == 4
    assert topology.world_size == 1
    assert not dist.is_initialized()


def test_degrees_that_do_not_fit_are_refused_together_before_fleet_starts():
    with pytest.raises(ValueError, match="2 problems") as refusal:
        initialize(ParallelDegrees(dp_degree=2, sequence_parallel=True))
    assert "= 2, but the run has 1 rank:" in str(refusal.value)
    assert "parallel.mp_degree is 1" in str(refusal.value)
    assert not dist.is_initialized()


def test_samples_split_over_dp_then_sharding():
    """Ranks 0 to 5 of dp 3 x sharding 2 take shards 0 to 5."""
    degrees = ParallelDegrees(dp_degree=3, sharding_degree=2)
    for rank in range(6):
        topology = Topology(
            degrees,
            rank,
            dp_group=_group(rank // 2, 3),
            mp_group=_group(0, 1),
            pp_group=_group(0, 1),
            sharding_group=_group(rank % 2, 2),
            ep_group=_group(0, 1),
            expert_sharding_group=_group(rank % 2, 2),
            expert_dp_group=_group(rank // 2, 3),
        )
        assert (topology.data_rank, topology.data_size) == (rank, 6)
        assert topology.describe() == f"rank {rank} (dp {rank // 2}, sharding {rank % 2})"


def test_slices_of_a_sample_have_one_data_rank():
    """Ranks 0 to 3 of sharding 4 in two groups of context parallelism."""
    degrees = ParallelDegrees(sharding_degree=4, cp_degree=2)
    one = _group(0, 1)
    for rank in range(4):
        sharding, cp = _group(rank, 4), _group(rank % 2, 2)
        groups = [one, one, one, sharding, one, sharding, one]
        topology = Topology(degrees, rank, *groups, cp_group=cp)
        assert (topology.data_rank, topology.data_size) == (rank // 2, 2)
        assert topology.describe() == f"rank {rank} (sharding {rank}, cp {rank % 2})"
        ranks = FleetRanks(topology)
        assert ranks.counts_data == ranks.counts_losses == (rank % 2 == 0)
        # Their rows are others.
        assert ranks.random_place == (rank, 0)


def _group(rank: int, size: int) -> dist.collective.Group:
    return dist.collective.Group(rank, -1, list(range(size)))
