"""Which past frames a demonstration's observation has.

Guarantees: the frames of a line are the original's, `history_interval` steps apart, equal to what
the policy sees when it acts, for every step of an episode; made-up demonstrations have the same;
data in which no line reaches back far enough for `n_obs_steps` is refused with both numbers, and a
file of others is named.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from paddle_vl.families.policy.acting import ObservationHistory
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.policy.demonstrations.synthetic import (
    EPISODE_LENGTH,
    SyntheticDemonstrations,
)
from tests.single_card_tests.families.pi07.demonstration_builders import (
    SHAPES,
    line,
    write_lines,
)

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
