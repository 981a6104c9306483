"""Camera values of another range than 0 to 1.

Guarantees: training, acting and planning refuse images of 0 to 255 and other ranges, of cameras and
goals, in past frames too, with the camera, its values and the remedy; so with normalized images; a
small overshoot of interpolation passes.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.images import check_images
from tests.single_card_tests.families.pi07 import test_planner_policy as planning
from tests.single_card_tests.families.pi07.test_policy import golden_policy, observation, raw_batch

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
    for use in (planner.plan, planner.training_inputs):
        with pytest.raises(ValueError, match=FROM_255):
            use(scaled(batch))


def test_images_that_statistics_normalize_are_refused_in_their_raw_range():
    policy = golden_policy()
    policy.normalizers["normalize_inputs"].normalize = lambda batch, index: pytest.fail("late")
    with pytest.raises(ValueError, match=FROM_255):
        policy.training_inputs(scaled(raw_batch()[0]))


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
