"""`model.policy`, a run's changes of the policy's configuration.

Guarantees: settings come from YAML and the command line, at either of OpenTau's levels, and change
both; everything else stays as the checkpoint has it; a setting that contradicts weights, statistics
or another setting, that nothing reads, or that does not exist is refused with its name, both values
and a remedy; over random weights every field may change; another family refuses it by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddle_vl.config.load import load_run_config, save_run_config
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.settings import PolicySettings, with_settings
from tests.single_card_tests.train.tiny_policy_run import MODEL, PLANNER

FROZEN = PI07Config.from_dict(MODEL | {"freeze_vision_encoder": True, "dropout": 0.1})
CAMERA = {"type": "VISUAL", "shape": [3, 28, 28]}
STATE = {"type": "STATE", "shape": [3]}


def changed(
    given: dict[str, Any],
    base: PI07Config | PI07PlannerConfig = FROZEN,
    has_weights: bool = True,
    new_statistics: bool = False,
) -> Any:
    settings = PolicySettings.model_validate(given)
    assert list(settings.problems()) == []
    return with_settings(base, settings, "ckpt", has_weights, new_statistics)


def write_run(folder: Path, model: dict[str, Any]) -> Path:
    settings = {
        "model": model,
        "data": {"train": ["a.jsonl"], "processor": "p"},
        "train": {"output_dir": "out", "max_steps": 4},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


def checkpoint(folder: Path, config: PI07Config | PI07PlannerConfig = FROZEN) -> str:
    (folder / "policy").mkdir()
    config.save_pretrained(folder / "policy")
    return str(folder / "policy")


def test_without_settings_the_configuration_stays():
    assert changed({}) is FROZEN
    assert changed({"dropout": None, "max_action_dim": None, "vlm_config": None}) is FROZEN


@pytest.mark.parametrize(
    "given",
    [{"freeze_vision_encoder": False}, {"vlm_config": {"freeze_vision_encoder": False}}],
)
def test_a_setting_of_either_level_changes_both_and_nothing_else(given):
    config = changed(given)
    assert config.freeze_vision_encoder is config.vlm_config.freeze_vision_encoder is False
    assert config == FROZEN.changed(freeze_vision_encoder=False)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"train_expert_only": True}, ""),
        ({"train_state_action_representation_only": True}, ""),
        ({"attention_implementation": "sdpa"}, ""),
        ({"dropout": 0.25}, ""),
        # A default of OpenTau's, over another value of the checkpoint.
        ({"dropout": 0.1}, ""),
        ({"gradient_checkpointing": True}, ""),
        ({"knowledge_insulation": False}, "policy"),
        ({"n_obs_steps": 3, "history_interval": 2}, "policy"),
        ({"empty_cameras": 1}, "policy"),
        ({"chunk_size": 8, "n_action_steps": 8}, "policy"),
        ({"num_steps": 10, "max_delay": 0, "n_action_steps": 2}, "policy"),
        ({"prompt_max_length": 9, "response_max_length": 8, "metadata_max_length": 7}, "policy"),
        ({"discrete_action_max_length": 9, "warn_outlier_threshold": 0.0}, "policy"),
    ],
)
def test_settings_that_fit_every_weight_are_taken(given, where):
    base = FROZEN.changed(dropout=0.0)
    config = changed(given, base)
    for name, value in given.items():
        assert getattr(config, name) == value
        if not where:
            assert getattr(config.vlm_config, name) == value
    others = {"vlm_config", *given}
    for name, value in base.to_dict().items():
        assert name in others or config.to_dict()[name] == value, name
    # What it saves reads back the same.
    assert PI07Config.from_dict(config.to_dict()) == config


def test_a_mode_that_only_the_engine_has_is_taken_at_either_level():
    for given in (
        {"train_vision_encoder_only": True},
        {"vlm_config": {"train_vision_encoder_only": True}},
    ):
        config = changed({"freeze_vision_encoder": False, **given})
        assert config.vlm_config.train_vision_encoder_only


def test_the_planner_takes_its_own_settings():
    base = PI07PlannerConfig.from_dict(PLANNER)
    config = changed({"freeze_vision_encoder": True, "memory_max_length": 9}, base)
    assert (config.vlm_config.freeze_vision_encoder, config.memory_max_length) == (True, 9)
    with pytest.raises(
        ValueError, match=r"pi07_high_level does not know the keys \['chunk_size'\]"
    ):
        changed({"chunk_size": 3}, base)


def test_what_the_weights_have_may_be_said_again():
    given = {"type": "pi07_low_level", "max_action_dim": 6, "vlm_config": MODEL["vlm_config"]}
    assert changed(given) == FROZEN


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_action_dim": 64}, r"max_action_dim is 64, but ckpt.* has 6: remove it"),
        ({"proj_width": 32}, r"proj_width is 32, but ckpt.* has 16"),
        ({"spacetime_layer_stride": 4}, r"spacetime_layer_stride is 4, but ckpt.* has 2"),
        ({"type": "pi07_high_level"}, "type is 'pi07_high_level', but ckpt"),
        ({"normalization_mapping": {}}, r"normalization_mapping is {}, .*data\.statistics"),
        ({"dataset_names": ["a::b"]}, r"dataset_names is \['a::b'\], but ckpt.* has None"),
        ({"discrete_action_tokenizer_path": "/f"}, r"is '/f', but ckpt.*data\.processor"),
        (
            {"vlm_config": {"gemma3_config": {"text_config": {"num_hidden_layers": 3}}}},
            r"text_config\.num_hidden_layers is 3, but ckpt, whose weights the run takes, has 2",
        ),
        ({"vlm_config": {"disable_action_expert": True}}, "disable_action_expert is True, but"),
        (
            {"vlm_config": {"nothing": 1}},
            r"vlm_config\.nothing is 1, but ckpt.* has None: remove it",
        ),
        (
            {"input_features": {"camera0": CAMERA, "state": {**STATE, "shape": [4]}}},
            r"input_features has .*\[4\].* but ckpt has .*\[3\].*data\.statistics",
        ),
        ({"input_features": {"camera0": CAMERA}}, r"'state': None}, but ckpt has"),
        ({"train_expert_only": True, "freeze_vision_encoder": False}, "over ckpt: .*contradict"),
        ({"n_action_steps": 5}, "over ckpt: n_action_steps 5 exceeds chunk_size 4"),
        ({"n_obs_steps": 1, "history_interval": 2}, "history_interval is 2, but n_obs_steps is 1"),
        (
            {"train_state_action_representation_only": True, "dropout": 0.2},
            "dropout is 0.2, but .* without dropout",
        ),
    ],
)
def test_contradictions_of_weights_and_settings_are_refused_with_both_values(given, message):
    with pytest.raises(ValueError, match=message):
        changed(given)


def test_other_cameras_fit_every_weight_and_other_states_need_statistics():
    features = {"camera0": CAMERA, "camera2": CAMERA, "state": STATE}
    assert list(changed({"input_features": features}).input_features) == list(features)
    larger = {"camera0": CAMERA, "state": {"type": "STATE", "shape": [5]}}
    config = changed({"input_features": larger}, new_statistics=True)
    assert config.input_features["state"].shape == (5,)
    larger["state"] = {"type": "STATE", "shape": [9]}
    with pytest.raises(ValueError, match="over ckpt: .*state has 9 dims; .*max_state_dim 5"):
        changed({"input_features": larger}, new_statistics=True)
    mapping = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    normalized = PI07Config.from_dict(MODEL | {"normalization_mapping": mapping})
    with pytest.raises(ValueError, match="camera2.* the statistics of that"):
        changed({"input_features": features}, normalized)


def test_over_random_weights_every_field_may_change():
    config = changed({"max_action_dim": 64, "spacetime_layer_stride": 1}, has_weights=False)
    assert (config.max_action_dim, config.spacetime_layer_stride) == (64, 1)
    with pytest.raises(ValueError, match="over ckpt: proj_width 32 differs from"):
        changed({"proj_width": 32}, has_weights=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer_lr=1e-4", r"optimizer_lr has no effect on a run here: set train\.learning"),
        ("use_torch_compile=true", "use_torch_compile has no effect"),
        ("vlm_config.load_pretrained_gemma3=true", r"vlm_config\.load_pretrained_gemma3 has no"),
        ("freeze_vision_encodr=false", r"did you mean model\.policy\.freeze_vision_encoder\?"),
        ("nothing=null", r"nothing is not a setting; did you mean"),
        ("n_obs_steps=80", "command line: model.policy.n_obs_steps is 80; it must be at most 41"),
        ("dropout=2", "command line: model.policy.dropout is 2; it must be below 1"),
        ("attention_implementation=fa2", "command line: .*it must be 'eager' or 'sdpa'"),
        ("freeze_vision_encoder=0", "command line: .*freeze_vision_encoder is 0; .*true or false"),
        (
            "vlm_config.dropout=0.2",
            r"model\.policy\.dropout is 0.3 and model\.policy\.vlm_config\.dropout 0.2: give one",
        ),
    ],
)
def test_reading_the_settings_refuses_what_no_checkpoint_could_take(tmp_path, override, message):
    file = write_run(tmp_path, {"config": MODEL, "policy": {"dropout": 0.3}})
    with pytest.raises(ValueError, match=message):
        load_run_config(file, [f"model.policy.{override}"])


def test_recomputation_cannot_be_turned_on_and_off(tmp_path):
    file = write_run(tmp_path, {"config": MODEL})
    off = "model.policy.gradient_checkpointing=false"
    with pytest.raises(ValueError, match=r"recompute is full, but .*gradient_checkpointing is fal"):
        load_run_config(file, [off, "train.recompute=full"])


def test_the_command_line_precedes_the_file_and_both_are_saved(tmp_path):
    policy = {"freeze_vision_encoder": True, "dropout": 0.2, "vlm_config": {"dropout": 0.2}}
    file = write_run(tmp_path, {"pretrained": checkpoint(tmp_path), "policy": policy})
    config = load_run_config(file, ["model.policy.freeze_vision_encoder=false"])
    assert config.model.policy.given == {"freeze_vision_encoder": False, "dropout": 0.2}
    save_run_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config


def test_the_example_for_eight_gpus_is_what_opentau_recommends(tmp_path):
    """Its pull request #273: ZeRO-2, sdpa with recomputation, 20 samples per GPU, all unfrozen."""
    file = Path(__file__).parents[4] / "configs" / "pi07" / "one_node_8_gpus.yaml"
    run = load_run_config(file)
    parallel, train = run.parallel, run.train
    assert (parallel.sharding_degree, parallel.sharding_stage) == (8, 2)
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (20, 1)
    assert (train.recompute, run.model.compute_dtype) == ("full", "bfloat16")
    base = FROZEN.changed(train_expert_only=True)
    vlm = changed(run.model.policy.given, base).vlm_config
    assert not vlm.freeze_vision_encoder
    assert not vlm.train_expert_only
    assert vlm.attention_implementation == "sdpa"


def test_another_family_refuses_the_settings_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    file = write_run(tmp_path, {"pretrained": str(tmp_path), "policy": {"dropout": 0.2}})
    remedy = "model.policy applies only to pi07, and the model is a Qwen3-VL: remove it"
    with pytest.raises(ValueError, match=remedy):
        load_run_config(file)
