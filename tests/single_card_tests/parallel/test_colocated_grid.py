"""Roles and groups of the colocated schedule, and the random numbers of its encoder.

The rules for its layouts are in `test_degrees`.
"""

import itertools

import numpy as np
import paddle
import pytest

from paddle_vl.parallel import random_state
from paddle_vl.parallel.colocated.grid import ColocatedGrid, Place


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
