"""Fleet's process groups on four ranks.

Guarantees, for dp 2 x mp 2, mp 2 x pp 2 and sharding 2 x mp 2: every rank has the right coordinates
and groups, with mp ranks as neighbours; an all-reduce over a group sums over its members only; the
first and last stage of a pipeline share a group; Paddle has the same seed on every rank; dropout is
the same on all ranks of an mp group except for sharded tensors, and is reproducible; topologies may
be started in turn.
"""

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest

from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.topology import ParallelDegrees, Topology, initialize
from paddle_vl.train.schedule import seed_step
from tests.support.launch import launch, outcome_of, run_checks

PROCESSES = 4
AXES = ("dp", "mp", "pp", "sharding")
DEGREES = {
    "dp_mp": {"dp_degree": 2, "mp_degree": 2},
    "mp_pp": {"mp_degree": 2, "pp_degree": 2, "num_micro_batches": 3},
    "sharding_mp": {"sharding_degree": 2, "mp_degree": 2},
}
# The mp groups are (0, 1) and (2, 3); the groups of the other axis are (0, 2) and (1, 3).
NEIGHBOURS = [[0, 1], [0, 1], [2, 3], [2, 3]]
DISTANT = [[0, 2], [1, 3], [0, 2], [1, 3]]
ALONE = [[0], [1], [2], [3]]


def worker():
    places = {name: lambda degrees=degrees: place(**degrees) for name, degrees in DEGREES.items()}
    return run_checks({"dropout": dropout} | places)


def place(**degrees) -> dict:
    """A topology as this rank sees it."""
    topology = initialize(ParallelDegrees(**degrees))
    groups = {axis: getattr(topology, f"{axis}_group") for axis in AXES}
    return {
        "text": topology.describe(),
        "data": (topology.data_rank, topology.data_size),
        "ranks": {axis: getattr(topology, f"{axis}_rank") for axis in AXES},
        "members": {axis: group.ranks for axis, group in groups.items()},
        "sums": {axis: summed_ranks(topology, group) for axis, group in groups.items()},
        "random": paddle.rand([1]).item(),
        "ends": None if topology.ends_group is None else topology.ends_group.ranks,
    }


def dropout() -> dict:
    """Masks of 64 elements in two steps, drawn in the order of a layer."""
    ranks = FleetRanks(initialize(ParallelDegrees(**DEGREES["dp_mp"])))

    def draw() -> list[float]:
        return F.dropout(paddle.ones([64])).tolist()

    seed_step(3, 10, ranks)
    whole = draw()
    with split_random():
        split = draw()
    seed_step(3, 11, ranks)
    masks = {"whole": whole, "split": split, "next step": draw()}
    # Earlier draws do not matter.
    seed_step(3, 10, ranks)
    with split_random():
        split_first = draw()
    return masks | {"again": draw() + split_first}


def summed_ranks(topology: Topology, group) -> int:
    """The sum of 10 ** rank over a group, one decimal digit per rank."""
    value = paddle.to_tensor([10**topology.rank])
    if group.nranks > 1:
        dist.all_reduce(value, group=group)
    return value.item()


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
    ("name", "texts", "parts"),
    [
        (
            "dp_mp",
            ["dp 0, mp 0", "dp 0, mp 1", "dp 1, mp 0", "dp 1, mp 1"],
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
        ("mp_pp", ["mp 0, pp 0", "mp 1, pp 0", "mp 0, pp 1", "mp 1, pp 1"], [(0, 1)] * 4),
    ],
)
def test_ranks_have_their_coordinates_and_samples(outcomes, name, texts, parts):
    found = outcome_of(outcomes, name)
    assert [seen["text"] for seen in found] == [f"rank {r} ({t})" for r, t in enumerate(texts)]
    assert [seen["data"] for seen in found] == parts


def test_first_and_last_stage_of_a_pipeline_have_a_group(outcomes):
    assert [seen["ends"] for seen in outcome_of(outcomes, "mp_pp")] == DISTANT
    assert [seen["ends"] for seen in outcome_of(outcomes, "dp_mp")] == [None] * PROCESSES


def test_dropout_is_the_same_where_mp_processes_have_the_same(outcomes):
    """Masks differ for sharded tensors, between steps, and between shards of the data."""
    drawn = outcome_of(outcomes, "dropout")
    assert [masks["whole"] for masks in drawn[:2]] == [drawn[0]["whole"]] * 2
    assert drawn[0]["split"] != drawn[1]["split"]
    assert drawn[0]["whole"] != drawn[2]["whole"]
    assert drawn[0]["split"] != drawn[2]["split"]
    for masks in drawn:
        assert masks["again"] == masks["whole"] + masks["split"]
        assert masks["next step"] != masks["whole"]
        assert masks["split"] != masks["whole"]


@pytest.mark.parametrize("name", DEGREES)
def test_random_numbers_start_alike_on_every_rank(outcomes, name):
    assert len({seen["random"] for seen in outcome_of(outcomes, name)}) == 1
