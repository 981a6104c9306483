"""The published sizes by name.

Guarantees: each size builds without allocating a parameter and has the published number of
parameters; the hub's names are accepted. Keys and shapes are those of test_golden.py.

Invalid configurations.

Guarantees: a number of a wrong type or out of range is refused with file, key and value before the
model is built; every published size is accepted.
"""

import json
from math import prod

import paddle
import pytest

from paddle_vl import PI07Config, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.sizes import SIZE_NAMES
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.tiny import tiny_config

COUNTS = {
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
}


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_a_size_has_the_published_count_and_allocates_nothing(name):
    with paddle.LazyGuard():
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.named(name))
    assert sum(map(prod, model.whole_shapes().values())) == COUNTS[name]
    assert sum(prod(parameter.shape) for parameter in model.parameters()) == COUNTS[name]
    assert not any(parameter._is_initialized() for parameter in model.parameters())


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_a_size_survives_its_file(name, tmp_path):
    config = Qwen3VLConfig.named(name)
    config.save_pretrained(tmp_path)
    assert Qwen3VLConfig.from_pretrained(tmp_path) == config
    assert config.tie_flags_agree
    assert config.text_config.max_position_embeddings == 262144
    assert config.text_config.rope_theta == 5000000
    assert config.text_config.mrope_section == [24, 20, 20]
    small = name in ("qwen3-vl-2b", "qwen3-vl-4b")
    levels = [5, 11, 17] if small else [8, 16, 24]
    assert config.vision_config.deepstack_visual_indexes == levels
    experts = getattr(config.text_config, "num_experts", None)
    active = getattr(config.text_config, "num_experts_per_tok", None)
    assert (experts, active) == ((128, 8) if "-a" in name else (None, None))


def test_the_hubs_names_are_understood():
    wanted = Qwen3VLConfig.named("qwen3-vl-30b-a3b")
    for name in ("Qwen/Qwen3-VL-30B-A3B-Thinking", "Qwen3-VL-30B-A3B-Instruct"):
        assert Qwen3VLConfig.named(name) == wanted


def test_an_unknown_size_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'qwen3-vl-7b' is not a size.* qwen3-vl-2b, qwen3-vl-4b"):
        Qwen3VLConfig.named("qwen3-vl-7b")


NO_SIZES = (0, -1, True, 2.0, "4", None, [4], 10**9, 10**30, float("nan"))


def refusal(values: dict, tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        Qwen3VLConfig.from_pretrained(tmp_path)
    return str(error.value)


SIZES = [
    *(("text_config", name) for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "vocab_size", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "decoder_sparse_step",
    )),
    *(("vision_config", name) for name in (
        "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size",
        "temporal_patch_size", "spatial_merge_size", "out_hidden_size", "num_position_embeddings",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("place", "name"), SIZES)
def test_sizes_that_make_no_sense_are_refused(place, name, tmp_path):
    for value in NO_SIZES:
        if value == 10**9 and name == "num_experts_per_tok":
            # Must not exceed the number of experts.
            continue
        values = tiny_config(**EXPERTS).to_dict()
        values[place][name] = value
        message = refusal(values, tmp_path)
        assert f"{place}: {name} is {json.loads(json.dumps(value))!r}; it must be" in message


@pytest.mark.parametrize(
    ("place", "name", "value", "named"),
    [
        ("text_config", "rope_theta", 0, "rope_theta is 0; it must be above 1"),
        ("text_config", "rope_theta", -1e6, "rope_theta is -1000000.0"),
        ("text_config", "rope_theta", "1e6", "rope_theta is '1e6'"),
        ("text_config", "rope_theta", float("nan"), "rope_theta is nan"),
        ("text_config", "rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("text_config", "rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06"),
        ("text_config", "rms_norm_eps", float("inf"), "rms_norm_eps is inf"),
        ("text_config", "rms_norm_eps", True, "rms_norm_eps is True"),
        ("text_config", "num_attention_heads", 3, "is not a multiple of num_key_value_heads 2"),
        ("text_config", "attention_bias", 0, "attention_bias is 0; it must be true or false"),
        ("text_config", "mlp_only_layers", [-1], r"mlp_only_layers\[0\] is -1"),
        ("text_config", "mlp_only_layers", "1", "mlp_only_layers is '1'"),
        ("text_config", "tie_word_embeddings", "yes", "tie_word_embeddings is 'yes'"),
        ("text_config", "rope_scaling", [1], r"text_config: rope_scaling is \[1\]"),
        ("text_config", "num_experts_per_tok", 7, "at most num_experts 6"),
        ("vision_config", "deepstack_visual_indexes", [-1], r"deepstack_visual_indexes\[0\] is -1"),
        ("vision_config", "deepstack_visual_indexes", 1, "deepstack_visual_indexes is 1"),
        ("vision_config", "deepstack_visual_indexes", [1, 0], "must ascend"),
        ("vision_config", "deepstack_visual_indexes", [1, 1], "must ascend"),
        ("vision_config", "deepstack_visual_indexes", [True], r"\[0\] is True"),
        ("vision_config", "hidden_act", "$\\frac{", "hidden_act is"),
        ("vision_config", "num_heads", 3, "must give a head width"),
        ("text_config", "num_experts_of_all", 8, "does not know the keys .*num_experts_of_all"),
        (None, "quantization_config", {"quant_method": "fp8"}, "_config is 'fp8'; quantized weigh"),
        (None, "quantization", {"bits": 4}, r"quantization is \{'bits': 4\}; .* load the model"),
        ("text_config", "quantization_config", {"bits": 4}, "^.*text_config of .*; quantized"),
        ("vision_config", "out_hidden_size", 8, "out_hidden_size 8 differs from .* 16"),
        ("vision_config", "deepstack_visual_indexes", [7], r"\[7\] lie outside the tower's 2 bl"),
        ("vision_config", "num_position_embeddings", 15, "15 is not a square"),
        (None, "image_token_id", 64, "image_token_id 64 lies outside .* 64"),
        (None, "model_type", "qwen2_vl", "model_type is 'qwen2_vl'"),
        (None, "tie_word_embeddings", 1, "tie_word_embeddings is 1; it must be true or false"),
        (None, "image_token_id", 1.0, "image_token_id is 1.0"),
        (None, "image_token_id", 61, "must be four different tokens"),
        (None, "text_config", [1], r"text_config is \[1\]; a section"),
        (None, "text_config", "x", "text_config is 'x'; a section"),
        (None, "vision_config", 3, "vision_config is 3; a section"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(place, name, value, named, tmp_path):
    values = tiny_config(**EXPERTS).to_dict()
    (values if place is None else values[place])[name] = value
    with pytest.raises(ValueError, match=named):
        raise ValueError(refusal(values, tmp_path))


@pytest.mark.parametrize(
    "section", [[2, 2], [4], [2, 1, 1, 0], [4, 0, 0], [-2, 3, 3], [1, 2, 1], "211", 4, [2.0, 1, 1]]
)
def test_rotary_sections_that_make_no_sense_are_refused(section, tmp_path):
    values = tiny_config().to_dict()
    values["text_config"]["rope_scaling"]["mrope_section"] = section
    assert "mrope_section" in refusal(values, tmp_path)


def test_two_rotary_bases_are_refused(tmp_path):
    values = tiny_config().to_dict()
    values["text_config"]["rope_scaling"]["rope_theta"] = 5.0
    assert "rope_theta is 10000.0 but in the rotary parameters 5.0" in refusal(values, tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"42", "holds 42"),
        (b"[]", r"holds \[\]"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"\0", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"model_type": "qwen3_vl", "model_type": "x"}', "'model_type' is there twice"),
    ],
)  # fmt: skip
def test_files_that_are_no_configuration_are_named(text, named, tmp_path):
    for name, read in (
        ("config.json", Qwen3VLConfig.from_pretrained),
        ("config.json", PI07Config.from_pretrained),
        ("generation_config.json", GenerationConfig.from_pretrained),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(RuntimeError, match=rf"/{name} .*{named}"):
            read(tmp_path)


TEXT = ("vlm_config", "gemma3_config", "text_config")
TOWER = ("vlm_config", "gemma3_config", "vision_config")


@pytest.mark.parametrize(
    ("section", "name"),
    [((), name) for name in (
        "chunk_size", "n_action_steps", "n_obs_steps", "history_interval", "max_state_dim",
        "max_action_dim", "prompt_max_length", "num_steps", "spacetime_layer_stride",
    )]
    + [(TEXT, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim")]
    + [(TOWER, name) for name in ("num_hidden_layers", "patch_size", "num_attention_heads")],
)  # fmt: skip
def test_sizes_of_policies_that_make_no_sense_are_refused(section, name, tmp_path):
    for value in (0, -1, True, 2.0, "4", [4], 10**9):
        values: dict = {}
        inner = values
        for part in section:
            inner = inner.setdefault(part, {})
        inner[name] = value
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"config\.json: ") as error:
            PI07Config.from_pretrained(tmp_path)
        assert f"{name} is {value!r}; it must be" in str(error.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"dataset_names": ["a", "a"]}, "dataset_names is"),
        ({"dataset_names": []}, "dataset_names is"),
        ({"dataset_names": "ab"}, "dataset_names is 'ab'"),
        ({"dataset_to_norm_index": {"a": 3}}, "dataset_to_norm_index of 'a' is 3"),
        ({"input_features": [1]}, r"input_features is \[1\]"),
        ({"input_features": {"state": {"type": "STATE", "shape": [0]}}}, r"shape\[0\] is 0"),
        ({"input_features": {"state": {"type": "STATE", "shape": [2, 3]}}}, "STATE has 1 dim"),
        ({"input_features": {"camera0": {"type": "VISUAL", "shape": [3]}}}, "VISUAL has 3 dims"),
        ({"input_features": {"state": {"type": "STATE", "shape": "ab"}}}, "shape is 'ab'"),
        ({"normalization_mapping": ["a"]}, r"normalization_mapping is \['a'\]"),
        ({"resize_imgs_with_padding": 448}, "resize_imgs_with_padding is 448"),
        ({"resize_imgs_with_padding": [448]}, r"resize_imgs_with_padding\[1\] is missing"),
        ({"vlm_config": 3}, "vlm_config is 3; a section"),
        ({"vlm_config": {"gemma3_config": {"text_config": {"rope_theta": 0}}}}, "rope_theta is 0"),
        ({"dropout": "0.1"}, "dropout is '0.1'"),
    ],
)  # fmt: skip
def test_settings_of_policies_that_make_no_sense_are_refused(values, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"config\.json: .*{named}"):
        PI07Config.from_pretrained(tmp_path)
