"""Raw batches to model inputs, and the state of an episode.

Guarantees: the inputs equal the golden case's, tensor by tensor, and the texts OpenTau's; absent
optional entries stay absent; missing, too long or misshapen entries are refused by name; past
frames are evenly spaced, those from before the episode zero and marked; the queue returns a chunk
in order, requests the next one in time, and begins it with the actions that are still executing.
"""

import logging

import numpy as np
import pytest

from paddle_vl.families.policy.acting import ActingPolicy, ObservationHistory
from paddle_vl.families.policy.model_inputs import (
    metadata_texts,
    observation_inputs,
    padded_action_prefix,
    prepare_state,
    prompt_texts,
    response_texts,
    target_inputs,
    warn_of_outliers,
)
from paddle_vl.families.policy.normalize import Normalizer, group_index
from tests.support.pi07_golden import (
    CharacterTokenizer,
    FirstValueActionTokenizer,
    case,
    group_statistics,
    policy_config,
    under,
)


def raw_batch() -> dict:
    description, tensors = case("18_policy_level")
    batch = under(tensors, "in.") | description["strings"]
    return {name: value for name, value in batch.items() if name not in ("noise", "time")}


def prepared(**changes) -> dict:
    """The golden batch's inputs with changed entries; None removes one."""
    config = policy_config()
    batch = {name: v for name, v in (raw_batch() | changes).items() if v is not None}
    groups = group_statistics()

    def normalized(features, modes):
        normalizer = Normalizer(features, modes, 1, len(groups))
        normalizer.set_statistics(groups)
        return normalizer.normalize(batch, batch["dataset_index"])

    inputs = observation_inputs(
        normalized(config.input_features, config.normalization_mapping),
        config,
        CharacterTokenizer(),
    )
    if "actions" in batch:
        inputs |= target_inputs(
            normalized(config.output_features, config.normalization_mapping),
            normalized(config.output_features, {"ACTION": "MIN_MAX"})["actions"],
            config,
            FirstValueActionTokenizer(),
        )
    return inputs


def flat(inputs: dict) -> dict[str, np.ndarray]:
    values = {}
    for name, value in inputs.items():
        items = enumerate(value) if isinstance(value, list) else [("", value)]
        values |= {f"{name}{number}": item for number, item in items}
    return values


def test_golden_batch_becomes_the_original_inputs():
    expected = under(case("18_policy_level")[1], "model_in.")
    found = flat(prepared())
    found["group_index"] = raw_batch()["dataset_index"]
    assert set(found) == set(expected) - {"noise", "time"}
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_golden_texts():
    prompts, responses, metadata = case("18_policy_level")[0][
        "tokenized_texts_prompt_response_metadata"
    ]
    batch = raw_batch()
    assert prompt_texts(batch, 2) == prompts
    assert response_texts(batch, 2) == responses
    assert metadata_texts(batch, 2) == metadata


def test_texts_of_a_batch_may_have_numpys_forms():
    """A text is that of every sample, a list or array has one for each."""
    for both in ("go", np.array("go"), b"go", np.str_("go")):
        assert prompt_texts({"prompt": both}, 2) == ["Task: go, "] * 2
    for each in (np.array(["go", "stop"]), [b"go", np.array("stop")], (np.array(["go"]), "stop")):
        assert prompt_texts({"prompt": each}, 2) == ["Task: go, ", "Task: stop, "]
    for wrong in ([None, "go"], [1, 2], 3):
        with pytest.raises(ValueError, match="'prompt' is .*; a text is needed"):
            prompt_texts({"prompt": wrong}, 2)


def test_metadata_without_flags_is_left_out():
    assert metadata_texts({"speed": np.array([1.5])}, 1) == [""]
    batch = {"speed": np.array([1.5]), "speed_is_pad": np.array([False]), "robot_type": "arm"}
    assert metadata_texts(batch, 1) == ["Metadata: Speed: 1.5,  Robot: arm, "]
    assert metadata_texts({}, 2) == ["", ""]


def test_batch_without_optional_entries_has_none_of_them():
    absent = dict.fromkeys(
        ["response", "subgoal0", "subgoal1", "robot_type", "control_mode", "obs_history_is_pad"]
    )
    absent |= dict.fromkeys(n for n in raw_batch() if n.endswith("_is_pad"))
    inputs = prepared(**absent)
    assert inputs["subgoal_images"] == []
    assert inputs["subgoal_img_masks"] == []
    assert not inputs["response_masks"].any()
    assert not inputs["metadata_masks"].any()
    assert "obs_history_is_pad" not in inputs
    assert "actions_is_pad" not in inputs


def test_short_states_and_actions_are_filled_with_zeros():
    state = prepare_state({"state": np.ones((2, 3, 4), np.float32)}, policy_config())
    assert state.shape == (2, 3, 5)
    assert not state[..., 4].any()
    batch = {"actions": np.ones((2, 6, 3), np.float32)}
    inputs = target_inputs(batch, batch["actions"], policy_config(), FirstValueActionTokenizer())
    assert inputs["actions"].shape == (2, 6, 7)
    assert not inputs["actions"][..., 3:].any()
    # The loss leaves out padding.
    assert inputs["real_action_dim"].tolist() == [3, 3]
    prefix = padded_action_prefix(np.ones((2, 2, 3)), policy_config())
    assert prefix.shape == (2, 6, 7)
    assert prefix.sum() == 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"state": None}, "no 'state'"),
        ({"prompt": None}, "no 'prompt'"),
        ({"prompt": ["one"]}, "'prompt' has 1 texts for a batch of 2"),
        ({"camera0": None}, r"lacks the cameras \['camera0'\].*empty_cameras is 0"),
        ({"camera0": None, "camera1": None}, "none of the cameras"),
        ({"camera0": np.zeros((2, 3, 56, 56), np.float32)}, "select_action makes"),
        ({"camera0": np.zeros((2, 4, 3, 8, 8), np.float32)}, "1 to 3 frames"),
        ({"subgoal1": np.zeros((2, 1, 8, 8), np.float32)}, r"'subgoal1' has shape \[2, 1, 8, 8\]"),
        ({"speed_is_pad": np.zeros(3, bool)}, r"speed_is_pad \[3\]"),
        ({"obs_history_is_pad": np.zeros((2, 2), bool)}, r"obs_history_is_pad has shape \[2, 2\]"),
    ],
)
def test_bad_observations_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        prepared(**changes)


def test_state_and_actions_that_do_not_fit_are_named():
    config, tokenizer = policy_config(), FirstValueActionTokenizer()
    with pytest.raises(ValueError, match="'state' has 6 dims, max_state_dim is 5: raise"):
        prepare_state({"state": np.zeros((2, 3, 6))}, config)
    with pytest.raises(ValueError, match="n_obs_steps 3 needs.*select_action makes"):
        prepare_state({"state": np.zeros((2, 5))}, config)
    for shape, named in (((2, 5, 7), "chunk_size 6"), ((2, 6, 8), "max_action_dim is 7")):
        actions = np.zeros(shape, np.float32)
        with pytest.raises(ValueError, match=named):
            target_inputs({"actions": actions}, actions, config, tokenizer)
    actions = np.zeros((2, 6, 7), np.float32)
    with pytest.raises(ValueError, match="needs an action tokenizer"):
        target_inputs({"actions": actions}, actions, config, None)
    with pytest.raises(ValueError, match="at most 6"):
        padded_action_prefix(np.zeros((1, 7, 7)), config)


def test_outliers_are_warned_of(caplog):
    batch = {"state": np.array([[1.0, 40.0]]), "actions": np.array([[1.0]])}
    with caplog.at_level(logging.WARNING):
        warn_of_outliers(batch, 0.0)
        assert not caplog.records
        warn_of_outliers(batch, 32.0)
    assert "state reach 40 in dims [1]" in caplog.text
    assert "actions" not in caplog.text


def test_groups_are_found_by_what_the_batch_says():
    config = policy_config(
        dataset_names=["panda::joint", "pen"], dataset_to_norm_index={"a": 0, "b": 0, "pen": 1}
    )

    def rows(batch):
        return group_index(batch, 2, config, 2).tolist()

    assert rows({"dataset_index": np.array([1, 0]), "robot_type": ["x", "x"]}) == [1, 0]
    assert rows({"robot_type": "panda", "control_mode": [" joint", "joint"]}) == [0, 0]
    assert rows({"dataset_repo_id": ["pen", "b"]}) == [1, 0]
    assert group_index({}, 2, policy_config(), 1).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({}, "does not say which"),
        ({"dataset_index": [0, 2]}, r"dataset_index is \[0, 2\]"),
        ({"dataset_index": [0]}, "batch of 2 needs one row for each"),
        ({"robot_type": ["panda", ""], "control_mode": "joint"}, r"\('', 'joint'\)"),
        ({"robot_type": ["panda"], "control_mode": "joint"}, "'robot_type' has 1 texts"),
        ({"dataset_repo_id": "other"}, "other.*trained on"),
    ],
)
def test_unknown_groups_are_named(batch, named):
    config = policy_config(dataset_names=["panda::joint", "pen"])
    with pytest.raises(ValueError, match=named):
        group_index(batch, 2, config, 2)


def test_history_fills_up_with_evenly_spaced_frames():
    history = ObservationHistory(3, interval=2)
    seen = []
    for step in range(1, 7):
        batch = {"state": np.full((2, 1), step), "camera0": np.full((2, 3, 4, 4), step), "x": "y"}
        found = history.extended(batch, ["state", "camera0"])
        assert found["camera0"].shape == (2, 3, 3, 4, 4)
        assert found["x"] == "y"
        assert (found["camera0"][:, :, 0, 0, 0] == found["state"][..., 0]).all()
        assert (found["obs_history_is_pad"] == (found["state"][..., 0] == 0)).all()
        seen.append(found["state"][0, :, 0].tolist())
    assert seen == [[0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 2, 4], [1, 3, 5], [2, 4, 6]]
    history.clear()
    assert (
        history.extended(batch, ["state"])["obs_history_is_pad"].tolist()
        == [[True] * 2 + [False]] * 2
    )


def test_history_of_one_frame_has_no_padding():
    found = ObservationHistory(1, 1).extended({"state": np.ones((1, 2))}, ["state"])
    assert found["state"].shape == (1, 1, 2)
    assert found["obs_history_is_pad"].tolist() == [[False]]


def test_history_refuses_another_batch_size():
    history = ObservationHistory(2, 1)
    history.extended({"state": np.ones((1, 2))}, ["state"])
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[1, 2\] a step ago: call reset"):
        history.extended({"state": np.ones((2, 2))}, ["state"])


class Chunks(ActingPolicy):
    """Predicts 0 to 5, then 10 to 15 and so on, and keeps the actions that run meanwhile."""

    inputs = sample_chunk = None

    def __init__(self, **settings):
        self.config, self.running = policy_config(**settings), []
        self.begin(self.config)

    def sample_actions(self, batch, noise, delay, action_prefix):
        chunk = np.arange(6.0).reshape(1, 6, 1) + 10 * len(self.running)
        self.running.append(None if action_prefix is None else action_prefix[0, :, 0].tolist())
        assert delay == len(self.running[-1] or ())
        return chunk


@pytest.mark.parametrize(
    ("settings", "executed", "running"),
    [
        ({"n_action_steps": 2}, [0, 1, 10, 11, 20], [None] * 3),
        # Queued actions stay; they replace the chunk's first two.
        ({"max_delay": 2}, [0, 1, 2, 3, 4, 5, 12, 13, 14], [None, [4, 5], [14, 15]]),
    ],
)
def test_chunks_are_executed_in_part_and_begin_with_what_runs_on(settings, executed, running):
    policy, observed = Chunks(**settings), {"state": np.zeros((1, 5), np.float32)}
    assert [policy.select_action(observed).item() for _ in executed] == executed
    assert policy.running == running
    policy.reset()
    assert policy.select_action(observed).item() == 10 * len(running)
