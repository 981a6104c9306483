"""The low-level policy and its files; `test_pi07_golden` compares its losses and actions.

Guarantees: a saved policy is the same policy, with
OpenTau's names; older and tied names are read; an unfitting checkpoint is refused with all its
errors; statistics come from one place, which is named. With one seed, `from_config` draws the same
weights as the class itself, at construction or when materialized, in the default dtype;
`whole_shapes` are those of the checkpoint; a sharded model is refused where the full one is needed.
"""

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import PI07Config, PI07LowLevelPolicy
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.policy.tokenizers import ActionTokenizer
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from tests.single_card_tests.families.pi07.test_planner import make_batch
from tests.support.pi07_golden import (
    CASES,
    CharacterTokenizer,
    FirstValueActionTokenizer,
    case,
    character_tokenizer,
    filled,
    golden_planner,
    group_statistics,
    policy_config,
    under,
)

WEIGHTS = CASES / "weights_A.safetensors"
ENGINE = "gemma3_with_expert.gemma3."
TABLE = f"{ENGINE}model.language_model.embed_tokens.weight"
NORMALIZERS = (
    "normalize_inputs", "normalize_targets", "normalize_discrete_actions", "unnormalize_outputs",
)  # fmt: skip


def golden_policy(**changes) -> PI07LowLevelPolicy:
    policy = PI07LowLevelPolicy(
        policy_config(**changes),
        CharacterTokenizer(),
        FirstValueActionTokenizer(),
        group_statistics(),
    )
    filled(policy.model)
    return policy


def raw_batch() -> tuple[dict, dict]:
    """The golden batch with its noise and times."""
    description, tensors = case("18_policy_level")
    batch = under(tensors, "in.") | description["strings"]
    return batch, {name: batch.pop(name) for name in ("noise", "time")}


def observation(step: int) -> dict:
    description, tensors = case("18_policy_level")
    words = {name: [description["strings"][name][0]] for name in ("prompt", "response")}
    return under(tensors, f"rollout.step{step}.in.") | words | {"dataset_index": [0]}


@pytest.fixture
def saved(tmp_path):
    """Folder of a saved policy."""
    policy = golden_policy(dataset_names=["a", "b"])
    policy.tokenizer = character_tokenizer()
    policy.action_tokenizer = None
    policy.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change) -> None:
    """Change the tensors in a folder."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def rewrite_config(folder, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def weights(policy: PI07LowLevelPolicy) -> dict[str, np.ndarray]:
    return {item.key: parameter_array(item) for item in policy.model.stored_parameters()}


def assert_golden_weights(policy: PI07LowLevelPolicy) -> None:
    expected, found = load_file(WEIGHTS), weights(policy)
    assert set(found) == set(expected) - UNUSED_KEYS
    assert all((found[key] == expected[key]).all() for key in found)


def test_reset_begins_anew():
    policy, noise = golden_policy(), case("18_policy_level")[1]["rollout.noise"]
    first = policy.select_action(observation(0), noise)
    policy.select_action(observation(1), noise)
    policy.reset()
    assert (policy.select_action(observation(0), noise) == first).all()


def test_actions_are_chosen_without_dropout():
    noise = case("18_policy_level")[1]["rollout.noise"]
    still = golden_policy().select_action(observation(0), noise)
    values = policy_config().changed(dropout=0.5)
    policy = PI07LowLevelPolicy(values, CharacterTokenizer(), statistics=group_statistics())
    filled(policy.model)
    policy.train()
    assert (policy.select_action(observation(0), noise) == still).all()


def test_tensors_are_taken_like_arrays():
    batch, drawn = raw_batch()
    policy = golden_policy()
    tensors = {
        name: paddle.to_tensor(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()
    }
    found = policy(tensors, **{name: paddle.to_tensor(value) for name, value in drawn.items()})
    assert found["MSE"].item() == policy(batch, **drawn)["MSE"].item()


def test_files_have_the_names_and_values_of_the_original(saved):
    stored, expected = load_file(saved / "model.safetensors"), load_file(WEIGHTS)
    model = under(stored, "model.")
    # torch's name of the tied table; nothing reads the expert's head, which is drawn.
    expected[f"{ENGINE}lm_head.weight"] = expected.pop(TABLE)
    assert set(model) == set(expected)
    assert all((model[key] == expected[key]).all() for key in model if "expert.lm_head" not in key)
    assert stored["normalize_inputs.buffer_state.min"].shape == (2, 5)
    modes = {"normalize_inputs": ("state", "min", "max")}
    modes |= dict.fromkeys(["normalize_targets", "unnormalize_outputs"], ("actions", "mean", "std"))
    modes["normalize_discrete_actions"] = ("actions", "min", "max")
    assert set(stored) - {f"model.{key}" for key in model} == {
        f"{name}.buffer_{feature}.{stat}" for name, (feature, *s) in modes.items() for stat in s
    }
    assert PI07Config.from_pretrained(saved).config_version == 1


def test_saved_policy_is_the_same_policy(tmp_path):
    chunks = np.random.default_rng(0).uniform(-1, 1, (20, 6, 7)).astype(np.float32)
    config = policy_config(dataset_names=["a", "b"])
    fast = ActionTokenizer.fit(chunks, vocab_size=256)
    values = config.to_dict()
    values["vlm_config"]["discrete_action_vocab_size"] = None
    policy = PI07LowLevelPolicy(
        PI07Config.from_dict(values), character_tokenizer(), fast, group_statistics()
    )
    policy.save_pretrained(tmp_path)
    again = PI07LowLevelPolicy.from_pretrained(tmp_path)
    batch, drawn = raw_batch()
    policy.eval()
    assert again.config == policy.config.changed(config_version=1)
    assert again.config.vlm_config.discrete_action_vocab_size == 256
    for name in ("MSE", "CE"):
        assert again(batch, **drawn)[name].item() == policy(batch, **drawn)[name].item()


def test_checkpoint_without_tokenizers_takes_those_that_are_given(saved):
    (saved / "tokenizer.json").unlink()
    with pytest.raises(RuntimeError, match=r"no tokenizer file.*tokenizer\.json"):
        PI07LowLevelPolicy.from_pretrained(saved)
    policy = PI07LowLevelPolicy.from_pretrained(saved, tokenizer=CharacterTokenizer())
    assert_golden_weights(policy)
    assert policy.sample_actions(observation(0) | observation_of_three()).shape == (1, 6, 7)
    with pytest.raises(ValueError, match="training needs an action tokenizer"):
        policy(raw_batch()[0])


def test_tokenizer_may_be_a_path_as_text(saved):
    policy = PI07LowLevelPolicy.from_pretrained(saved, tokenizer=str(saved))
    assert_golden_weights(policy)


def observation_of_three() -> dict:
    """A single observation."""
    batch, _ = raw_batch()
    return {name: batch[name][:1] for name in ("state", "camera0", "camera1")}


def test_vocabulary_of_discrete_actions_is_found_in_the_checkpoint(saved):
    values = json.loads((saved / "config.json").read_text())
    values["vlm_config"]["discrete_action_vocab_size"] = None
    (saved / "config.json").write_text(json.dumps(values))
    policy = PI07LowLevelPolicy.from_pretrained(saved)
    assert policy.config.vlm_config.discrete_action_vocab_size == 40


def older(tensors: dict) -> dict:
    """The older names, and the weights of norms that are now adaptive."""
    renamed = {}
    for key, value in tensors.items():
        key = key.removeprefix("model.").replace("time_mlp_", "action_time_mlp_")
        renamed[key.replace("gemma3_with_expert.", "paligemma_with_expert.")] = value
    renamed["gemma3_with_expert.gemma_expert.model.norm.weight"] = np.zeros(32, np.float32)
    return renamed


def tied_under_the_other_name(tensors: dict) -> dict:
    table = tensors.pop(f"model.{ENGINE}lm_head.weight")
    return tensors | {f"model.{TABLE}": table}


@pytest.mark.parametrize("change", [older, tied_under_the_other_name])
def test_other_names_are_read(saved, change):
    rewrite(saved, change)
    assert_golden_weights(PI07LowLevelPolicy.from_pretrained(saved))


def test_everything_that_does_not_fit_is_reported_at_once(saved):
    def damage(tensors):
        del tensors["model.state_proj.bias"]
        del tensors["normalize_inputs.buffer_state.max"]
        tensors["model.da_head.weight"] = np.zeros(1, np.float32)
        tensors["normalize_targets.buffer_other.mean"] = np.zeros((2, 1), np.float32)
        tensors["model.action_out_proj.bias"] = np.zeros(8, np.float32)
        return tensors

    rewrite(saved, damage)
    with pytest.raises(ValueError, match="does not fit the policy") as raised:
        PI07LowLevelPolicy.from_pretrained(saved)
    for part in (
        "2 missing: normalize_inputs.buffer_state.max, state_proj.bias",
        "2 unexpected: da_head.weight, normalize_targets.buffer_other.mean",
        "1 misshapen: action_out_proj.bias (file [8], model [7])",
    ):
        assert part in str(raised.value)


def test_named_keys_may_be_missing_or_too_many(saved):
    def change(tensors):
        del tensors["model.state_proj.bias"]
        return tensors | {"model.extra.weight": np.zeros(2, np.float32)}

    rewrite(saved, change)
    policy = PI07LowLevelPolicy.from_pretrained(saved, fresh=["state_proj.*"], ignore=["extra.*"])
    expected, found = load_file(WEIGHTS), weights(policy)
    # The checkpoint's tensors are loaded, the rest is drawn.
    assert (found["state_proj.weight"] == expected["state_proj.weight"]).all()
    assert np.isfinite(found["state_proj.bias"]).all()
    assert (found["state_proj.bias"] != expected["state_proj.bias"]).any()


def test_statistics_of_the_checkpoint_have_as_many_rows_as_it_says(saved):
    rewrite_config(saved, dataset_names=None)
    policy = PI07LowLevelPolicy.from_pretrained(saved)
    rows = policy.normalizers["normalize_inputs"].tensors["buffer_state.min"]
    expected = [group["state"]["min"] for group in group_statistics()]
    assert (rows == np.stack(expected)).all()


def test_statistics_come_from_one_place(saved):
    others = [group_statistics()[1]] * 2
    with pytest.raises(ValueError, match="holds statistics, and others were given"):
        PI07LowLevelPolicy.from_pretrained(saved, statistics=others)
    rewrite_config(saved, skip_normalization_weights=True)
    with pytest.raises(ValueError, match="others must be given"):
        PI07LowLevelPolicy.from_pretrained(saved)
    policy = PI07LowLevelPolicy.from_pretrained(saved, statistics=others)
    rows = policy.normalizers["unnormalize_outputs"].tensors["buffer_actions.mean"]
    assert (rows == others[0]["actions"]["mean"]).all()
    # They are saved with the policy.
    assert not policy.config.skip_normalization_weights


def named(*names: str, **changes) -> PI07Config:
    return policy_config(dataset_names=list(names), **changes)


def test_rows_of_groups_are_found_by_name(saved):
    policy = PI07LowLevelPolicy.from_pretrained(saved, config=named("b", "a"))
    rows = policy.normalizers["normalize_inputs"].tensors["buffer_state.max"]
    assert (rows == np.stack([g["state"]["max"] for g in group_statistics()[::-1]])).all()
    with pytest.raises(ValueError, match=r"statistics of \['a', 'b'\], not of \['c'\]"):
        PI07LowLevelPolicy.from_pretrained(saved, config=named("a", "c"))
    rewrite_config(saved, dataset_names=None)
    with pytest.raises(
        ValueError, match=r"statistics of groups without names, not of \['a', 'b'\]"
    ):
        PI07LowLevelPolicy.from_pretrained(saved, config=named("a", "b"))


def test_projections_of_groups_begin_as_those_of_the_checkpoint(saved):
    config = named("a", "b", per_group_projection=True)
    policy = PI07LowLevelPolicy.from_pretrained(saved, config=config)
    shared, found = load_file(WEIGHTS), weights(policy)
    for key in ("state_proj.weight", "action_out_proj.bias"):
        assert (found[key] == shared[key]).all()
        assert found[key].shape == (2, *shared[key].shape)
    # The two groups now differ.
    with paddle.no_grad():
        policy.model.prefix.state_proj.linear.weight[1] = 5.0
    policy.save_pretrained(saved)
    others = named("c", "b", "a", per_group_projection=True, skip_normalization_weights=True)
    statistics = [group_statistics()[0]] * 3
    again = PI07LowLevelPolicy.from_pretrained(saved, config=others, statistics=statistics)
    first, second = weights(policy)["state_proj.weight"]
    assert (weights(again)["state_proj.weight"] == np.stack([first, second, first])).all()
    with pytest.raises(ValueError, match=r"misshapen.*state_proj\.weight \(file \[2, 64, 5\]"):
        PI07LowLevelPolicy.from_pretrained(saved, config=named("a", "b"))
    rewrite_config(saved, dataset_names=None)
    with pytest.raises(ValueError, match="rows of several groups.*no dataset_names"):
        PI07LowLevelPolicy.from_pretrained(saved, config=others, statistics=statistics)


def test_projection_of_one_unnamed_group_serves_all(saved):
    def change(tensors):
        ends = ("_proj.weight", "_proj.bias")
        policy_level = ("model.state", "model.action")
        return {
            key: v[None] if key.startswith(policy_level) and key.endswith(ends) else v
            for key, v in tensors.items()
        }

    rewrite(saved, change)
    rewrite_config(saved, dataset_names=None)
    config = named("a", "b", per_group_projection=True, skip_normalization_weights=True)
    policy = PI07LowLevelPolicy.from_pretrained(saved, config=config, statistics=group_statistics())
    expected = load_file(WEIGHTS)["action_in_proj.weight"]
    assert (weights(policy)["action_in_proj.weight"] == np.stack([expected] * 2)).all()


def test_statistics_from_before_there_were_groups_are_read(saved):
    def change(tensors):
        return {key: v[0] if "normalize" in key else v for key, v in tensors.items()}

    rewrite(saved, change)
    for names in (None, ["a"]):
        rewrite_config(saved, dataset_names=names)
        policy = PI07LowLevelPolicy.from_pretrained(saved)
        rows = policy.normalizers["normalize_inputs"].tensors["buffer_state.max"]
        assert (rows == group_statistics()[0]["state"]["max"][None]).all()
        assert policy.sample_actions(observation(0) | observation_of_three()).shape == (1, 6, 7)


def test_statistics_may_be_left_out_of_the_file(saved):
    policy = PI07LowLevelPolicy.from_pretrained(saved)
    policy.config = policy.config.changed(save_normalization_stats=False)
    policy.save_pretrained(saved)
    with pytest.raises(ValueError, match=r"8 missing: normalize_discrete_actions\.buffer_actions"):
        PI07LowLevelPolicy.from_pretrained(saved)
    again = PI07LowLevelPolicy.from_pretrained(saved, statistics=group_statistics())
    for name in NORMALIZERS:
        for key, rows in again.normalizers[name].tensors.items():
            assert (rows == policy.normalizers[name].tensors[key]).all()


def test_checkpoint_that_names_no_version_has_the_first(saved):
    rewrite_config(saved, config_version=None)
    assert PI07LowLevelPolicy.from_pretrained(saved).config.config_version == 0


def test_half_precision_weights_are_kept(saved):
    policy = PI07LowLevelPolicy.from_pretrained(saved, dtype="bfloat16")
    policy.save_pretrained(saved)
    stored = read_header(saved / "model.safetensors")
    assert stored["model.state_proj.weight"].dtype == "BF16"
    assert stored["normalize_inputs.buffer_state.min"].dtype == "F32"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input_features": {}}, "input_features has no feature of type STATE; pi07 has one"),
        (
            {"output_features": {"action": {"type": "ACTION", "shape": [7]}}},
            r"output_features has \['action'\] of type ACTION.*'actions': name it so",
        ),
        (
            {"input_features": {"state": {"type": "STATE", "shape": [5]}}},
            "no feature of type VISUAL",
        ),
        (
            {"per_group_projection": True, "dataset_names": None},
            "statistics of 2 groups, dataset_names has None",
        ),
        ({"dataset_names": ["a"]}, r"statistics of 2 groups, dataset_names has \['a'\]"),
    ],
)
def test_policies_that_do_not_fit_together_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        PI07LowLevelPolicy(
            policy_config(**changes), CharacterTokenizer(), statistics=group_statistics()
        )


def test_action_tokenizer_of_the_configuration_is_read(tmp_path):
    chunks = np.random.default_rng(0).uniform(-1, 1, (4, 6, 7))
    ActionTokenizer.fit(chunks, vocab_size=200).save_pretrained(tmp_path)
    config = policy_config(discrete_action_tokenizer_path=str(tmp_path))
    with pytest.raises(ValueError, match="has 200 entries.*discrete_action_vocab_size is 40"):
        PI07LowLevelPolicy(config, CharacterTokenizer())


def test_what_a_batch_lacks_is_named():
    policy = golden_policy()
    batch, _ = raw_batch()
    for name in ("state", "actions"):
        with pytest.raises(ValueError, match=f"no '{name}'; its entries are"):
            policy({key: value for key, value in batch.items() if key != name})
    with pytest.raises(ValueError, match="no 'state'"):
        policy.select_action({})
    with pytest.raises(ValueError, match="delay is 1; max_delay allows 0 to 0"):
        policy.sample_actions(batch, delay=1)


def tokenizers() -> tuple[CharacterTokenizer, FirstValueActionTokenizer]:
    return CharacterTokenizer(), FirstValueActionTokenizer()


def test_fresh_weights_are_those_that_the_class_draws():
    config, found = policy_config(dataset_names=None), []
    for materialize in (None, True, False):
        paddle.seed(3)
        if materialize is None:
            policy = PI07LowLevelPolicy(config, *tokenizers())
        else:
            policy = PI07LowLevelPolicy.from_config(config, *tokenizers(), materialize=materialize)
            assert all(p._is_initialized() == materialize for p in policy.parameters())
            policy.model.materialize_all()
        found.append({i.key: i.parameter.numpy() for i in policy.model.stored_parameters()})
    for key, value in found[0].items():
        np.testing.assert_array_equal(found[1][key], value, err_msg=key)
        np.testing.assert_array_equal(found[2][key], value, err_msg=key)
    assert policy.model.whole_shapes() == {
        i.key: i.layout.to_stored(i.of_own(i.parameter.numpy())).shape
        for i in policy.model.stored_parameters()
    }


def test_a_sharded_planner_does_not_generate():
    whole = golden_planner()
    shard = PI07HighLevelPlannerModel(
        whole.config, whole.label_ids, SingleDevicePlacement(StageLayers(head=False))
    )
    with pytest.raises(ValueError, match="one rank's shard of a model; to generate, load"):
        shard.generate(make_batch(), 2, 1)


def test_a_stage_of_a_policy_does_not_act():
    config = policy_config(dataset_names=None)
    placement = SingleDevicePlacement(StageLayers(embedding=False))
    stage = PI07LowLevelPolicy.from_config(config, *tokenizers(), placement=placement)
    with pytest.raises(ValueError, match="one stage of a pipeline; to act, load the checkpoint"):
        stage.model.sample_actions(make_batch())
