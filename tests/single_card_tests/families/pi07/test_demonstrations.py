"""Demonstrations in JSONL files.

Guarantees: a line becomes the documented sample, padded and marked at both ends of an episode;
every sample has exactly the configured fields; every error names file and line, the value and what
is needed, and can be skipped; images are fitted into the image size; each group's files become its
rows; samples of a source survive writing and reading; a pickled dataset is the same.
"""

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

import make_demonstrations
from make_demonstrations import write_demonstrations
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset, present_fields
from paddle_vl.families.policy.demonstrations.sample import OPTIONAL_FIELDS, DemonstrationShapes
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
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
    two = write_lines(tmp_path / "2.jsonl", "no JSON", line(tmp_path, subgoal1="g.png"))
    assert present_fields([one], SHAPES) == ["speed"]
    assert present_fields({"a": [one], "b": [two]}, SHAPES) == ["speed", "subgoal"]
    with pytest.raises(RuntimeError, match=r"no data file .*3\.jsonl"):
        present_fields([tmp_path / "3.jsonl"], SHAPES)


def test_without_actions_none_are_needed(tmp_path):
    record = line(tmp_path, 1)
    del record["actions"]
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2)
    path = write_lines(tmp_path / "a.jsonl", record)
    assert "actions" not in DemonstrationsDataset([path], shapes)[0]


def test_of_more_than_is_looked_at_the_newest_frames_and_the_first_actions_count(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path))
    whole = DemonstrationsDataset([path], SHAPES)[0]
    sample = DemonstrationsDataset([path], replace(SHAPES, n_obs_steps=2, chunk_size=3))[0]
    for name in ("state", *SHAPES.cameras):
        np.testing.assert_array_equal(sample[name], whole[name][1:])
    np.testing.assert_array_equal(sample["actions"], whole["actions"][:3])
    assert not sample["obs_history_is_pad"].any()
    assert not sample["action_is_pad"].any()


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
    with pytest.raises(ValueError, match="give both"):
        DemonstrationShapes(("camera0",), (8, 8), 2, chunk_size=3)


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


class AllLevels(SyntheticDemonstrations):
    """Images with all 256 levels."""

    def demonstration(self, number, **options):
        levels = np.arange(256, dtype=np.float32).reshape(16, 16) / np.float32(255)
        camera0 = np.broadcast_to(levels, (1, 3, 16, 16))
        return super().demonstration(number, **options) | {"camera0": camera0}


def test_images_of_eight_bits_are_written_exactly(tmp_path):
    shapes = DemonstrationShapes(("camera0",), (16, 16), 2)
    source = AllLevels(1, shapes, fields=())
    dataset = DemonstrationsDataset(write_demonstrations(source, tmp_path), shapes)
    np.testing.assert_array_equal(dataset[0]["camera0"], source.demonstration(0)["camera0"])


def test_the_example_can_be_made_and_read(tmp_path, monkeypatch):
    arguments = ["--num-samples", "3", "--image-size", "8", "8", "--n-obs-steps", "3"]
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path), *arguments])
    make_demonstrations.main()
    shapes = DemonstrationShapes(("camera0", "camera1"), (8, 8), 4, 3, 8, 4)
    dataset = DemonstrationsDataset([tmp_path / "arm-joint.jsonl"], shapes, OPTIONAL_FIELDS)
    assert len(dataset) == 3
    assert dataset[2]["robot_type"] == "arm"
    assert (tmp_path / "statistics.json").is_file()
