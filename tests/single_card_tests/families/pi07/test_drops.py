"""Drops of optional fields in training, and the flow's draws.

Guarantees: each drop equals OpenTau's; each has its probability and is independent of the others;
the response is dropped only where goals remain; fps, memory and group are never dropped;
probabilities outside [0, 1] are refused; times, delays and noise have their distributions.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.demonstrations.sample import (
    DROPPED_METADATA,
    NO_DROPS,
    DropProbabilities,
    Drops,
    FlowDraws,
    Stream,
    draw_drops,
    drop_fields,
    sample_rng,
)
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, same

NOTHING = Drops(False, False, False, frozenset())
WHOLE = SyntheticDemonstrations(12, SHAPES)[7]


def changed(drops: Drops, sample: dict = WHOLE) -> set[str]:
    """Names of the entries that changed."""
    after = drop_fields(sample, drops, SHAPES)
    assert after.keys() == sample.keys()
    assert all(np.shape(after[name]) == np.shape(sample[name]) for name in sample)
    return {name for name in sample if not np.array_equal(after[name], sample[name])}


def test_history_leaves_the_current_frame_and_the_state():
    drops = NOTHING._replace(history=True)
    assert changed(drops) == {"camera0", "camera1", "obs_history_is_pad"}
    after = drop_fields(WHOLE, drops, SHAPES)
    assert after["obs_history_is_pad"].all()
    for camera in SHAPES.cameras:
        assert not after[camera][:-1].any()
        np.testing.assert_array_equal(after[camera][-1], WHOLE[camera][-1])


def test_goals_go_for_all_cameras_and_keep_the_response():
    drops = NOTHING._replace(subgoal=True, response=True)
    assert changed(drops) == {"subgoal0", "subgoal1", "subgoal_is_pad"}
    after = drop_fields(WHOLE, drops, SHAPES)
    assert after["subgoal_is_pad"]
    assert not after["subgoal0"].any()


def test_the_response_goes_only_where_goals_are():
    drops = NOTHING._replace(response=True)
    assert changed(drops) == {"response"}
    assert drop_fields(WHOLE, drops, SHAPES)["response"] == ""
    absent = drop_fields(WHOLE, NOTHING._replace(subgoal=True), SHAPES)
    assert changed(drops, absent) == set()
    no_goals = {name: value for name, value in WHOLE.items() if "subgoal" not in name}
    assert changed(drops, no_goals) == set()


@pytest.mark.parametrize("name", DROPPED_METADATA)
def test_metadata_becomes_absent(name):
    sample = dict(WHOLE) | {"speed": np.int64(30), "mistake": np.bool_(True)}
    after = drop_fields(sample, NOTHING._replace(metadata=frozenset([name])), SHAPES)
    if isinstance(sample[name], str):
        assert changed(NOTHING._replace(metadata=frozenset([name])), sample) == {name}
        assert after[name] == ""
    else:
        flag = f"{name}_is_pad"
        assert changed(NOTHING._replace(metadata=frozenset([name])), sample) == {name, flag}
        assert (after[name], after[flag]) == (0, True)
        assert after[name].dtype == sample[name].dtype


def drawn(probabilities: DropProbabilities, count: int = 4000) -> list[Drops]:
    return [draw_drops(probabilities, sample_rng(1, Stream.DROPS, 0, n)) for n in range(count)]


def test_defaults_are_the_originals_and_frequencies_follow():
    found = drawn(DropProbabilities())
    near = {"abs": 0.03}
    assert np.mean([d.subgoal for d in found]) == pytest.approx(0.75, **near)
    assert np.mean([d.history for d in found]) == pytest.approx(0.3, **near)
    assert np.mean([d.response for d in found]) == pytest.approx(0.3, **near)
    alls = np.mean([len(d.metadata) == len(DROPPED_METADATA) for d in found])
    assert alls == pytest.approx(0.15, **near)
    for name in DROPPED_METADATA:
        share = np.mean([name in d.metadata for d in found])
        assert share == pytest.approx(0.15 + 0.85 * 0.05, **near)
    assert "fps" not in DROPPED_METADATA


def test_fields_of_the_metadata_are_dropped_independently():
    found = drawn(NO_DROPS.model_copy(update={"metadata_drop_each_prob": 0.5}))
    pairs = np.mean([{"speed", "quality"} <= d.metadata for d in found])
    assert pairs == pytest.approx(0.25, abs=0.03)


def test_a_probability_that_is_changed_leaves_other_decisions_alone():
    one, other = DropProbabilities(), DropProbabilities(metadata_drop_all_prob=1.0)
    for before, after in zip(drawn(one, 50), drawn(other, 50), strict=True):
        assert before[:3] == after[:3]
        assert after.metadata == set(DROPPED_METADATA)


def test_no_drops_is_the_sample_as_it_was():
    assert all(drops == NOTHING for drops in drawn(NO_DROPS, 50))
    assert same(drop_fields(WHOLE, NOTHING, SHAPES), WHOLE)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_impossible_probabilities_are_refused(value):
    with pytest.raises(ValueError, match=f"(?s)response_drop_prob.*input_value={value}"):
        DropProbabilities(response_drop_prob=value)


def test_flow_draws_have_their_distributions():
    draws = FlowDraws(chunk_size=4, max_action_dim=6, max_delay=3)
    found = [draws.draw(sample_rng(2, Stream.FLOW, 0, number)) for number in range(4000)]
    times = np.sort([one["time"] for one in found])
    # The distribution function of Beta(1.5, 1) is x ** 1.5.
    ranks = (np.arange(4000) + 0.5) / 4000
    assert np.abs(((times - 0.001) / 0.999) ** 1.5 - ranks).max() < 0.03
    delays = np.bincount([one["delay"] for one in found])
    assert len(delays) == 4
    np.testing.assert_allclose(delays / 4000, 0.25, atol=0.03)
    noise = np.stack([one["noise"] for one in found])
    assert noise.shape == (4000, 4, 6)
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.08)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.08)
    assert [found[0][name].dtype.name for name in ("noise", "time", "delay")] == [
        "float32", "float32", "int64",
    ]  # fmt: skip


def test_times_reach_both_ends_only_so_far():
    class Fixed:
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

        def integers(self, low, high, endpoint):
            return low

        def standard_normal(self, shape, dtype):
            return np.zeros(shape, dtype)

    draws = FlowDraws(1, 1)
    assert draws.draw(Fixed(0.0))["time"] == np.float32(0.001)
    assert draws.draw(Fixed(1.0))["time"] == np.float32(1)
    expected = 0.25 ** (2 / 3) * 0.999 + 0.001
    assert draws.draw(Fixed(0.25))["time"] == pytest.approx(expected, rel=1e-6)
