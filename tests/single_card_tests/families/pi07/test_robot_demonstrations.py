"""LeRobot datasets as demonstrations, and mixtures of them.

Guarantees: a frame becomes the sample that the same moment of a JSONL file becomes; OpenTau's
optional columns and episode entries, and LeRobot's language columns, fill the optional fields;
past frames and chunks are resampled to a common rate; what does not fit is refused with dataset,
feature and remedy; bad episodes are skipped and counted where asked; statistics are pooled by
group; datasets are drawn by weight, each sample by seed, epoch and number; parts for evaluation
share no episode with training, and are the same everywhere.
"""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lerobot.statistics import recomputed_statistics, write_statistics
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.robot_mixture import RobotDemonstrations
from paddle_vl.families.policy.demonstrations.sample import (
    NO_DROPS,
    DemonstrationShapes,
    DrawnDemonstrations,
)
from paddle_vl.families.policy.robot_settings import DatasetMixtureConfig, RobotDatasetConfig
from tests.single_card_tests.families.pi07.demonstration_builders import same, write_lines
from tests.support.robot_files import CAMERA, level, write_lerobot

LENGTHS = (14, 3, 9)
SHAPES = DemonstrationShapes(("camera0",), (8, 8), 2, 3, 4, 2, history_interval=2)
LANGUAGE = Path(__file__).parents[3] / "data" / "lerobot" / "v30_l06_language"


def source(root, shapes=SHAPES, fields=(), mixture=None, on_bad_sample="fail", **config):
    settings = {"datasets": [RobotDatasetConfig(root=str(root), **config)], **(mixture or {})}
    config = DatasetMixtureConfig(**settings)
    return RobotDemonstrations(config, shapes, fields, None, on_bad_sample, seed=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("robot"), LENGTHS, robot_type="arm")


@pytest.mark.parametrize("number", [0, 1, 7, 12, 13, 15, 20])
def test_a_frame_is_the_sample_of_the_same_line(root, number, tmp_path):
    """Images of one grey level stay it in a letterbox, but video is lossy."""
    from PIL import Image

    robots = source(root)
    episode, row = robots.datasets[0].data.locate(number)
    past, ahead = range(number - row, number + 1), range(number, number - row + episode.length)
    for index in past:
        pixels = robots.datasets[0].data[index][CAMERA]
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    line = {
        "prompt": ("push", "pull")[episode.number % 2],
        "state": [[index, episode.number] for index in past],
        "camera0": [f"{index}.png" for index in past],
        "actions": [[index + 0.5, -index] for index in ahead],
    }
    lines = DemonstrationsDataset([write_lines(tmp_path / "a.jsonl", line)], SHAPES)
    assert same(robots[number], lines[0])
    assert all(
        np.array_equal(a, b) for a, b in zip(robots.motion(number), lines.motion(0), strict=True)
    )


def test_optional_columns_and_entries_become_fields(tmp_path):
    """The first episode has three segments; the second failed."""
    total = sum(LENGTHS)
    columns = {
        "response": [f"r{i}" for i in range(total)],
        "memory": [f"m{i}" for i in range(total)],
    }
    entries = {"quality": [4, 2, 5], "success": [True, False, True]}
    entries["segments"] = [[0, 5, 9], [0], [0, 4]]
    root = write_lerobot(
        tmp_path, LENGTHS, "v2.1", columns=columns, of_episodes=entries, robot_type="arm",
        control_mode="joint",
    )  # fmt: skip
    robots = source(root, fields=None, mixture={"emit_fps": True, "action_freq": 20.0})
    assert all(robots.fields.values())
    assert robots.group_names == ("arm::joint",)
    names = ("response", "past_memory", "next_memory", "quality", "mistake", "fps", "speed")
    found = [tuple(robots[n][name] for name in names) for n in (3, 4, 13, 15)]
    assert found == [
        ("r3", "m3", "m0", 4, False, 20, 50),
        # The next frame begins a segment.
        ("r4", "m4", "m5", 4, False, 20, 50),
        ("r13", "m13", "m9", 4, False, 20, 50),
        ("r15", "m15", "m14", 2, True, 20, 50),
    ]
    assert not robots[3]["quality_is_pad"]
    goals = {round(float(robots.in_epoch(e)[3]["subgoal0"].max() * 255)) for e in range(40)}
    # From the current frame to the end of its segment.
    assert all(min(abs(goal - level(i)) for i in (3, 4)) <= 3 for goal in goals)
    assert len(goals) >= 2
    assert same(robots.in_epoch(5)[3], robots.in_epoch(5)[3])
    file = root / "meta" / "episodes.jsonl"
    file.write_text(file.read_text().replace('"quality": 4, ', ""))
    robots = source(root, fields=None)
    assert [bool(robots[n]["quality_is_pad"]) for n in (3, 15)] == [True, False]


def test_language_columns_become_response_and_memory():
    mapping = {"camera0": "observation.images.front"}
    shapes = DemonstrationShapes(("camera0",), (8, 8), 4, chunk_size=4, action_dim=4)
    robots = source(LANGUAGE, shapes, None, data_features_name_mapping=mapping)
    found = [[robots[n][k] for k in ("response", "past_memory", "next_memory")] for n in (0, 4, 5)]
    second = "stop on the mark \u2014 gr\u00f6\u00dfer"
    assert found == [
        ["move to the mark", "", ""],
        ["move to the mark", "", "moved"],
        [second, "moved", "moved"],
    ]
    # An episode without annotation.
    assert robots[40]["response"] == ""


def test_the_speed_of_an_episode_is_its_place_among_those_of_its_task(tmp_path):
    root = write_lerobot(tmp_path, [n for n in range(3, 25) for _ in (0, 1)][:44])
    robots = source(root, fields=["speed"])
    starts = np.cumsum([0, *(e.length for e in robots.datasets[0].data.episodes)])
    speeds = [int(robots[int(start)]["speed"]) for start in starts[:-1]]
    assert (speeds[0], speeds[-1]) == (0, 100)
    assert speeds == sorted(speeds)
    file = root / "meta" / "speed_percentiles.jsonl"
    file.write_text('{"task_index": 0, "percentiles": null}\n')
    assert source(root, fields=["speed"])[0]["speed"] == 50


@pytest.mark.parametrize(
    ("strategy", "states", "actions"),
    [("linear", [4.5, 5.75, 7], [7, 7.625, 8.25, 8.875]), ("nearest", [4, 6, 7], [7, 8, 8, 9])],
)
def test_steps_are_resampled_to_the_rate_of_the_mixture(root, strategy, states, actions):
    """From 10 to 16 Hz: a step is 0.625 frames."""
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2, 3, 4, 2, history_interval=2)
    mixture = {"action_freq": 16.0, "vector_resample_strategy": strategy}
    mixture["image_resample_strategy"] = strategy
    sample = source(root, shapes, mixture=mixture)[7]
    np.testing.assert_array_equal(sample["state"][:, 0], states)
    np.testing.assert_array_equal(sample["actions"][:, 0] - 0.5, actions)
    levels = [np.interp(index, range(26), [level(i) for i in range(26)]) for index in states]
    assert abs(sample["camera0"].max(axis=(1, 2, 3)) * 255 - levels).max() <= 4
    # Declared as 10 Hz, and truly 16: a step is a frame.
    true = source(root, shapes, ["fps"], {**mixture, "emit_fps": True}, fps=16.0)[7]
    np.testing.assert_array_equal(true["state"][:, 0], [3, 5, 7])
    assert true["fps"] == 16
    late = source(root, shapes, mixture=mixture)[13]
    assert late["action_is_pad"].tolist() == [False, False, True, True]


def test_an_observation_longer_than_every_episode_is_refused(root):
    """14 frames at 10 Hz are 7 steps at 5."""
    shapes = DemonstrationShapes(("camera0",), (8, 8), 2, 4, 4, 2, history_interval=2)
    slow = {"action_freq": 5.0}
    source(root, shapes, mixture=slow).check_history()
    shapes = replace(shapes, n_obs_steps=5)
    source(root, shapes).check_history()
    with pytest.raises(ValueError, match=r"needs episodes with 9 .* at most 7 in .* at most 4$"):
        source(root, shapes, mixture=slow).check_history()


def test_dims_are_chosen_and_differences_taken(root):
    config = {"state_index": [1], "action_index": [1, 0], "use_delta_joint_actions": True}
    config["delta_action_state_map"] = {0: 0}
    shapes = DemonstrationShapes(("camera0",), (8, 8), 1, 1, 4, 2)
    robots = source(root, shapes, mixture={"delta_stats_max_rows": 5}, **config)
    sample = robots[15]
    np.testing.assert_array_equal(sample["state"], [[1]])
    np.testing.assert_array_equal(sample["actions"][:2], [[-15, 0.5], [-16, 1.5]])
    stats = robots.statistics(False)[str(root)]
    assert stats["state"]["max"].tolist() == [2]
    assert (stats["actions"]["min"][1], stats["actions"]["max"][1]) == (0.5, 3.5)
    assert stats["actions"]["count"].tolist() == [15]


BAD = {
    "no such column": ({"data_features_name_mapping": {"state": "observation.stat"}},
                       "maps 'state' to 'observation.stat', .* did you mean observation.state"),
    "no standard name": ({"data_features_name_mapping": {"stat": "action"}},
                         "'stat', which is no standard name; did you mean state"),
    "no colours": ({"data_features_name_mapping": {"camera0": "action"}}, "holds no colour images"),
    "too few dims": ({"action_index": [1]}, "'action' of .* has 1 dims, the policy's actions 2"),
    "no such dim": ({"state_index": [0, 2]}, r"'observation.state' .* dims \[0, 2\] are wanted"),
    "no such delta": (
        {"use_delta_joint_actions": True, "delta_action_state_map": {0: 2}},
        r"'observation.state' .* dims \[2\] are wanted",
    ),
    "no such folder": ({"root": "org/name"}, r"org/name/meta/info\.json cannot be read"),
    "no camera": ({"data_features_name_mapping": {"camera1": CAMERA}},
                  "no column for camera0 .*empty_cameras, which is 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_what_does_not_fit_is_named(root, fault):
    config, message = BAD[fault]
    with pytest.raises((RuntimeError, ValueError), match=message):
        source(**{"root": root, **config})


def test_robot_and_mode_can_be_demanded_and_stated(root):
    with pytest.raises(ValueError, match="has control_mode 'unknown': set control_mode"):
        source(root, mixture={"require_non_empty_control_mode": True})
    demands = {"require_non_empty_control_mode": True, "require_non_empty_robot_type": True}
    assert source(root, mixture=demands, control_mode="joint").group_names == ("arm::joint",)


def test_episodes_that_cannot_be_read_are_refused_or_skipped(tmp_path):
    actions = np.stack([np.arange(26) + 0.5, -np.arange(26.0)], axis=1).astype(np.float32)
    actions[20, 1] = np.nan
    column = pa.FixedSizeListArray.from_arrays(actions.ravel(), 2)
    root = write_lerobot(tmp_path, LENGTHS, episodes_per_file=1, columns={"action": column})
    with pytest.raises(
        BadSampleError, match="episode 2, frame 1: 'action' of frame 3, dim 1 is nan"
    ):
        source(root)[18]
    assert source(root)[21]["actions"][0, 0] == 21.5
    (root / "data/chunk-000/file-001.parquet").unlink()
    with pytest.raises(BadSampleError, match="episode 1: there is no file data/.*file-001.parquet"):
        source(root)
    robots = source(root, on_bad_sample="skip")
    assert (len(robots), robots.skipped) == (23, {"missing_file": 3})
    assert robots[18]["state"][-1, 0] == 21
    loader = PrefetchLoader(robots, list, 4, shuffle=False, drop_last=False, num_epochs=1)
    # Four chunks have the action that is no number.
    assert sum(map(len, loader)) == 19
    assert loader.skipped == {"missing_file": 3, "not_finite": 4}
    assert source(root, excluded_episodes=[1]).skipped == {}
    for file in root.glob("data/*/*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no frame is left to draw: of .* \[0\] frames"):
        source(root, on_bad_sample="skip").parts()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("two")
    return [
        write_lerobot(folder / "a", (9, 7, 8), robot_type="arm", control_mode="joint"),
        write_lerobot(folder / "b", (4, 6), fps=20, robot_type="arm", control_mode="joint"),
    ]


def mixture(two, names=None, **settings):
    datasets = [RobotDatasetConfig(root=str(folder)) for folder in two]
    config = DatasetMixtureConfig(datasets=datasets, **settings)
    robots = RobotDemonstrations(config, SHAPES, [], names, seed=settings.get("seed", 3))
    return robots.parts()


def test_samples_are_drawn_by_weight_seed_and_number(two):
    training, held_out = mixture(two, weights=[1.0, 3.0], val_split_ratio=0.0)
    assert held_out is None
    assert len(training) == 34
    places = [training.in_epoch(e).place(n) for e in range(30) for n in range(34)]
    share = np.mean([str(two[1]) in place for place in places])
    assert 0.68 < share < 0.82
    assert len({*places}) == 34
    copy = pickle.loads(pickle.dumps(training))
    assert same(copy.in_epoch(2)[5], training.in_epoch(2)[5])
    assert training.in_epoch(1).place(5) != training.in_epoch(2).place(5)
    by_frames, _ = mixture(two, val_split_ratio=0.0)
    places = [by_frames.in_epoch(e).place(n) for e in range(12) for n in range(34)]
    assert 0.22 < np.mean([str(two[1]) in place for place in places]) < 0.37
    assert training.fingerprint != by_frames.fingerprint
    assert (
        training.fingerprint == mixture(two, weights=[1.0, 3.0], val_split_ratio=0.0)[0].fingerprint
    )


@pytest.mark.parametrize(("by", "shared"), [("episode", False), ("frame", True)])
def test_a_part_is_kept_for_evaluation(two, by, shared):
    training, held_out = mixture(two, val_split_ratio=0.4, val_split_by=by)
    again = mixture(two, val_split_ratio=0.4, val_split_by=by)
    frames = [held_out.place(n) for n in range(len(held_out))]
    assert frames == [again[1].place(n) for n in range(len(again[1]))]
    assert len({*frames}) == len(frames)
    trained = {training.in_epoch(e).place(n) for e in range(30) for n in range(len(training))}
    assert not trained & {*frames}
    assert len(trained) + len(frames) == 34

    def episodes(places):
        return {place.partition(", frame")[0] for place in places}

    assert bool(episodes(trained) & episodes(frames)) == shared
    assert episodes(frames) & {f"{two[1]}: episode {n}" for n in (0, 1)}


def test_statistics_are_pooled_by_group(two, tmp_path, caplog):
    training, _ = mixture(two)
    assert training.group_names == ("arm::joint",)
    stats = training.statistics(True)["arm::joint"]
    states = np.concatenate([np.arange(24), np.arange(10)])
    np.testing.assert_allclose(stats["state"]["mean"][0], states.mean())
    np.testing.assert_allclose(stats["state"]["std"][0], states.std())
    assert (stats["actions"]["max"][0], stats["state"]["count"].item()) == (23.5, 34)
    assert f"compute them with paddle-vl compute-stats {two[0]}" in caplog.text
    with pytest.raises(
        ValueError, match=r"groups \['arm::joint'\].*dataset_names are \['x', 'y'\]"
    ):
        mixture(two, ["x", "y"])
    other = RobotDatasetConfig(root=str(two[1]), control_mode="ee")
    config = DatasetMixtureConfig(datasets=[RobotDatasetConfig(root=str(two[0])), other])
    robots = RobotDemonstrations(config, SHAPES, [])
    assert robots.group_names == ("arm::joint", "arm::ee")
    assert robots[30]["dataset_index"] == 1
    found = robots.statistics(False)
    assert (found["arm::joint"]["state"]["max"][0], found["arm::ee"]["state"]["max"][0]) == (23, 9)
    # Recomputed ones have quantiles.
    exact = recomputed_statistics(robots.datasets[0].data, with_images=False)
    write_statistics(exact, tmp_path / "s.json")
    named = source(two[0], stats=str(tmp_path / "s.json")).statistics(False)["arm::joint"]
    assert named["state"]["q50"][0] == 11.5


def test_prompts_are_replaced_in_training(two):
    texts = {"push": ["shove it", "push it"]}
    config = DatasetMixtureConfig(
        datasets=[RobotDatasetConfig(root=str(two[0]), prompt_substitutions=texts)],
        val_split_ratio=0.4,
    )
    training, held_out = RobotDemonstrations(config, SHAPES, [], seed=1).parts()
    found = {training.in_epoch(e)[n]["prompt"] for e in range(4) for n in range(8)}
    assert found == {"shove it", "push it", "pull"}
    assert {held_out[n]["prompt"] for n in range(len(held_out))} <= {"push", "pull"}


def test_drawn_demonstrations_have_the_epoch_of_their_source(two):
    training, _ = mixture(two, val_split_ratio=0.0)
    drawn = DrawnDemonstrations(training, NO_DROPS)
    assert drawn.in_epoch(3).place(4) == training.in_epoch(3).place(4)
    assert same(drawn.in_epoch(3)[4], training.in_epoch(3)[4])
    assert drawn.in_epoch(3).fingerprint == drawn.fingerprint
