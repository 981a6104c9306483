"""Patch coordinates, interpolation taps and attention segments from the grids.

Pinned here: merge-block order, the specification's taps, weights that sum to 1, segments per frame,
and refusal of grids that merge blocks do not tile.
"""

import numpy as np
import pytest

from paddle_vl.batch.positions import vision_layout


def test_patches_come_in_merge_block_order():
    layout = vision_layout(np.array([[1, 4, 4]]), table_side=6)
    assert layout.coordinates[:8].tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
    ]  # fmt: skip


def test_taps_of_four_rows_over_a_table_of_six():
    layout = vision_layout(np.array([[1, 4, 2]]), table_side=6)
    rows = {}
    for (y, x), taps, weights in zip(
        layout.coordinates, layout.tap_rows.T, layout.tap_weights.T, strict=True
    ):
        if x == 0:
            rows[int(y)] = float((taps // 6 * weights).sum())
    assert rows == pytest.approx({0: 0.0, 1: 5 / 3, 2: 10 / 3, 3: 5.0})


def test_weights_sum_to_one_and_taps_stay_inside_the_table():
    layout = vision_layout(np.array([[1, 2, 2], [3, 6, 14], [1, 30, 4]]), table_side=5)
    np.testing.assert_allclose(layout.tap_weights.sum(axis=0), 1.0, atol=1e-6)
    assert layout.tap_rows.min() >= 0
    assert layout.tap_rows.max() < 25


def test_frames_of_a_video_repeat_the_same_patches():
    layout = vision_layout(np.array([[3, 4, 6]]), table_side=6)
    frames = layout.coordinates.reshape(3, 24, 2)
    assert (frames == frames[:1]).all()


def test_segments_are_frames_and_equal_neighbours_share_a_run():
    grids = np.array([[1, 4, 6], [2, 4, 6], [1, 2, 2], [1, 4, 6]])
    assert vision_layout(grids, table_side=6).segments == ((3, 24), (1, 4), (1, 24))


@pytest.mark.parametrize("grid", [[1, 3, 4], [1, 4, 0], [0, 4, 4]])
def test_a_grid_that_merge_blocks_do_not_tile_is_named(grid):
    with pytest.raises(ValueError, match=r"vision item 1 has grid .*multiples of the merge size 2"):
        vision_layout(np.array([[1, 4, 4], grid]), table_side=6)
