"""The topology of one rank.

Guarantees: a single rank is rank 0 of groups of one, takes all samples and does not start fleet;
degrees that do not match the world size are refused before fleet starts.
"""

import paddle.distributed as dist
import pytest

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
