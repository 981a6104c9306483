"""Camera frames as inputs of the vision tower.

Guarantees: letterboxing equals PyTorch's on the golden images and pads at the top and left; padded
frames are black, the current one never is; missing cameras are masked; dropped subgoals are grey
and masked.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.images import letterbox, prepare_subgoals, prepare_videos
from tests.support.pi07_golden import case

CAMERAS = ["camera0", "camera1"]


@pytest.mark.parametrize("name", ["same", "tall", "up", "wide"])
def test_golden_resize(name):
    tensors = case("14_ops")[1]
    found = letterbox(tensors[f"resize.{name}.in"], (56, 56))
    np.testing.assert_allclose(found, tensors[f"resize.{name}.out"], rtol=0, atol=2e-6)


def test_letterbox_fills_on_top_and_left():
    box = letterbox(np.ones((1, 3, 4, 8), np.float32), (8, 8), fill=-1)
    assert (box[:, :, :4] == -1).all()
    assert (box[:, :, 4:] == 1).all()
    box = letterbox(np.ones((1, 3, 8, 4), np.float32), (8, 8))
    assert not box[..., :4].any()
    assert (box[..., 4:] == 1).all()


def test_letterbox_goes_into_sizes_that_are_no_squares():
    assert letterbox(np.ones((2, 5, 3, 10, 10), np.float32), (4, 6)).shape == (2, 5, 3, 4, 6)


def test_letterbox_refuses_what_would_vanish():
    with pytest.raises(ValueError, match="1 x 100 has no pixel left"):
        letterbox(np.ones((1, 3, 1, 100), np.float32), (8, 8))


def test_padded_frames_are_black_and_the_current_one_never():
    batch = {"camera0": np.ones((2, 3, 3, 8, 8))}
    is_pad = np.array([[True, False, False], [True, True, True]])
    found = prepare_videos(batch, ["camera0"], (8, 8), 3, history_is_pad_BF=is_pad)
    assert found.images[0].mean(axis=(2, 3, 4)).tolist() == [[0, 1, 1], [0, 0, 1]]
    # The batch and its mask stay unchanged.
    assert batch["camera0"].all()
    assert is_pad[1].all()


def test_absent_cameras_are_black_and_masked():
    batch = {"camera1": np.ones((2, 3, 8, 8)), "subgoal1": np.ones((2, 3, 8, 8))}
    found = prepare_videos(batch, CAMERAS, (8, 8), 1, empty_cameras=1)
    assert [image.shape for image in found.images] == [(2, 1, 3, 8, 8)] * 2
    assert not found.images[1].any()
    assert [mask.tolist() for mask in found.masks] == [[True] * 2, [False] * 2]
    found = prepare_subgoals(batch | {"subgoal_is_pad": [False] * 2}, CAMERAS, (8, 8), 1)
    assert (found.images[1] == -1).all()
    assert [mask.tolist() for mask in found.masks] == [[True] * 2, [False] * 2]


def test_dropped_subgoals_are_grey_and_masked():
    batch = {"subgoal0": np.ones((2, 3, 8, 8)), "subgoal_is_pad": np.array([False, True])}
    found = prepare_subgoals(batch, ["camera0"], (8, 8))
    assert (found.images[0][0] == 1).all()
    assert not found.images[0][1].any()
    assert found.masks[0].tolist() == [True, False]
    # Without subgoal_is_pad all subgoals count as dropped.
    del batch["subgoal_is_pad"]
    assert not prepare_subgoals(batch, ["camera0"], (8, 8)).masks[0].any()
