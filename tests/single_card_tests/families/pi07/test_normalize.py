"""Normalization compared with PyTorch, and statistics of states and actions.

Guarantees: all modes in both conventions equal the golden case, with per-sample rows of groups, and
the inverse restores the data; a constant feature neither explodes nor shifts; statistics cover all
real frames and steps of each group, without padding or images; a file returns the written values in
the requested order of groups; what does not fit or is missing is named.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.normalize import (
    Normalizer,
    demonstration_statistics,
    read_statistics,
    write_statistics,
)
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, line, write_lines
from tests.support.pi07_golden import case, group_statistics

FEATURES = {"state": PolicyFeature("STATE", (5,)), "actions": PolicyFeature("ACTION", (7,))}
MODES = ("MEAN_STD", "MIN_MAX", "QUANTILE")


def normalizer(mode: str, version: int = 1, statistics=None, **features) -> Normalizer:
    made = Normalizer(features or FEATURES, {"STATE": mode, "ACTION": mode}, version, 2)
    made.set_statistics(group_statistics() if statistics is None else statistics)
    return made


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_golden_modes_and_versions(mode, version):
    tensors = case("16_normalize")[1]
    index = tensors["in.dataset_index"]
    made = normalizer(mode, version)
    there = made.normalize({name: tensors[f"in.{name}"] for name in FEATURES}, index)
    back = made.unnormalize(there, index)
    for name in FEATURES:
        for found, which in ((there, "norm"), (back, "unnorm")):
            expected = tensors[f"{mode}.v{version}.{which}.{name}"]
            assert found[name].dtype == np.float32
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize(("version", "expected"), [(0, -1.0), (1, 0.0)])
@pytest.mark.parametrize("mode", ["MIN_MAX", "QUANTILE"])
def test_zero_range_goes_where_the_version_says(mode, version, expected):
    names = {"MIN_MAX": ("min", "max"), "QUANTILE": ("q01", "q99")}[mode]
    statistics = [{"state": dict.fromkeys(names, np.array([2.0]))}] * 2
    made = normalizer(mode, version, statistics, state=PolicyFeature("STATE", (1,)))
    values = np.array([[2.0], [2.5]], np.float32)
    there = made.normalize({"state": values}, np.array([0, 1]))
    np.testing.assert_allclose(there["state"][0, 0], expected, atol=1e-6)
    np.testing.assert_allclose(there["state"][1, 0], expected + 1, atol=1e-5)
    np.testing.assert_allclose(
        made.unnormalize(there, np.array([0, 1]))["state"], values, atol=1e-6
    )


def test_identity_has_no_statistics_and_changes_nothing():
    made = Normalizer(FEATURES, {"STATE": "IDENTITY"}, 1)
    batch = {"state": np.ones((1, 5)), "actions": np.ones((1, 7)), "prompt": ["go"]}
    assert made.tensors == {}
    assert made.normalize(batch, np.array([0])) == batch


def test_images_are_normalised_by_channel():
    made = Normalizer({"camera0": PolicyFeature("VISUAL", (3, 8, 9))}, {"VISUAL": "MEAN_STD"}, 1)
    mean = np.array([1.0, 2, 3]).reshape(3, 1, 1)
    made.set_statistics([{"camera0": {"mean": mean, "std": np.ones((3, 1, 1)), "count": [4]}}])
    image = np.broadcast_to(mean, (2, 1, 3, 4, 4))
    found = made.normalize({"camera0": image}, np.zeros(2, int))["camera0"]
    assert found.shape == image.shape
    assert not found.any()


def test_checkpoint_names_have_no_dots_of_features():
    made = Normalizer({"observation.state": PolicyFeature("STATE", (2,))}, {"STATE": "MIN_MAX"}, 1)
    assert set(made.tensors) == {"buffer_observation_state.min", "buffer_observation_state.max"}


def test_absent_statistics_are_refused():
    made = Normalizer(FEATURES, {"STATE": "MEAN_STD"}, 1)
    with pytest.raises(ValueError, match="no statistics of 'state'.*load a checkpoint"):
        made.normalize({"state": np.zeros((1, 5))}, np.array([0]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda g: g[:1], "statistics of 1 groups were given, the policy has 2"),
        (lambda g: [g[0], {"state": g[1]["state"]}], "group 1 have no mean of 'actions'"),
        (
            lambda g: [g[0] | {"state": {"mean": g[0]["state"]["mean"]}}, g[1]],
            r"group 0 have no std of 'state' \('state' has \['mean'\]\)",
        ),
        (
            lambda g: [g[0] | {"state": g[0]["actions"]}, g[1]],
            r"mean of 'state' in the statistics of group 0 has shape \[7\].*needs \[5\]",
        ),
    ],
)
def test_statistics_that_do_not_fit_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        normalizer("MEAN_STD", statistics=change(group_statistics()))


def test_data_that_do_not_fit_are_named():
    made = normalizer("MEAN_STD")
    with pytest.raises(ValueError, match=r"'state' has shape \[2, 4\].*\[5\]"):
        made.normalize({"state": np.zeros((2, 4))}, np.zeros(2, int))
    with pytest.raises(ValueError, match="version 2"):
        Normalizer(FEATURES, {}, 2)


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
    (tmp_path / "u.json").write_text("{}")
    with pytest.raises(ValueError, match="u.json has statistics of .*not of any group"):
        read_statistics(tmp_path / "u.json")
