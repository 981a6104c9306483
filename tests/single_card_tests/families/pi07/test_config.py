"""Configurations of pi07's policies.

Guarantees: the defaults are OpenTau's; OpenTau's files, alone or inside a training configuration,
are read and written with the same meaning; settings that OpenTau ignores at the policy's level take
effect; files of earlier OpenTau versions mean what they meant, and a run may change them;
contradictory, unknown and out-of-range settings are refused by name.
"""

import json

import pytest

from paddle_vl import PI07Config
from paddle_vl.families.pi07.config import Gemma3WithExpertConfig, PI07PlannerConfig
from paddle_vl.families.pi07.settings import PolicySettings, with_settings
from tests.support.pi07_golden import case, config_values, policy_config


def test_defaults_are_those_of_the_original():
    config = PI07Config()
    assert (config.n_obs_steps, config.chunk_size, config.num_steps) == (6, 50, 5)
    assert (config.dropout, config.freeze_vision_encoder) == (0.1, True)
    assert not config.train_expert_only
    vlm = config.vlm_config
    text, vision = vlm.gemma3_config.text_config, vlm.gemma3_config.vision_config
    assert (text.hidden_size, vlm.gemma_expert_config.hidden_size) == (2560, 1280)
    assert vision.num_patches == 1024
    full = [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29]


@pytest.mark.parametrize("values", [{}, config_values(case("18_policy_level")[0])])
def test_written_configuration_means_the_same(tmp_path, values):
    config = PI07Config.from_dict(values)
    config.save_pretrained(tmp_path)
    assert PI07Config.from_pretrained(tmp_path) == config
    assert json.loads((tmp_path / "config.json").read_text())["type"] == "pi07_low_level"


def test_values_without_effect_are_kept():
    values = policy_config(use_torch_compile=False, device="cpu").to_dict()
    assert (values["use_torch_compile"], values["device"]) == (False, "cpu")
    backbone = values["vlm_config"]["gemma3_config"]
    assert backbone["text_config"]["rope_scaling"]["factor"] == 8.0
    assert backbone["image_token_index"] == 255


def test_keys_that_hf_and_opentau_write_are_accepted():
    common = {
        "return_dict": True, "torch_dtype": "float32", "id2label": {"0": "a"}, "pad_token_id": 0,
        "transformers_version": "4.57.6", "architectures": None, "tie_word_embeddings": True,
    }  # fmt: skip
    values = PI07Config().to_dict()
    values |= {"device": "cuda", "use_amp": False, "opentau_version": "1", "accel_prefix": None}
    values |= {"cloud_vlm_latency_mean": 0.0, "push_to_hub": True, "torch_compile_mode": "default"}
    vlm = values["vlm_config"]
    vlm |= common | {"load_pretrained_gemma3": False, "disable_internal_bf16_cast": True}
    vlm["gemma3_config"] |= common | {"image_token_index": 262144, "boi_token_index": 255999}
    vlm["gemma3_config"]["text_config"] |= common | {
        "sliding_window": 1024, "_sliding_window_pattern": 6, "rope_scaling": None,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_cache": True,
        "use_bidirectional_attention": False, "max_position_embeddings": 131072,
    }  # fmt: skip
    vlm["gemma3_config"]["vision_config"] |= common | {
        "attention_dropout": 0.0, "projection_dim": 2560, "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    }  # fmt: skip
    vlm["gemma_expert_config"] |= common | {"rope_theta": 10000.0, "use_cache": True}
    assert PI07Config.from_dict(values) == PI07Config()


@pytest.mark.parametrize("name", ["train_config.json", "hf_config.json"])
def test_policy_section_of_a_training_configuration_is_read(tmp_path, name):
    values = config_values(case("18_policy_level")[0], type="pi07_low_level")
    (tmp_path / name).write_text(json.dumps({"seed": 1, "policy": values}))
    assert PI07Config.from_pretrained(tmp_path) == policy_config()


@pytest.mark.parametrize("level", ["policy", "engine"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("freeze_vision_encoder", False),
        ("train_expert_only", True),
        ("dropout", 0.0),
        ("attention_implementation", "sdpa"),
        ("gradient_checkpointing", True),
        ("train_state_action_representation_only", True),
    ],
)
def test_setting_of_one_level_holds_for_both(level, name, value):
    setting = {name: value}
    config = PI07Config.from_dict(setting if level == "policy" else {"vlm_config": setting})
    assert getattr(config, name) == getattr(config.vlm_config, name) == value
    # OpenTau's files have the default at the other level.
    written = PI07Config().to_dict()
    (written if level == "policy" else written["vlm_config"])[name] = value
    assert PI07Config.from_dict(written) == config


# What OpenTau wrote before n_obs_steps replaced n_obs_history.
OLDER = {
    "type": "pi07_low_level", "n_obs_steps": 8, "chunk_size": 50, "n_action_steps": 50,
    "n_obs_history": 6, "history_interval": None, "num_steps": 10, "spacetime_layer_stride": 1,
    "attention_implementation": "fa2", "init_strategy": "no_init", "device": "cuda",
    "cloud_vlm_latency_mean": 0.0, "pretrained_path": None, "use_amp": False,
    "vlm_config": {"model_type": "Gemma3WithExpertModel", "load_pretrained_gemma3": False,
                   "attention_implementation": "eager", "train_expert_only": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (6, 1)),
        ({"n_obs_history": None}, (1, 1)),
        ({"n_obs_history": 4, "history_interval": 3}, (4, 3)),
    ],
)
def test_files_of_earlier_versions_mean_what_they_meant(tmp_path, given, wanted, caplog):
    (tmp_path / "config.json").write_text(json.dumps(OLDER | given))
    with caplog.at_level("INFO", "paddle_vl"):
        config = PI07Config.from_pretrained(tmp_path)
    assert (config.n_obs_steps, config.history_interval) == wanted
    assert (config.num_steps, config.attention_implementation) == (10, "eager")
    assert f"is read as n_obs_steps {wanted[0]}" in caplog.text
    assert ("history_interval null" in caplog.text) == ("history_interval" not in given)
    assert PI07Config.from_dict(config.to_dict()) == config
    settings = PolicySettings(n_obs_steps=2, history_interval=5)
    changed = with_settings(config, settings, "ckpt", has_weights=True, new_statistics=False)
    assert (changed.n_obs_steps, changed.history_interval) == (2, 5)


def test_planners_of_other_versions_are_read():
    values = {"discrete_action_tokenizer_path": "a/b", "attention_implementation": "fa2"}
    config = PI07PlannerConfig.from_dict(values)
    assert config.attention_implementation == "eager"
    assert config.to_dict()["discrete_action_tokenizer_path"] == "a/b"


def test_changed_sets_both_levels():
    config = PI07Config().changed(dropout=0.0, num_steps=3)
    assert (config.dropout, config.vlm_config.dropout, config.num_steps) == (0.0, 0.0, 3)


def test_flash_attention_computes_as_eager_and_says_so(caplog):
    assert PI07Config(attention_implementation="fa2").attention_implementation == "eager"
    assert "fa2" in caplog.text


def test_rotary_bases_of_newer_files_are_read():
    bases = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 5.0}}
    values = {"gemma3_config": {"text_config": {"rope_parameters": bases}}}
    text = Gemma3WithExpertConfig(**values).gemma3_config.text_config
    assert (text.rope_base(0), text.rope_base(5)) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"dropout": 0.2, "vlm_config": {"dropout": 0.3}}, "dropout is 0.2.*0.3 in vlm_config"),
        (
            {"freeze_vision_encoder": True, "vlm_config": {"freeze_vision_encoder": False}},
            "freeze_vision_encoder is True.*False in vlm_config",
        ),
        (
            {"train_expert_only": True, "freeze_vision_encoder": False},
            "train_expert_only without freeze_vision_encoder",
        ),
        (
            {"train_expert_only": True, "vlm_config": {"disable_action_expert": True}},
            "train_expert_only with disable_action_expert",
        ),
        (
            {"vlm_config": {"train_vision_encoder_only": True}},
            "train_vision_encoder_only with freeze_vision_encoder",
        ),
        (
            {"train_state_action_representation_only": True, "train_expert_only": True},
            "train_state_action_representation_only with train_expert_only",
        ),
        ({"n_action_steps": 51}, "n_action_steps 51 exceeds chunk_size 50"),
        ({"max_delay": 51}, "max_delay 51 exceeds chunk_size 50"),
        ({"max_delay": 1, "n_action_steps": 49}, "max_delay 1 needs whole chunks.*49"),
        ({"n_obs_steps": 0}, "n_obs_steps is 0; .*at least 1"),
        ({"n_obs_history": 0}, "n_obs_history is 0; .*at least 1"),
        ({"empty_cameras": True}, "empty_cameras is True"),
        ({"dropout": 1.0}, "dropout is 1.0; .*below 1"),
        ({"attention_implementation": "flash"}, "'flash'; it must be 'eager' or 'sdpa'"),
        ({"proj_width": 8}, "proj_width 8 differs from gemma_expert_config.hidden_size 1280"),
        ({"resize_imgs_with_padding": [224, 224]}, "image_size 448: set it to"),
        ({"normalization_mapping": {"STATE": "MINMAX"}}, "'MINMAX'; it must be 'MEAN_STD'"),
        ({"normalization_mapping": {"ARM": "MIN_MAX"}}, "has 'ARM'"),
        ({"input_features": {"state": {"type": "STATE"}}}, "state: shape is missing"),
        ({"input_features": {"x": {"type": "WORD", "shape": [1]}}}, "x: type is 'WORD'"),
        ({"config_version": 2}, "config_version is 2.*newer package"),
        ({"type": "pi0"}, "type is 'pi0'"),
        ({"n_obs_step": 1}, r"\['n_obs_step'\]"),
        ({"n_candidates": 4}, "n_candidates is 4, which is not supported"),
        ({"vlm_config": {"layers": 1}}, r"vlm_config: .* keys \['layers'\]"),
        ({"vlm_config": {"gemma_expert_config": {"num_hidden_layers": 3}}}, "num_hidden_layers 3"),
        ({"vlm_config": {"gemma_expert_config": {"use_adarms": False}}}, "use_adarms is False"),
        (
            {"vlm_config": {"gemma3_config": {"text_config": {"layer_types": ["full_attention"]}}}},
            "layer_types has 1 entries",
        ),
        (
            {"vlm_config": {"gemma3_config": {"vision_config": {"image_size": 100}}}},
            "image_size 100 is not a multiple of patch_size 14",
        ),
        ({"vlm_config": {"gemma3_config": {"mm_tokens_per_image": 9}}}, "mm_tokens_per_image 9"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        PI07Config.from_dict(values)


def test_file_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"none of config\.json, train_config\.json"):
        PI07Config.from_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for text, named in (("{", "not valid JSON"), ("[]", r"holds \[\]"), ('{"a": 1}', r"\['a'\]")):
        file.write_text(text)
        with pytest.raises((ValueError, RuntimeError), match=rf"config\.json.*{named}"):
            PI07Config.from_pretrained(tmp_path)
