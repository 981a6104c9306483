"""Camera frames as inputs of the vision tower.

Guarantees: letterboxing, compared in `test_pi07_golden`, pads at the top and left; padded
frames are black, the current one never is; missing cameras are masked; dropped subgoals are grey
and masked; training, acting and planning refuse images of 0 to 255 and other ranges with the
camera, its values and the remedy, but for a small overshoot of interpolation.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.images import (
    check_images,
    letterbox,
    prepare_subgoals,
    prepare_videos,
)
from tests.single_card_tests.families.pi07 import test_planner as planning
from tests.single_card_tests.families.pi07.test_policy import golden_policy, observation, raw_batch

CAMERAS = ["camera0", "camera1"]


def test_letterbox_fills_on_top_and_left():
    box = letterbox(np.ones((1, 3, 4, 8), np.float32), (8, 8))
    assert not box[:, :, :4].any()
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


FROM_255 = r"'camera0' holds values from 0 to 255; images are floats from 0 to 1: divide by 255"


def scaled(batch: dict, name: str = "camera0") -> dict:
    """The batch with an image of floats from 0 to 255."""
    image = np.zeros_like(batch[name])
    image[:, ..., ::2] = 255
    return batch | {name: image}


def test_training_acting_and_planning_refuse_images_of_0_to_255():
    policy = golden_policy()
    with pytest.raises(ValueError, match=FROM_255):
        policy(scaled(raw_batch()[0]))
    with pytest.raises(ValueError, match="'subgoal1' holds values from 0 to 255"):
        policy(scaled(raw_batch()[0], "subgoal1"))
    with pytest.raises(ValueError, match=FROM_255):
        policy.select_action(scaled(observation(0)))
    planner, batch = planning.planner(), planning.batch()
    for use in (planner.plan, planner.inputs.training_inputs):
        with pytest.raises(ValueError, match=FROM_255):
            use(scaled(batch))


def test_images_that_statistics_normalize_are_refused_in_their_raw_range():
    policy = golden_policy()
    policy.normalizers["normalize_inputs"].normalize = lambda batch, index: pytest.fail("late")
    with pytest.raises(ValueError, match=FROM_255):
        policy.inputs.training_inputs(scaled(raw_batch()[0]))


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (np.full((2, 3, 3, 8, 8), -1.0), "from -1 to -1; .*: scale them to that"),
        (np.full((1, 3, 8, 8), np.nan), "from nan to nan"),
        (np.zeros((1, 3, 8, 8), np.uint8), "'camera1' holds uint8; .*: divide by 255"),
        (np.pad(np.full((1, 1, 3, 8, 8), 9.0), [(0, 0), (0, 2), *[(0, 0)] * 3]), "from 0 to 9"),
    ],
)
def test_other_ranges_and_types_are_refused(image, named):
    with pytest.raises(ValueError, match=named):
        check_images({"camera1": image}, ["camera0", "camera1"])


def test_images_of_the_range_and_of_any_shape_pass():
    for image in (np.array([-0.1, 1.1]), np.zeros((2, 3, 0, 0)), np.ones((2, 3, 1, 1), np.float16)):
        check_images({"camera0": image, "state": [300.0]}, ["camera0"])
