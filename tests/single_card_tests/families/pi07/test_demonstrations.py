"""Demonstrations in JSONL files.

Guarantees: a line becomes the documented sample, padded and marked at both ends of an episode, with
exactly the configured fields; past frames are the original's, `history_interval` steps apart, equal
to what the policy sees when it acts; data that never fill an observation are refused with both
numbers; a line may lack up to `empty_cameras` cameras, which become black and masked; every error
names file and line, the value and what is needed, and can be skipped; images are fitted into the
image size; each group's files become its rows; samples survive writing, reading and pickling.
"""

import logging
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

import make_demonstrations
from make_demonstrations import write_demonstrations
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.policy.acting import ObservationHistory
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import OPTIONAL_FIELDS, DemonstrationShapes
from paddle_vl.families.policy.demonstrations.synthetic import (
    EPISODE_LENGTH,
    SyntheticDemonstrations,
)
from paddle_vl.families.policy.images import prepare_subgoals, prepare_videos
from tests.single_card_tests.families.pi07.demonstration_builders import (
    SHAPES,
    line,
    same,
    save_image,
    write_lines,
)


def test_a_line_becomes_a_sample(tmp_path):
    save_image(tmp_path / "g.png", 51)
    record = line(tmp_path, subgoal0="g.png", subgoal1="g.png", speed=30, mistake=False, quality=2)
    record |= {"response": "lift", "robot_type": "arm", "past_memory": "saw it", "fps": 10}
    path = write_lines(tmp_path / "a.jsonl", record)
    sample = DemonstrationsDataset([path], SHAPES, OPTIONAL_FIELDS)[0]
    np.testing.assert_array_equal(sample["state"], [[1, 0], [2, -1], [3, -2]])
    levels = np.array([10, 20, 30], np.float32) / np.float32(255)
    for camera in SHAPES.cameras:
        frames = np.broadcast_to(levels[:, None, None, None], (3, 3, 8, 8))
        np.testing.assert_array_equal(sample[camera], frames)
    np.testing.assert_array_equal(sample["actions"][:, 1], [0.5, 1.5, 2.5, 3.5])
    assert not sample["obs_history_is_pad"].any()
    assert not sample["action_is_pad"].any()
    np.testing.assert_array_equal(sample["subgoal1"], np.full((3, 8, 8), 0.2, np.float32))
    assert not sample["subgoal_is_pad"]
    assert [sample[name] for name in ("prompt", "response", "robot_type")] == ["go", "lift", "arm"]
    assert (sample["past_memory"], sample["next_memory"], sample["control_mode"]) == (
        "saw it", "", "",
    )  # fmt: skip
    numbers = ("speed", "quality", "mistake", "fps")
    assert [sample[name].item() for name in numbers] == [30, 2, False, 10]
    assert not any(sample[f"{name}_is_pad"] for name in numbers)
    assert {sample[name].dtype for name in ("state", "actions", *SHAPES.cameras)} == {
        np.dtype("float32")
    }
    assert [sample[name].dtype.name for name in numbers] == ["int64", "int64", "bool", "int64"]
    assert sample["dataset_index"] == 0
    assert sample["dataset_index"].dtype == np.int64


def test_what_an_episode_lacks_at_its_ends_is_filled_up_and_marked(tmp_path):
    record = line(tmp_path, 1, state=[5, 6], camera0="f0.png", actions=[[1, 2, 3], [4, 5, 6]])
    sample = DemonstrationsDataset([write_lines(tmp_path / "a.jsonl", record)], SHAPES)[0]
    assert sample["obs_history_is_pad"].tolist() == [True, True, False]
    np.testing.assert_array_equal(sample["state"], [[0, 0], [0, 0], [5, 6]])
    assert sample["camera0"].shape == (3, 3, 8, 8)
    assert not sample["camera0"][:2].any()
    assert (sample["camera0"][2] == np.float32(10) / np.float32(255)).all()
    np.testing.assert_array_equal(sample["actions"][1:], [[4, 5, 6]] * 3)
    shorter = replace(SHAPES, chunk_size=1)
    sample_of_one = DemonstrationsDataset([tmp_path / "a.jsonl"], shorter)[0]
    np.testing.assert_array_equal(sample_of_one["actions"], [[1, 2, 3]])
    assert sample["action_is_pad"].tolist() == [False, False, True, True]


def test_fields_are_those_of_the_configuration_whatever_a_line_has(tmp_path):
    save_image(tmp_path / "g.png")
    full = line(tmp_path, subgoal0="g.png", subgoal1="g.png", speed=0, response="lift", quality=1)
    bare = line(tmp_path, response=None, subgoal0="g.png")
    path = write_lines(tmp_path / "a.jsonl", full, bare)
    dataset = DemonstrationsDataset([path], SHAPES, ["subgoal", "speed", "response"])
    assert [name for name, there in dataset.fields.items() if there] == [
        "response", "speed", "subgoal",
    ]  # fmt: skip
    has, lacks = dataset[0], dataset[1]
    assert has.keys() == lacks.keys()
    assert "quality" not in has
    assert has["speed_is_pad"].tolist() is False
    assert lacks["speed_is_pad"].tolist() is True
    assert (has["response"], lacks["response"]) == ("lift", "")
    # One camera has no goal, so the sample has none.
    assert has["subgoal0"].all()
    assert not lacks["subgoal0"].any()
    assert (bool(has["subgoal_is_pad"]), bool(lacks["subgoal_is_pad"])) == (False, True)


def test_fields_that_any_line_has_are_found(tmp_path):
    one = write_lines(tmp_path / "1.jsonl", line(tmp_path, speed=0), line(tmp_path, fps=None))
    save_image(tmp_path / "g.png")
    two = write_lines(tmp_path / "2.jsonl", "no JSON", line(tmp_path, subgoal1="g.png"))
    for files, names in (([one], ["speed"]), ([one, two], ["speed", "subgoal"])):
        dataset = DemonstrationsDataset(files, SHAPES, None, on_bad_sample="skip")
        named = DemonstrationsDataset(files, SHAPES, names, on_bad_sample="skip")
        assert [name for name, there in dataset.fields.items() if there] == names
        assert dataset.fingerprint == named.fingerprint


def test_without_actions_none_are_needed(tmp_path):
    record = line(tmp_path, 1)
    del record["actions"]
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2)
    path = write_lines(tmp_path / "a.jsonl", record)
    assert "actions" not in DemonstrationsDataset([path], shapes)[0]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"state": None}, "missing_key", r"no 'state'; it has \['actions', 'camera0'"),
        ({"camera1": None}, "missing_key", "no 'camera1'"),
        ({"respons": "x"}, "unknown_key", "'respons', which nothing reads"),
        ({"state": [[1, 2, 3]]}, "bad_shape", r"'state' has shape \[1, 3\]; \[1 or more, 2\]"),
        ({"actions": []}, "bad_shape", r"'actions' has shape .*; \[1 or more, 3\]"),
        ({"actions": [[1, 2, 3], [1]]}, "bad_shape", "rows of several lengths"),
        ({"actions": [[1, 2, None]]}, "bad_type", r"'actions' is \[\[1, 2, None\]\]; numbers"),
        ({"state": ["1", "2"]}, "bad_type", "'state' is .*; numbers are needed"),
        ({"state": [1e39, 0]}, "not_finite", "beyond 3.4e"),
        ({"actions": [[1, 2, float("nan")]]}, "not_finite", "'actions' holds NaN"),
        ({"camera0": ["f0.png"]}, "bad_shape", "'camera0' has 1 images; 'state' has 3 frames"),
        ({"camera0": [1, 2, 3]}, "bad_type", "paths are needed"),
        ({"camera0": ["f0.png", "f1.png", "no.png"]}, "missing_image", "no.png does not exist"),
        ({"subgoal0": ["f0.png", "f1.png"]}, "bad_shape", "'subgoal0' has 2 images; 1 is"),
        ({"subgoal0": "no.png"}, "missing_image", "no.png does not exist"),
        ({"prompt": 3}, "bad_type", "'prompt' is 3; a text"),
        ({"speed": 1.5}, "bad_type", "'speed' is '1.5'; a whole number"),
        ({"mistake": 1}, "bad_type", "'mistake' is '1'; true or false"),
    ],
)
def test_faults_name_their_place(tmp_path, changes, kind, message):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path), line(tmp_path, **changes))
    with pytest.raises(BadSampleError, match=message) as raised:
        DemonstrationsDataset([path], SHAPES, ["subgoal"])
    assert (raised.value.kind, raised.value.place) == (kind, f"{path}:2")
    dataset = DemonstrationsDataset([path], SHAPES, ["subgoal"], on_bad_sample="skip")
    assert len(dataset) == 1
    assert dataset.skipped == {kind: 1}


def test_a_broken_line_or_image_names_its_place(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path), '{"state": ')
    with pytest.raises(BadSampleError, match=r"a\.jsonl:2: broken JSON"):
        DemonstrationsDataset([path], SHAPES)
    (tmp_path / "f1.png").write_bytes(b"no image")
    dataset = DemonstrationsDataset([path], SHAPES, on_bad_sample="skip")
    with pytest.raises(BadSampleError, match=r"a\.jsonl:1: 'camera0', .*f1\.png: .* be decoded"):
        dataset[0]


def test_images_are_read_only_when_needed(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path, subgoal0="g.png", subgoal1="g.png"))
    for name in ("f0.png", "f1.png", "g.png"):
        (tmp_path / name).write_bytes(b"no image")
    dataset = DemonstrationsDataset([path], SHAPES, ["subgoal"])
    sample = dataset.demonstration(0, with_history=False, with_subgoals=False)
    assert not sample["camera0"][:2].any()
    assert sample["camera0"][2].all()
    assert sample["subgoal_is_pad"]


def test_images_are_fitted_into_the_image_size(tmp_path):
    record = line(tmp_path, 1)
    record["camera1"] = [save_image(tmp_path / "wide.png", 255, (4, 16))]
    sample = DemonstrationsDataset([write_lines(tmp_path / "a.jsonl", record)], SHAPES)[0]
    # Scaled to half its size: two rows, at the bottom.
    assert sample["camera1"].shape == (3, 3, 8, 8)
    assert not sample["camera1"][-1, :, :6].any()
    assert sample["camera1"][-1, :, 6:].all()


def test_files_of_groups_have_their_rows(tmp_path):
    one = write_lines(tmp_path / "1.jsonl", line(tmp_path), line(tmp_path))
    two = write_lines(tmp_path / "2.jsonl", line(tmp_path))
    dataset = DemonstrationsDataset({"a::j": [one], "b::e": [two]}, SHAPES)
    assert dataset.group_names == ("a::j", "b::e")
    assert [sample["dataset_index"] for sample in dataset] == [0, 0, 1]
    named = DemonstrationsDataset({"a::j": [one]}, SHAPES, group_names=["b::e", "a::j"])
    assert named[0]["dataset_index"] == 1
    with pytest.raises(ValueError, match=r"files of the groups \['c'\], but the groups are"):
        DemonstrationsDataset({"c": [one]}, SHAPES, group_names=["b::e", "a::j"])
    with pytest.raises(ValueError, match="do not say theirs"):
        DemonstrationsDataset([one], SHAPES, group_names=["b::e", "a::j"])


def test_settings_that_cannot_be_are_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path))
    with pytest.raises(ValueError, match=r"fields \['respons'\] are not known"):
        DemonstrationsDataset([path], SHAPES, ["respons"])
    wrist = DemonstrationShapes(("wrist",), (8, 8), 2)
    with pytest.raises(ValueError, match=r"\['wrist'\] can have no goal images"):
        DemonstrationsDataset([path], wrist, ["subgoal"])
    images = line(tmp_path)["camera0"]
    path = write_lines(tmp_path / "w.jsonl", line(tmp_path, wrist=images))
    assert not any(DemonstrationsDataset([path], wrist, None).fields.values())


def test_a_pickled_dataset_is_the_same(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path), line(tmp_path, 2))
    dataset = DemonstrationsDataset({"a::j": [path]}, SHAPES, ["response"])
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    assert all(same(copy[number], dataset[number]) for number in range(2))


def test_what_was_written_is_read_as_it_was(tmp_path):
    source = SyntheticDemonstrations(30, SHAPES, group_names=("arm::joint", "arm::ee"))
    files = write_demonstrations(source, tmp_path)
    named = dict(zip(source.group_names, ([file] for file in files), strict=True))
    dataset = DemonstrationsDataset(named, SHAPES, OPTIONAL_FIELDS)
    assert len(dataset) == 30
    order = sorted(range(30), key=lambda number: source[number]["dataset_index"])
    for number, original in enumerate(order):
        assert same(dataset[number], source[original])


def test_the_example_can_be_made_and_read(tmp_path, monkeypatch):
    arguments = ["--num-samples", "3", "--image-size", "8", "8", "--n-obs-steps", "3"]
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path), *arguments])
    make_demonstrations.main()
    shapes = DemonstrationShapes(("camera0", "camera1"), (8, 8), 4, 3, 8, 4)
    dataset = DemonstrationsDataset([tmp_path / "arm-joint.jsonl"], shapes, OPTIONAL_FIELDS)
    assert len(dataset) == 3
    assert dataset[2]["robot_type"] == "arm"
    assert (tmp_path / "statistics.json").is_file()


STEPS = 9


def shapes_of(num_frames: int, interval: int) -> DemonstrationShapes:
    return replace(SHAPES, n_obs_steps=num_frames, history_interval=interval)


def originals_steps(current: int, num_frames: int, interval: int) -> list[int]:
    """OpenTau's delta timestamps, in steps; negative ones lie before the episode."""
    return [current - (num_frames - 1 - i) * interval for i in range(num_frames)]


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_every_step_of_an_episode_has_the_frames_that_acting_has(tmp_path, num_frames, interval):
    records = [line(tmp_path, step + 1) for step in range(STEPS)]
    path = write_lines(tmp_path / "a.jsonl", *records)
    dataset = DemonstrationsDataset([path], shapes_of(num_frames, interval))
    history = ObservationHistory(num_frames, interval)
    for step, sample in enumerate(dataset):
        image = np.full((1, 3, 8, 8), np.float32(10 * (step + 1)) / np.float32(255))
        state = np.array([[step + 1, -step]], np.float32)
        seen = history.extended({"state": state, "camera0": image}, ["state", "camera0"])
        np.testing.assert_array_equal(sample["state"], seen["state"][0])
        np.testing.assert_array_equal(sample["camera0"], seen["camera0"][0])
        np.testing.assert_array_equal(sample["obs_history_is_pad"], seen["obs_history_is_pad"][0])
        wanted = originals_steps(step, num_frames, interval)
        assert sample["obs_history_is_pad"].tolist() == [number < 0 for number in wanted]
        real = [number for number in wanted if number >= 0]
        found = sample["state"][~sample["obs_history_is_pad"], 0] - 1
        assert found.tolist() == real
        # Statistics count the frames that the policy reads.
        np.testing.assert_array_equal(dataset.motion(step)[0][:, 0] - 1, real)


def test_longer_lines_give_the_same_frames(tmp_path):
    """Steps before those that an observation reaches are not read."""
    whole = write_lines(tmp_path / "whole.jsonl", line(tmp_path, 9))
    kept = line(tmp_path, 9)
    for name in ("state", "camera0", "camera1"):
        kept[name] = kept[name][-5:]
    cut = write_lines(tmp_path / "cut.jsonl", kept)
    one, other = (DemonstrationsDataset([path], shapes_of(3, 2))[0] for path in (whole, cut))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
    assert one["state"][:, 0].tolist() == [5, 7, 9]
    for name in ("f4.png", "f6.png", "f8.png"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"f4\.png does not exist"):
        DemonstrationsDataset([whole], shapes_of(3, 2))


def test_made_up_demonstrations_have_the_same_distance():
    plain = SyntheticDemonstrations(EPISODE_LENGTH, shapes_of(EPISODE_LENGTH, 1))
    spaced = SyntheticDemonstrations(EPISODE_LENGTH, shapes_of(3, 4))
    for step in range(EPISODE_LENGTH):
        real = [number for number in originals_steps(step, 3, 4) if number >= 0]
        # The last frame of the plain one is the current step.
        rows = [number - step - 1 for number in real]
        np.testing.assert_array_equal(
            spaced.motion(step)[0], plain.motion(step)[0][rows], err_msg=str(step)
        )
    assert plain.fingerprint != spaced.fingerprint
    near = SyntheticDemonstrations(EPISODE_LENGTH, shapes_of(3, 1))
    assert near.fingerprint != spaced.fingerprint


def test_data_that_never_fill_an_observation_are_refused_with_both_numbers(tmp_path):
    short = write_lines(tmp_path / "short.jsonl", line(tmp_path, 2), line(tmp_path, 4))
    long = write_lines(tmp_path / "long.jsonl", line(tmp_path, 7))
    DemonstrationsDataset([short], shapes_of(4, 1)).check_history()
    DemonstrationsDataset([long], shapes_of(4, 2)).check_history()
    message = (
        r"n_obs_steps 4 with history_interval 2 needs lines with 7 consecutive steps, and there "
        r"are at most 4 in .*short\.jsonl: .*model\.policy\.n_obs_steps to at most 2"
    )
    with pytest.raises(ValueError, match=message):
        DemonstrationsDataset([short], shapes_of(4, 2)).check_history()
    DemonstrationsDataset([short], shapes_of(2, 2)).check_history()


def test_a_file_that_never_fills_an_observation_is_named_beside_others(tmp_path, caplog):
    short = write_lines(tmp_path / "short.jsonl", line(tmp_path, 4))
    long = write_lines(tmp_path / "long.jsonl", line(tmp_path, 7))
    with caplog.at_level(logging.WARNING):
        DemonstrationsDataset([short, long], shapes_of(4, 2)).check_history()
    assert "at most 4 in" in caplog.text
    assert "short.jsonl, whose past is always padded" in caplog.text
    assert "long.jsonl" not in caplog.text


def test_lines_that_are_skipped_fill_nothing(tmp_path):
    bad = line(tmp_path, 7, prompt=3)
    path = write_lines(tmp_path / "a.jsonl", bad, line(tmp_path, 4))
    dataset = DemonstrationsDataset([path], shapes_of(4, 2), on_bad_sample="skip")
    with pytest.raises(ValueError, match=r"at most 4 in"):
        dataset.check_history()


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
