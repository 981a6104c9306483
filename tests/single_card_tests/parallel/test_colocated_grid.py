"""Settings, rules and roles of the colocated schedule.

Guarantees: every layout that cannot run is refused with its numbers before anything is built, and
no other rule speaks; layouts that can run pass; each rank has one role, each item of a data lane
goes to one encoder lane that serves it, and every bridge group exchanges the rows of whole data
lanes; the description names what every rank does; the encoder's random numbers are the same on its
mp ranks, on every run, and differ between lanes and steps.
"""

import itertools

import numpy as np
import paddle
import pytest

from paddle_vl.config.families import EncoderShape
from paddle_vl.config.parallel_settings import EncoderConfig
from paddle_vl.parallel import random_state
from paddle_vl.parallel.colocated.grid import ColocatedGrid, Place
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems

SHAPE = EncoderShape({"vision_config.num_heads": 48})


def problems(encoder: dict, num_processes: int | None = None, **degrees) -> list[str]:
    settings = {"pp_degree": 2, "num_micro_batches": 2, "schedule": "colocated"} | degrees
    chosen = ParallelDegrees(encoder=EncoderConfig(**encoder), **settings)
    return plan_problems(TopologyPlan(chosen, num_processes or chosen.num_processes, encoder=SHAPE))


@pytest.mark.parametrize(
    ("encoder", "degrees"),
    [
        ({}, {}),
        ({"dp_degree": 2}, {}),
        ({"mp_degree": 2}, {"num_micro_batches": 1}),
        ({"dp_degree": 8}, {"dp_degree": 2, "mp_degree": 2}),
        ({"dp_degree": 1, "mp_degree": 8}, {"dp_degree": 2, "mp_degree": 2}),
        ({"mp_degree": 4, "sharding_stage": 1}, {"sharding_degree": 4, "pp_degree": 2}),
        ({}, {"pp_degree": 4, "num_virtual_stages": 2, "num_micro_batches": 8}),
        ({}, {"pp_degree": 4, "num_micro_batches": 1}),
    ],
)
def test_layouts_that_can_run_pass(encoder, degrees):
    assert problems(encoder, **degrees) == []


@pytest.mark.parametrize(
    ("encoder", "degrees", "message"),
    [
        ({}, {"pp_degree": 1}, "parallel.schedule is colocated but parallel.pp_degree is 1"),
        (
            {"dp_degree": 2}, {"dp_degree": 2},
            "parallel.encoder: dp_degree 2 x mp_degree 1 = 2, but the run has 4 ranks",
        ),
        ({"mp_degree": 3}, {}, "parallel.encoder.mp_degree 3 does not divide the 2 ranks"),
        (
            {"mp_degree": 2}, {"dp_degree": 2, "pp_degree": 3},
            "3 encoder lanes (6 ranks / parallel.encoder.mp_degree 2) and 2 data lanes "
            "(parallel.dp_degree 2 x sharding_degree 1): one number must divide the other",
        ),
        (
            {"mp_degree": 2, "sharding_stage": 1}, {},
            "parallel.encoder.sharding_stage is 1 but there is one encoder lane of 2 ranks",
        ),
        (
            {"mp_degree": 32}, {"pp_degree": 32},
            "vision_config.num_heads 48 does not divide by parallel.encoder.mp_degree 32 "
            "(48 = 1 x 32 + 16)",
        ),
        ({}, {"dp_degree": 2, "ep_degree": 2}, "parallel.ep_degree 2: expert parallelism is not"),
        (
            {}, {"pp_degree": 4, "num_virtual_stages": 2, "num_micro_batches": 3},
            "train.gradient_accumulation_steps 3 is less than parallel.pp_degree 4",
        ),
    ],
)  # fmt: skip
def test_each_rule_refuses_its_case_with_the_numbers(encoder, degrees, message):
    found = problems(encoder, **degrees)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize("degree", ["pp_degree", "cp_degree"])
def test_other_degrees_of_the_encoder_are_refused(degree):
    with pytest.raises(ValueError, match=f"{degree}(.|\n)*1"):
        EncoderConfig(**{degree: 2})


def grid_of(lanes: int, stages: int, mp: int, encoder_mp: int, by_sharding: bool) -> ColocatedGrid:
    """Ranks as fleet numbers them: mp innermost, then sharding, pp and dp."""
    if by_sharding:
        places = [Place(s, p, m) for p in range(stages) for s in range(lanes) for m in range(mp)]
    else:
        places = [Place(d, p, m) for d in range(lanes) for p in range(stages) for m in range(mp)]
    return ColocatedGrid(tuple(places), len(places) // encoder_mp, encoder_mp)


GRIDS = [
    (lanes, stages, mp, encoder_mp, by_sharding)
    for lanes, stages, mp in itertools.product((1, 2, 4), (2, 4), (1, 2))
    for encoder_mp in (1, 2, 4, 8, 16)
    for by_sharding in (False, True)
    if encoder_mp <= lanes * stages * mp
]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_every_item_has_its_encoder_lanes_and_every_rank_its_groups(sizes):
    grid = grid_of(*sizes)
    roles = [grid.role(rank) for rank in range(grid.world_size)]
    for lane in range(grid.data_lanes):
        serving = {role.encoder_lane for role in roles if lane in role.served_lanes}
        assert len(serving) == grid.lanes_in
    for role in roles:
        assert role.place.lane in role.served_lanes
    # One replica of each shard of the encoder per lane, and one rank per lane and shard.
    for groups, size in (
        (grid.encoder_mp_groups(), grid.encoder_mp),
        (grid.encoder_dp_groups(), grid.encoder_dp),
        (grid.lane_groups(), grid.lane_size),
    ):
        assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
        assert {len(group) for group in groups} == {size}
    for group in grid.encoder_mp_groups():
        assert [roles[rank].encoder_place for rank in group] == list(range(grid.encoder_mp))
    for group in grid.encoder_dp_groups():
        assert len({roles[rank].encoder_place for rank in group}) == 1
    bridge = grid.bridge_groups()
    if grid.kind == "equal":
        assert bridge == []
        return
    assert sorted(itertools.chain(*bridge)) == list(range(grid.world_size))
    for group in bridge:
        lanes = {roles[rank].place.lane for rank in group}
        encoders = {roles[rank].encoder_lane for rank in group}
        if grid.kind == "fan-in":
            assert len(lanes) == 1
            assert len(encoders) == len(group) == grid.lanes_in
        else:
            assert len(encoders) == 1
            assert lanes == set(roles[group[0]].served_lanes)
            assert len(group) == grid.lanes_out


def drawn(seed: int, step: int, lane: int, place: int) -> tuple[list, list]:
    random_state.seed_encoder_random(seed, step, lane, place)
    paddle.seed(9)
    with random_state.encoder_random():
        common = paddle.rand([4]).tolist()
    with random_state.encoder_split_random():
        own = paddle.rand([4]).tolist()
    # The default generator goes on as if nothing had been drawn.
    np.testing.assert_array_equal(paddle.rand([4]).numpy(), _first_of(9))
    return common, own


def _first_of(seed: int) -> np.ndarray:
    paddle.seed(seed)
    return paddle.rand([4]).numpy()


def test_random_numbers_of_the_encoder_are_reproducible():
    common, own = drawn(5, 3, lane=1, place=0)
    assert drawn(5, 3, lane=1, place=0) == (common, own)
    assert drawn(5, 3, lane=1, place=1)[0] == common
    assert drawn(5, 3, lane=1, place=1)[1] != own
    assert drawn(5, 3, lane=0, place=0)[0] != common
    assert drawn(5, 4, lane=1, place=0)[0] != common
    assert common != own
