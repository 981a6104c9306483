"""Normalization compared with PyTorch.

Guarantees: all modes in both conventions equal the golden case, with per-sample rows of groups; the
inverse restores the data; a constant feature neither explodes nor shifts; statistics need no count;
values that do not fit are refused by name.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.normalize import Normalizer
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
