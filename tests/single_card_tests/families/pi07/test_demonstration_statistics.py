"""Statistics of states and actions.

Guarantees: they cover all real frames and steps of each group, without padding; no image is read; a
file returns the written values in the requested order of groups; a group without data, or missing
in the file, is named.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.normalize import (
    demonstration_statistics,
    read_statistics,
    write_statistics,
)
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, line, write_lines


def test_statistics_are_those_of_all_real_values_by_group():
    source = SyntheticDemonstrations(60, SHAPES, group_names=("arm::joint", "arm::ee"))
    found = demonstration_statistics(source)
    assert list(found) == ["arm::joint", "arm::ee"]
    for row, group in enumerate(found.values()):
        samples = [sample for sample in map(source.demonstration, range(60))]
        samples = [sample for sample in samples if sample["dataset_index"] == row]
        for feature, flag in (("state", "obs_history_is_pad"), ("actions", "action_is_pad")):
            values = np.concatenate([s[feature][~s[flag]] for s in samples]).astype(np.float64)
            stats = group[feature]
            assert stats["count"] == len(values)
            for name, expected in (
                ("mean", values.mean(0)),
                ("std", np.sqrt(((values - values.mean(0)) ** 2).mean(0))),
                ("min", values.min(0)),
                ("max", values.max(0)),
                ("q01", np.percentile(values, 1, axis=0)),
                ("q99", np.percentile(values, 99, axis=0)),
            ):
                np.testing.assert_allclose(stats[name], expected, rtol=1e-12)
                assert stats[name].dtype == np.float64


def test_means_of_large_values_are_exact(tmp_path):
    # A float32 sum of a thousand such values loses the last digits.
    record = line(tmp_path, 1)
    records = [record | {"state": [1e6 + n % 2, 0.1]} for n in range(1000)]
    path = write_lines(tmp_path / "a.jsonl", *records)
    stats = demonstration_statistics(DemonstrationsDataset([path], SHAPES))["all"]["state"]
    assert stats["mean"][0] == 1e6 + 0.5
    assert stats["std"][0] == 0.5


def test_images_are_not_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", line(tmp_path))
    for image in tmp_path.glob("*.png"):
        image.write_bytes(b"no image")
    found = demonstration_statistics(DemonstrationsDataset([path], SHAPES))
    np.testing.assert_array_equal(found["all"]["state"]["max"], [3, 0])
    assert found["all"]["actions"]["count"] == 4


def test_a_file_gives_back_what_was_written(tmp_path):
    source = SyntheticDemonstrations(30, SHAPES, group_names=("arm::joint", "arm::ee"))
    written = demonstration_statistics(source)
    write_statistics(tmp_path / "s.json", written)
    read = read_statistics(tmp_path / "s.json", ["arm::ee", "arm::joint"])
    assert list(read) == ["arm::ee", "arm::joint"]
    assert list(read_statistics(tmp_path / "s.json")) == ["arm::joint", "arm::ee"]
    for group, features in written.items():
        for feature, stats in features.items():
            assert stats.keys() == read[group][feature].keys()
            for name, value in stats.items():
                np.testing.assert_array_equal(read[group][feature][name], value)
                assert read[group][feature][name].dtype == value.dtype


def test_what_is_missing_is_named(tmp_path):
    source = SyntheticDemonstrations(5, SHAPES, group_names=("arm::joint", "arm::ee"))
    with pytest.raises(ValueError, match=r"groups \['arm::ee'\] have no samples"):
        demonstration_statistics(source)
    write_statistics(
        tmp_path / "s.json", demonstration_statistics(SyntheticDemonstrations(5, SHAPES))
    )
    with pytest.raises(ValueError, match=r"of \['arm::joint'\], but not of \['arm::ee'\]"):
        read_statistics(tmp_path / "s.json", ["arm::ee"])
    with pytest.raises(RuntimeError, match="nowhere.json cannot be read"):
        read_statistics(tmp_path / "nowhere.json")
    (tmp_path / "t.json").write_text("[1]")
    with pytest.raises(RuntimeError, match="group -> feature -> statistic"):
        read_statistics(tmp_path / "t.json")
    (tmp_path / "u.json").write_text("{}")
    with pytest.raises(ValueError, match="u.json has statistics of no group"):
        read_statistics(tmp_path / "u.json")
