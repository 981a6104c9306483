"""Random changes of a training sample's images.

Guarantees: each change equals its definition on images whose result is known; the forms of openpi
and LeRobot choose what these choose; a camera's real frames are changed alike, cameras differently;
padding, goal images and evaluations stay as they are; draws depend on seed, epoch and number alone.
"""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from paddle_vl.families.policy.demonstrations.sample import DrawnDemonstrations
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.features import IMAGE_TRANSFORMS, ImageTransforms
from paddle_vl.families.policy.image_transforms import changed, drawn_changes
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, same

OPENPI, LEROBOT = (ImageTransforms(**IMAGE_TRANSFORMS[name]) for name in ("openpi", "lerobot"))
SOURCE = SyntheticDemonstrations(24, SHAPES)
DATA = DrawnDemonstrations(SOURCE, seed=3)


def drawn(shape=(2, 3, 20, 20)) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


GREY = np.array([0.299, 0.587, 0.114])[:, None, None]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"brightness": [0.5, 0.5]}, lambda x: x * 0.5),
        ({"saturation": [0.0, 0.0]}, lambda x: np.repeat((x * GREY).sum(1, keepdims=True), 3, 1)),
        (
            {"contrast": [0.25, 0.25]},
            lambda x: 0.25 * x + 0.75 * (x * GREY).sum(1).mean((1, 2))[:, None, None, None],
        ),
        # A third of the circle: red becomes green, green blue, blue red.
        ({"hue": [1 / 3, 1 / 3]}, lambda x: x[:, [2, 0, 1]]),
        ({"hue": [1.0, 1.0]}, lambda x: x),
        ({"crop": 1.0}, lambda x: x),
        ({"sharpness": [1.0, 1.0]}, lambda x: x),
    ],
)
def test_changes_of_known_results(setting, expected):
    found = changed(drawn(), "camera0", ImageTransforms(**setting), rng())
    assert found.dtype == np.float32
    # Of 8 bits; the hue is rounded too.
    np.testing.assert_allclose(found, expected(drawn()), atol=0.05 if "hue" in setting else 0.007)


def test_a_crop_is_a_part_scaled_to_the_whole():
    """Of a ramp, scaled bilinearly, the inner pixels are a ramp of 95 % of its slope."""
    ramp = np.broadcast_to(np.arange(20, dtype=np.float32) / 40, (1, 3, 20, 20))
    found = changed(ramp, "camera0", ImageTransforms(crop=0.95), rng())
    slope = (found[..., -2] - found[..., 1]) / 17
    np.testing.assert_allclose(slope, 0.95 / 40, atol=1 / 255 / 17)


def test_rotation_and_shift_move_a_square_as_far_as_they_say():
    image = np.zeros((1, 3, 41, 41), np.float32)
    image[..., 18:23, 33:38] = 1.0
    rows, columns = np.mgrid[:41, :41]
    for seed in range(5):
        settings = ImageTransforms(rotation=30.0)
        found = changed(image, "camera0", settings, np.random.default_rng(seed))[0, 0]
        place = [(found * axis).sum() / found.sum() - 20 for axis in (rows, columns)]
        assert np.hypot(*place) == pytest.approx(15, abs=0.1)
        angle = np.degrees(np.arctan2(*place))
        expected = np.random.default_rng(seed).uniform(-30, 30)
        assert angle == pytest.approx(expected, abs=0.5)
        settings = ImageTransforms(shift=0.1)
        image_at_centre = np.roll(image, -15, axis=-1)
        moved = changed(image_at_centre, "camera0", settings, np.random.default_rng(seed))
        at = np.argwhere(moved[0, 0] == 1.0)
        assert len(at) == 25
        assert 0 < np.abs(at.min(axis=0) - 18).max() <= 4


KINDS = {
    Image.Image.resize: "crop",
    ImageEnhance.Brightness: "brightness",
    ImageEnhance.Contrast: "contrast",
    ImageEnhance.Color: "saturation",
    ImageEnhance.Sharpness: "sharpness",
}


def names_of(settings, camera, seed) -> frozenset[str]:
    drawn = drawn_changes(camera, settings, np.random.default_rng(seed), (20, 20))
    kinds = [change.keywords.get("kind", change.func) for change in drawn]
    return frozenset(KINDS.get(kind, getattr(kind, "__name__", "")) for kind in kinds)


def test_which_changes_an_image_gets():
    colours = {"brightness", "contrast", "saturation"}
    assert names_of(OPENPI, "base_0_rgb", 0) == colours | {"crop", "_moved"}
    assert names_of(OPENPI, "left_wrist_0_rgb", 0) == colours
    found = [names_of(LEROBOT, "left_wrist_0_rgb", seed) for seed in range(60)]
    assert {len(names) for names in found} == {3}
    assert frozenset().union(*found) == colours | {"_turned", "sharpness", "_moved"}
    # Of 20 choices.
    assert len({*found}) > 12


def test_samples_are_changed_by_seed_epoch_and_number_alone():
    data = replace(DATA, transforms=LEROBOT)
    for number in (0, 7):
        plain, sample = DATA[number], data[number]
        assert same(sample, data[number])
        is_pad = plain["obs_history_is_pad"]
        for camera in SHAPES.cameras:
            assert (sample[camera] != plain[camera])[~is_pad].any()
            np.testing.assert_array_equal(sample[camera][is_pad], plain[camera][is_pad])
        rest = sample.keys() - {*SHAPES.cameras}
        assert same({name: sample[name] for name in rest}, {name: plain[name] for name in rest})
        for other in (data.in_epoch(1), replace(data, seed=4)):
            assert not same(sample, other[number])


def test_a_cameras_frames_are_changed_alike():
    class Still(SyntheticDemonstrations):
        """Every frame of both cameras is the same image."""

        def demonstration(self, number, **options):
            sample = super().demonstration(number, **options)
            image = sample["camera0"][-1]
            return sample | {c: np.stack([image] * 3) for c in SHAPES.cameras}

    number = next(n for n in range(24) if not DATA[n]["obs_history_is_pad"].any())
    sample = replace(DATA, transforms=OPENPI, source=Still(24, SHAPES))[number]
    for camera in SHAPES.cameras:
        np.testing.assert_array_equal(sample[camera][0], sample[camera][-1])
    assert (sample["camera0"] != sample["camera1"]).any()


@pytest.mark.parametrize(
    ("values", "message"), [({"hue": [0.1, -0.1]}, "lower one"), ({"crop": 0.0}, "greater than 0")]
)
def test_settings_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ImageTransforms(**values)
