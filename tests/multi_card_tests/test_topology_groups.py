"""Fleet groups of four processes.

Guarantees, for dp 2 x mp 2, mp 2 x pp 2 and sharding 2 x mp 2: every rank knows its coordinates and
its groups' members, mp processes being neighbours; a sum over a group adds just its members; fleet
gets what a pipeline needs; Paddle is seeded alike on every rank; starting fleet again with other
degrees is refused instead of keeping the old groups.
"""

import paddle
import paddle.distributed as dist
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest
from paddle.distributed import fleet

from paddle_vl.parallel.topology import ParallelDegrees, Topology, initialize
from tests.launch import launch, outcome_of, run_checks

PROCESSES = 4
AXES = ("dp", "mp", "pp", "sharding")
DEGREES = {
    "dp_mp": {"dp_degree": 2, "mp_degree": 2},
    "mp_pp": {"mp_degree": 2, "pp_degree": 2, "num_micro_batches": 3},
    "sharding_mp": {"sharding_degree": 2, "mp_degree": 2},
}
# mp processes are 0 and 1, 2 and 3; the other axis has 0 and 2, 1 and 3.
NEIGHBOURS = [[0, 1], [0, 1], [2, 3], [2, 3]]
DISTANT = [[0, 2], [1, 3], [0, 2], [1, 3]]
ALONE = [[0], [1], [2], [3]]


def worker():
    checks = {name: lambda degrees=degrees: place(**degrees) for name, degrees in DEGREES.items()}
    return run_checks(checks | {"other_degrees": start_again, "same_degrees": same_again})


def place(**degrees) -> dict:
    """A topology as this rank sees it."""
    # Several topologies in one launch: fleet alone would keep the first one.
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    topology = initialize(ParallelDegrees(**degrees))
    groups = {axis: getattr(topology, f"{axis}_group") for axis in AXES}
    strategy = fleet.fleet._user_defined_strategy
    return {
        "text": topology.describe(),
        "data": (topology.data_rank, topology.data_size),
        "ranks": {axis: getattr(topology, f"{axis}_rank") for axis in AXES},
        "members": {axis: group.ranks for axis, group in groups.items()},
        "sums": {axis: summed_ranks(topology, group) for axis, group in groups.items()},
        "random": paddle.rand([1]).item(),
        "micro_batches": strategy.pipeline_configs["accumulate_steps"],
        "dynamic": strategy.hybrid_configs["pp_configs"].enable_dynamic_shape,
        "batched": strategy.hybrid_configs["pp_configs"].use_batch_p2p_comm,
    }


def summed_ranks(topology: Topology, group) -> int:
    """The sum of 10 ** rank over a group: one decimal digit for each rank."""
    value = paddle.to_tensor([10**topology.rank])
    if group.nranks > 1:
        dist.all_reduce(value, group=group)
    return value.item()


def start_again() -> str:
    with pytest.raises(RuntimeError) as refusal:
        initialize(ParallelDegrees(dp_degree=4))
    return str(refusal.value)


def same_again() -> list[int]:
    return initialize(ParallelDegrees(**DEGREES["sharding_mp"])).sharding_group.ranks


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, PROCESSES)


@pytest.mark.parametrize(
    ("name", "distant"), [("dp_mp", "dp"), ("mp_pp", "pp"), ("sharding_mp", "sharding")]
)
def test_groups_have_their_members_and_sum_over_them(outcomes, name, distant):
    for rank, seen in enumerate(outcome_of(outcomes, name)):
        members = {axis: ALONE[rank] for axis in AXES}
        members |= {"mp": NEIGHBOURS[rank], distant: DISTANT[rank]}
        assert seen["members"] == members
        assert seen["sums"] == {
            axis: sum(10**member for member in group) for axis, group in members.items()
        }
        assert seen["ranks"] == dict.fromkeys(AXES, 0) | {"mp": rank % 2, distant: rank // 2}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("dp_mp", ["dp 0, mp 0", "dp 0, mp 1", "dp 1, mp 0", "dp 1, mp 1"]),
        ("mp_pp", ["mp 0, pp 0", "mp 1, pp 0", "mp 0, pp 1", "mp 1, pp 1"]),
        (
            "sharding_mp",
            ["mp 0, sharding 0", "mp 1, sharding 0", "mp 0, sharding 1", "mp 1, sharding 1"],
        ),
    ],
)
def test_ranks_are_described_by_their_coordinates(outcomes, name, texts):
    found = [seen["text"] for seen in outcome_of(outcomes, name)]
    assert found == [f"rank {rank} ({text})" for rank, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dp_mp", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("mp_pp", [(0, 1)] * 4),
        ("sharding_mp", [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_samples_split_over_data_and_sharding_processes(outcomes, name, parts):
    assert [seen["data"] for seen in outcome_of(outcomes, name)] == parts


def test_pipeline_gets_its_micro_batches_of_any_shape(outcomes):
    for seen in outcome_of(outcomes, "mp_pp"):
        assert (seen["micro_batches"], seen["dynamic"], seen["batched"]) == (3, True, False)


@pytest.mark.parametrize("name", DEGREES)
def test_random_numbers_start_alike_on_every_rank(outcomes, name):
    assert len({seen["random"] for seen in outcome_of(outcomes, name)}) == 1


def test_other_degrees_in_a_started_process_are_refused(outcomes):
    for message in outcome_of(outcomes, "other_degrees"):
        assert "dp_degree 1 instead of 4, mp_degree 2 instead of 1" in message


def test_same_degrees_again_give_the_same_groups(outcomes):
    assert outcome_of(outcomes, "same_degrees") == DISTANT
