"""Demonstrations that lack cameras.

Guarantees: a line may lack up to `empty_cameras` cameras, which become black and masked, and more
are refused with both numbers; all samples have the same entries, whichever cameras they have; a
sample written again lacks the same.
"""

from dataclasses import replace

import numpy as np
import pytest

from make_demonstrations import write_demonstrations
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.images import prepare_subgoals, prepare_videos
from tests.single_card_tests.families.pi07.demonstration_builders import (
    SHAPES,
    line,
    same,
    save_image,
    write_lines,
)

CAMERAS = ("camera0", "camera1", "camera2")
THREE = replace(SHAPES, cameras=CAMERAS, empty_cameras=1)


def test_a_camera_that_a_line_lacks_is_black_and_marked(tmp_path):
    record = line(tmp_path)
    record["camera2"] = record.pop("camera1")
    full = line(tmp_path, camera2=record["camera2"])
    path = write_lines(tmp_path / "a.jsonl", record, full, line(tmp_path, camera2=None))
    dataset = DemonstrationsDataset([path], THREE)
    found = [[bool(sample[f"{name}_is_pad"]) for name in CAMERAS] for sample in dataset]
    assert found == [[False, True, False], [False] * 3, [False, False, True]]
    lacking, whole, _ = dataset
    assert lacking.keys() == whole.keys()
    assert lacking["camera1"].shape == whole["camera1"].shape == (3, 3, 8, 8)
    assert not lacking["camera1"].any()
    np.testing.assert_array_equal(lacking["camera2"], whole["camera2"])
    alone = DemonstrationsDataset([path], replace(THREE, cameras=("camera0",)))
    np.testing.assert_array_equal(alone[0]["camera0"], lacking["camera0"])


@pytest.mark.parametrize(
    ("cameras", "allowed", "message"),
    [
        (["camera0", "camera1"], 0, r"no 'camera2'; .* lacks 1 of .* 3 cameras, .* allows 0"),
        (["camera0"], 1, r"no 'camera1', 'camera2'; .* lacks 2 of .* 3 cameras, .* allows 1"),
        ([], 3, r"no 'camera0', .* lacks 3 of .* 3 cameras, and empty_cameras allows 3, but never"),
    ],
)
def test_more_missing_cameras_are_refused_with_both_numbers(tmp_path, cameras, allowed, message):
    record = line(tmp_path)
    images = record["camera0"]
    record = {name: value for name, value in record.items() if not name.startswith("camera")}
    record |= dict.fromkeys(cameras, images)
    path = write_lines(tmp_path / "a.jsonl", record)
    with pytest.raises(BadSampleError, match=message) as raised:
        DemonstrationsDataset([path], replace(THREE, empty_cameras=allowed))
    assert (raised.value.kind, raised.value.place) == ("missing_key", f"{path}:1")


def test_a_line_cannot_say_itself_what_is_padding(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path, camera0_is_pad=True))
    with pytest.raises(BadSampleError, match="'camera0_is_pad', which nothing reads"):
        DemonstrationsDataset([path], SHAPES)


def test_goals_of_the_cameras_that_a_line_has_suffice(tmp_path):
    save_image(tmp_path / "g.png", 51)
    goals = {"subgoal0": "g.png", "subgoal2": "g.png"}
    three = {"camera2": ["f0.png", "f1.png", "f2.png"]}
    records = [
        line(tmp_path, **three, **goals, camera1=None),
        line(tmp_path, **three, **goals),
        line(tmp_path, **three, **goals, camera1=None, subgoal1="g.png"),
        line(tmp_path, **three, subgoal1="g.png", camera1=None),
    ]
    path = write_lines(tmp_path / "a.jsonl", *records)
    samples = list(DemonstrationsDataset([path], THREE, ["subgoal"]))
    assert [bool(s["subgoal_is_pad"]) for s in samples] == [False, True, False, True]
    assert [bool(s["subgoal1_is_pad"]) for s in samples] == [True, True, False, True]
    batch = {name: np.stack([s[name] for s in samples]) for name in samples[0] if "goal" in name}
    found = prepare_subgoals(batch, CAMERAS, (8, 8), 1)
    assert [mask.tolist() for mask in found.masks] == [
        [True, False, True, False], [False, False, True, False], [True, False, True, False],
    ]  # fmt: skip


def test_a_masked_camera_is_black_whatever_its_frames(tmp_path):
    frames = np.full((2, 1, 3, 8, 8), 0.5, np.float32)
    batch = {"camera0": frames, "camera1": frames, "camera1_is_pad": np.array([True, False])}
    found = prepare_videos(batch, ("camera0", "camera1"), (8, 8), 1)
    assert [mask.tolist() for mask in found.masks] == [[True, True], [False, True]]
    assert not found.images[1][0].any()
    np.testing.assert_array_equal(found.images[1][1], frames[1])
    assert (frames == 0.5).all()
    wrong = batch | {"camera1_is_pad": np.array([True])}
    with pytest.raises(ValueError, match=r"camera1_is_pad has shape \[1\], .* has 2 samples"):
        prepare_videos(wrong, ("camera0", "camera1"), (8, 8), 1)


def test_written_samples_lack_the_same(tmp_path):
    save_image(tmp_path / "g.png", 51)
    record = line(tmp_path, subgoal0="g.png", camera1=None)
    path = write_lines(tmp_path / "a.jsonl", record, line(tmp_path))
    shapes = replace(SHAPES, empty_cameras=1)
    dataset = DemonstrationsDataset([path], shapes, ["subgoal"])
    (written,) = write_demonstrations(dataset, tmp_path / "again")
    again = DemonstrationsDataset([written], shapes, ["subgoal"])
    for ours, theirs in zip(again, dataset, strict=True):
        assert same(ours, theirs)
