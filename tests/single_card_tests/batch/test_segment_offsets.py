"""Offsets of several samples in a row.

Pinned: padding is a segment of its own; restarts of text positions give the same offsets; positions
of a packed sample are those of the sample alone; offsets that do not tile the rows are refused, and
so is an image that crosses from a sample into the next; the end of every key's segment.
"""

import numpy as np
import pytest

from paddle_vl.batch.positions import (
    check_offsets,
    key_ends,
    mrope_position_ids,
    restart_offsets,
    segment_offsets,
)

IMAGE, VIDEO = 91, 92
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


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


def test_an_image_across_two_samples_is_refused():
    ids = np.array([[1, *[IMAGE] * 4, 2]])
    with pytest.raises(ValueError, match="image item 0 .* not one unbroken run .* in sample 0"):
        mrope_position_ids(ids, None, np.array([[1, 4, 4]]), **IDS, cu_seqlens=np.array([0, 3, 6]))


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
