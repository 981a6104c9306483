"""Rotary positions of text, images and video frames.

Pinned here: the reference's positions on its own batches (padding on both sides, videos, samples
without images), the specification's worked example, equality with a token-by-token walk, and clear
errors. The walk is the rule of the specification, section 6, without any running sum.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paddle_vl.batch.positions import mrope_position_ids
from tests.support.tiny import GOLDEN, IMAGE, VIDEO, token_rows

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


def test_worked_example_of_the_specification():
    ids = token_rows([1, 2, 3, 4, 5, 62, ("image", 6), 7])
    found, _ = mrope_position_ids(ids, image_grid_thw=np.array([[1, 4, 6]]), **IDS)
    assert found[:, 0, :6].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert found[0, 0, 6:12].tolist() == [6] * 6
    assert found[1, 0, 6:12].tolist() == [6, 6, 6, 7, 7, 7]
    assert found[2, 0, 6:12].tolist() == [6, 7, 8, 6, 7, 8]
    assert found[:, 0, 12].tolist() == [9, 9, 9]


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


def test_placeholders_without_their_grid_are_named():
    with pytest.raises(ValueError, match="3 image placeholder.*image_grid_thw describes 2"):
        mrope_position_ids(token_rows([("image", 3)]), image_grid_thw=np.array([[1, 2, 4]]), **IDS)


def test_a_run_broken_by_text_is_named():
    ids = token_rows([("image", 1), 5, ("image", 1)])
    with pytest.raises(ValueError, match="image item 0 .* not one unbroken run of 2"):
        mrope_position_ids(ids, image_grid_thw=np.array([[1, 2, 4]]), **IDS)


def test_a_run_across_two_rows_is_named():
    ids = token_rows([5, ("image", 1)], [("image", 1), 5])
    with pytest.raises(ValueError, match="not one unbroken run"):
        mrope_position_ids(ids, image_grid_thw=np.array([[1, 2, 4]]), **IDS)
