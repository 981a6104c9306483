"""Rotary positions, offsets of packed samples, the order of patches, and slices of token rows.

The walk follows section 6 of the specification, token by token, without a running sum.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paddle_vl.batch.positions import (
    check_offsets,
    frame_runs,
    key_ends,
    mrope_position_ids,
    restart_offsets,
    segment_offsets,
    vision_layout,
)
from paddle_vl.batch.row_slices import RowSlice, slice_of_rows
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, token_rows
from tests.support.tiny import GOLDEN

IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


def walk(samples):
    """Positions of one unpadded sample given as text tokens and (kind, t, h, w) items."""
    positions, p = [], 0
    for item in samples:
        if isinstance(item, int):
            positions.append((p, p, p))
            p += 1
            continue
        _, h, w = item
        positions += [(p, p + y, p + x) for y in range(h // 2) for x in range(w // 2)]
        p += max(h, w) // 2
    return np.array(positions, dtype=np.int64).T, p


ITEMS = st.one_of(
    st.integers(1, 9),
    st.tuples(st.just("image"), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8])),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(ITEMS, min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_positions_equal_a_token_by_token_walk(samples, pad_left):
    rows = [
        [item if isinstance(item, int) else ("image", item[1] * item[2] // 4) for item in sample]
        for sample in samples
    ]
    grids = [[1, item[1], item[2]] for s in samples for item in s if not isinstance(item, int)]
    right = token_rows(*rows)
    ids_BL, mask_BL = np.zeros_like(right), np.zeros_like(right)
    wanted = [walk(sample) for sample in samples]
    for b, (positions, _) in enumerate(wanted):
        n = positions.shape[1]
        where = slice(ids_BL.shape[1] - n, None) if pad_left else slice(0, n)
        ids_BL[b, where], mask_BL[b, where] = right[b, :n], 1
    found, deltas_B = mrope_position_ids(ids_BL, mask_BL, np.array(grids).reshape(-1, 3), **IDS)
    for b, (positions, next_position) in enumerate(wanted):
        real = mask_BL[b].astype(bool)
        assert found[:, b, real].tolist() == positions.tolist()
        assert (found[:, b, ~real] == 0).all()
        assert deltas_B[b] == next_position - real.sum()


def test_time_does_not_advance_inside_a_video_frame_and_frames_are_items_of_their_own():
    ids = token_rows([5, ("video", 2), 6, ("video", 2), 7])
    found, _ = mrope_position_ids(ids, video_grid_thw=np.array([[2, 2, 4]]), **IDS)
    assert found[:, 0].T.tolist() == [
        [0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3], [4, 4, 4], [4, 4, 5], [6, 6, 6],
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["multi_image_right_pad", "some_without_image", "tied_one_image"])
def test_positions_equal_the_reference(case):
    tensors = load_file(GOLDEN / "qwen_vl" / case / "tensors.safetensors")
    mask_BL = tensors["in.attention_mask"]
    found, deltas_B = mrope_position_ids(
        tensors["in.input_ids"],
        mask_BL,
        tensors["in.image_grid_thw"],
        image_token_id=500,
        video_token_id=501,
    )
    real = mask_BL.astype(bool)
    assert (found[:, real] == tensors["in.position_ids"][:, real]).all()
    assert deltas_B.tolist() == tensors["rope_deltas"].reshape(-1).tolist()


@pytest.mark.parametrize(
    ("rows", "grid", "offsets", "told"),
    [
        ([[("image", 3)]], [1, 2, 4], None, "3 image placeholder.*image_grid_thw describes 2"),
        ([[("image", 1), 5, ("image", 1)]], [1, 2, 4], None, "item 0 .* not one unbroken run of 2"),
        ([[5, ("image", 1)], [("image", 1), 5]], [1, 2, 4], None, "not one unbroken run"),
        ([[1, ("image", 4), 2]], [1, 4, 4], [0, 3, 6], "image item 0 .* run .* in sample 0"),
    ],
)
def test_placeholders_that_are_not_their_grid_are_named(rows, grid, offsets, told):
    with pytest.raises(ValueError, match=told):
        mrope_position_ids(
            token_rows(*rows), None, np.array([grid]), **IDS,
            cu_seqlens=None if offsets is None else np.array(offsets),
        )  # fmt: skip


def test_offsets_count_all_rows_and_padding():
    offsets = segment_offsets([[3, 2], [4], [], [6]], 6)
    assert offsets.dtype == np.int32
    assert offsets.tolist() == [0, 3, 5, 6, 10, 12, 18, 24]


def test_restarts_of_text_positions_are_the_offsets():
    positions = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]]
    assert restart_offsets(np.array(positions)).tolist() == [0, 3, 5, 6, 12, 13, 14, 18]


def test_positions_of_a_packed_sample_are_those_of_the_sample_alone():
    samples = [[1, 2, *[IMAGE] * 6, 3], [4], [5, *[VIDEO] * 2, 6, *[VIDEO] * 2, 7, *[IMAGE] * 4]]
    images, videos = np.array([[1, 4, 6], [1, 4, 4]]), np.array([[2, 2, 4]])
    rows = np.zeros((2, 12), dtype=np.int64)
    rows[0, :10], rows[1, :11] = samples[0] + samples[1], samples[2]
    offsets = segment_offsets([[9, 1], [11]], 12)
    mask = np.ones_like(rows)
    mask[0, 10:], mask[1, 11:] = 0, 0
    found, deltas = mrope_position_ids(rows, mask, images, videos, **IDS, cu_seqlens=offsets)
    own_grids = [(images[:1], None), (None, None), (images[1:], videos)]
    alone = [
        mrope_position_ids(np.array([ids]), None, *grids, **IDS)
        for ids, grids in zip(samples, own_grids, strict=True)
    ]
    positions = [positions[:, 0] for positions, _ in alone]
    np.testing.assert_array_equal(found[:, 0, :10], np.concatenate(positions[:2], axis=1))
    np.testing.assert_array_equal(found[:, 1, :11], positions[2])
    assert not found[:, mask == 0].any()
    assert deltas[[0, 1, 3]].tolist() == [int(delta[0]) for _, delta in alone]


def test_offsets_that_do_not_tile_the_rows_are_refused():
    check_offsets(np.array([0, 2, 4, 8]), 2, 4)
    for offsets in ([0, 4], [1, 4, 8], [0, 4, 4, 8], [0, 5, 4, 8], [8], [[0, 8]]):
        with pytest.raises(ValueError, match=r"must increase from 0 to 8.*\[2, 4\] batch"):
            check_offsets(np.array(offsets), 2, 4)
    with pytest.raises(ValueError, match="crosses token row 4, where a row of 4 tokens begins"):
        check_offsets(np.array([0, 3, 8]), 2, 4)


def test_a_key_is_seen_up_to_the_end_of_its_segment():
    ends = key_ends(np.array([0, 3, 5, 10]), 5)
    assert ends.dtype == np.int32
    assert ends.tolist() == [[3, 3, 3, 5, 5], [5] * 5]


def test_patches_come_in_merge_block_order():
    layout = vision_layout(np.array([[1, 4, 4]]), table_side=6)
    assert layout.coordinates[:8].tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
    ]  # fmt: skip


def test_taps_of_four_rows_over_a_table_of_six():
    layout = vision_layout(np.array([[1, 4, 2]]), table_side=6)
    rows = {}
    for (y, x), taps, weights in zip(*layout, strict=True):
        if x == 0:
            rows[int(y)] = float((taps // 6 * weights).sum())
    assert rows == pytest.approx({0: 0.0, 1: 5 / 3, 2: 10 / 3, 3: 5.0})


def test_weights_sum_to_one_and_taps_stay_inside_the_table():
    layout = vision_layout(np.array([[1, 2, 2], [3, 6, 14], [1, 30, 4]]), table_side=5)
    np.testing.assert_allclose(layout.tap_weights.sum(axis=1), 1.0, atol=1e-6)
    assert layout.tap_rows.min() >= 0
    assert layout.tap_rows.max() < 25
    # Frames of a video repeat the same patches.
    frames = layout.coordinates[4:256].reshape(3, 84, 2)
    assert (frames == frames[:1]).all()


def test_segments_are_frames_and_equal_neighbours_share_a_run():
    grids = np.array([[1, 4, 6], [2, 4, 6], [1, 2, 2], [1, 4, 6]])
    assert frame_runs(grids) == ((3, 24), (1, 4), (1, 24))


@pytest.mark.parametrize("grid", [[1, 3, 4], [1, 4, 0], [0, 4, 4]])
def test_a_grid_that_merge_blocks_do_not_tile_is_named(grid):
    with pytest.raises(ValueError, match=r"vision item 1 has grid .*multiples of the merge size 2"):
        vision_layout(np.array([[1, 4, 4], grid]), table_side=6)


SEGMENTS = {
    "of every size": [21, 8, 30, 5],
    "one": [64],
    "shorter than the chunks": [3, 1, 1, 3, 56],
    "of one token each": [1] * 8,
}


def offsets(segments: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(segments)])


def test_the_documented_example():
    found = slice_of_rows(offsets([8, 5, 1]), 2)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_bounds_are_those_of_the_rows_that_see_a_key(segments, size):
    starts = offsets(segments)
    segment_T = np.repeat(np.arange(len(segments)), segments)
    slices = [RowSlice.of(starts, rank, size) for rank in range(size)]
    keys = np.concatenate([own.rows for own in slices])
    np.testing.assert_array_equal(np.sort(keys), np.arange(starts[-1]))
    for own in slices:
        assert len(own.rows) == starts[-1] // size
        seen = (segment_T[own.rows][:, None] == segment_T[keys]) & (own.rows[:, None] >= keys)
        place = np.arange(len(own.rows))[:, None]
        ends_T, firsts_T = own.key_rows[0, 0].T
        np.testing.assert_array_equal((place < ends_T) & (place >= firsts_T), seen)
        numbers = np.arange(0, starts[-1], 3)
        chosen = own.chosen(numbers)
        np.testing.assert_array_equal(chosen, np.isin(numbers, own.rows))
        np.testing.assert_array_equal(own.rows[own.places[numbers[chosen]]], numbers[chosen])
        halves = np.concatenate([each.rows for each in slices]).reshape(2 * size, -1)
        for number, rows in enumerate(halves if len(own.rows) % 2 == 0 else ()):
            assert (own.shards(rows, 2) == number).all()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["one", "many", "long and short"])
def test_ranks_have_equal_shares_of_the_visible_pairs(kind, size):
    rng = np.random.default_rng(3)
    many = np.cumsum(rng.lognormal(7.5, 1, 40).astype(int) + 1)
    segments = {"one": [], "many": many, "long and short": 20000 + many}[kind]
    starts = np.array([0, *(end for end in segments if end < 32768), 32768])
    place_T = np.arange(32768) - np.repeat(starts[:-1], np.diff(starts))
    pairs = np.bincount(slice_of_rows(starts, size), weights=place_T + 1)
    assert pairs.max() / pairs.mean() < 1.01


def test_rows_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"14 token rows .* by the context-parallel degree 4: set"):
        slice_of_rows(offsets([8, 6]), 4)
