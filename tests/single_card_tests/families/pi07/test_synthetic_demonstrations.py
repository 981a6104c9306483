"""Synthetic demonstrations and their batches.

Guarantees: samples follow from seed and number; all optional fields vary; actions need both state
and colour, neither alone predicts them; both ends of an episode are padded; batches have the fields
of their samples; samples with different fields are refused by name; a policy takes the batches.
"""

import numpy as np
import pytest

from paddle_vl.families.policy.demonstrations.sample import (
    OPTIONAL_FIELDS,
    DemonstrationShapes,
    collate_demonstrations,
)
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.normalize import demonstration_statistics
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, same

SOURCE = SyntheticDemonstrations(240, SHAPES)


def test_samples_follow_from_seed_and_number():
    again = SyntheticDemonstrations(300, SHAPES)
    other = SyntheticDemonstrations(240, SHAPES, seed=1)
    assert same(SOURCE[100], again[100])
    assert not np.array_equal(SOURCE[100]["state"], other[100]["state"])
    fingerprints = {source.fingerprint for source in (SOURCE, again, other)}
    assert len(fingerprints) == 3


def test_fields_are_there_as_configured_and_vary():
    batch = collate_demonstrations([SOURCE[number] for number in range(0, 240, 5)])
    for name in ("response", "past_memory", "next_memory", "speed", "quality", "mistake"):
        assert len(np.unique(batch[name])) > 1
    bare = SyntheticDemonstrations(1, SHAPES, fields=("speed",))[0]
    kept = {name for name in OPTIONAL_FIELDS if name in bare}
    assert kept == {"speed"}
    assert "subgoal0" not in bare


def least_squares_error(inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Fraction of the outputs' variance that a linear fit to the inputs leaves unexplained."""
    inputs = np.column_stack([inputs, np.ones(len(inputs))])
    solution = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    return float(
        ((outputs - inputs @ solution) ** 2).sum() / outputs.var(axis=0).sum() / len(outputs)
    )


def test_actions_follow_from_state_and_colour_together():
    samples = [SOURCE[number] for number in range(240)]
    states = np.stack([sample["state"][-1] for sample in samples])
    colours = np.stack([sample["camera0"][-1].max(axis=(1, 2)) for sample in samples])
    actions = np.stack([sample["actions"][0] for sample in samples])
    assert least_squares_error(np.column_stack([states, colours]), actions) < 1e-4
    assert least_squares_error(states, actions) > 0.01
    assert least_squares_error(colours, actions) > 0.1


def test_ends_of_episodes_are_filled_up():
    first, last = SOURCE[12], SOURCE[23]
    assert first["obs_history_is_pad"].tolist() == [True, True, False]
    assert not first["state"][:2].any()
    assert not first["camera0"][:2].any()
    assert not first["action_is_pad"].any()
    assert last["action_is_pad"].any()
    assert not last["action_is_pad"][0]
    assert not last["obs_history_is_pad"].any()


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="num_samples is 0"):
        SyntheticDemonstrations(0, SHAPES)
    with pytest.raises(ValueError, match=r"groups are \['arm'\]"):
        SyntheticDemonstrations(1, SHAPES, group_names=["arm"])


def test_batches_hold_what_samples_hold():
    samples = [SOURCE[number] for number in (3, 50)]
    batch = collate_demonstrations(samples)
    assert batch["prompt"] == [sample["prompt"] for sample in samples]
    assert batch["camera0"].shape == (2, 3, 3, 8, 8)
    assert (batch["speed"].dtype, batch["speed"].shape) == (np.int64, (2,))
    for row, sample in enumerate(samples):
        assert all(np.array_equal(batch[name][row], sample[name]) for name in sample)


def test_what_no_sample_has_stays_out_and_differences_are_named():
    one, other = dict(SOURCE[0], subgoal0=None), dict(SOURCE[1], subgoal0=None)
    assert "subgoal0" not in collate_demonstrations([one, other])
    with pytest.raises(RuntimeError, match=r"differ in 'subgoal0': absent, float32 \[3, 8, 8\]"):
        collate_demonstrations([one, SOURCE[1]])
    del other["speed"]
    with pytest.raises(RuntimeError, match="differ in 'speed': absent, int64"):
        collate_demonstrations([one, other])
    with pytest.raises(
        RuntimeError, match=r"differ in 'state': float32 \[2, 2\], float32 \[3, 2\]"
    ):
        collate_demonstrations([one, dict(one, state=one["state"][1:])])


def test_a_policy_takes_the_batches():
    from paddle_vl import PI07LowLevelPolicy
    from tests.support.pi07_golden import (
        CharacterTokenizer,
        FirstValueActionTokenizer,
        policy_config,
    )

    config = policy_config()
    shapes = DemonstrationShapes(
        ("camera0", "camera1"), (56, 56), 5, config.n_obs_steps, config.chunk_size, 7
    )
    source = SyntheticDemonstrations(30, shapes, group_names=("arm::joint", "arm::ee"))
    statistics = list(demonstration_statistics(source).values())
    policy = PI07LowLevelPolicy(
        config, CharacterTokenizer(), FirstValueActionTokenizer(), statistics
    )
    inputs = policy.training_inputs(collate_demonstrations([source[3], source[23]]))
    np.testing.assert_array_equal(inputs["group_index"], [0, 1])
    assert inputs["metadata_masks"].any(axis=1).all()
    assert inputs["response_masks"].any(axis=1).all()
    assert inputs["subgoal_img_masks"][0].all()
    assert inputs["actions_is_pad"][1].any()
    assert inputs["obs_history_is_pad"].shape == (2, config.n_obs_steps)
