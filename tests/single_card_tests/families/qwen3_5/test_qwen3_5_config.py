"""Configuration of Qwen3.5.

Guarantees: the files of the hub and of transformers 5.x give the same model, and so does what is
written; published sizes have their numbers of parameters; every setting that the family does not
have is refused by key and value.
"""

import json

import paddle
import pytest

from paddle_vl import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from paddle_vl.families.qwen3_5.sizes import SIZE_NAMES
from paddle_vl.testing import EXPERTS_3_5, tiny_qwen3_5_config, tiny_qwen3_vl_config
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.tiny import GOLDEN

MODELS = GOLDEN / "qwen3_5" / "models"
KINDS = ["dense_tied", "dense_untied", "moe"]


def values(**text) -> dict:
    made = tiny_qwen3_5_config().to_dict()
    made["text_config"] |= text
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_both_dialects_give_the_same_and_what_is_written_is_read_again(kind, tmp_path):
    config = Qwen3_5Config.from_pretrained(MODELS / kind / "config.json")
    hub = Qwen3_5Config.from_pretrained(MODELS / kind / "config.hub_style.json")
    # Kept for other software; only the hub's file says that there are such layers.
    layers = json.loads((MODELS / kind / "config.hub_style.json").read_text())["text_config"]
    layers = layers["mtp_num_hidden_layers"]
    written = hub.to_dict()
    assert written["text_config"].pop("mtp_num_hidden_layers", 0) == layers
    assert written == config.to_dict()
    config.save_pretrained(tmp_path)
    assert Qwen3_5Config.from_pretrained(tmp_path) == config
    theirs = json.loads((MODELS / kind / "config.json").read_text())["text_config"]
    ours = config.to_dict()["text_config"]
    assert ours["layer_types"] == theirs["layer_types"]
    assert ours["rope_parameters"] == theirs["rope_parameters"]


def test_rotary_settings_are_read_flat_and_from_a_scaling_section():
    wanted = tiny_qwen3_5_config()
    section = values()["text_config"]["rope_parameters"]
    flat = values(rope_parameters=None, **section)
    assert Qwen3_5Config.from_dict(flat) == wanted
    theta = {"rope_theta": section["rope_theta"]}
    rest = {name: value for name, value in section.items() if name not in theta}
    for parts in ({"rope_scaling": section}, {"rope_scaling": rest, **theta}):
        assert Qwen3_5Config.from_dict(values(rope_parameters=None, **parts)) == wanted


ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
SECTION = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 7.0}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"rope_theta": 7.0}, 7.0),
        ({"rope_scaling": SECTION}, 7.0),
        ({"rope_parameters": SECTION, "rope_theta": None}, 7.0),
        ({"rope_parameters": SECTION, "rope_scaling": SECTION}, 7.0),
        ({"rope_scaling": SECTION | {"rope_theta": None}, "rope_theta": 7.0}, 7.0),
        ({}, "text_config: rope_theta is missing"),
        ({"rope_theta": None}, "text_config: rope_theta is missing"),
        ({"rope_parameters": SECTION | {"rope_theta": None}}, "text_config: rope_theta is missing"),
        ({"rope_parameters": SECTION, "rope_theta": 8.0}, "rope_theta is 8.0 but .* 7.0"),
        # transformers 5.24 takes rope_scaling then, whole.
        (
            {"rope_parameters": SECTION, "rope_scaling": SECTION | {"rope_theta": 8.0}},
            "rope_parameters .* and rope_scaling .* differ",
        ),
    ],
)
@pytest.mark.parametrize("made", [
    tiny_qwen3_vl_config(), tiny_qwen3_vl_config(**EXPERTS),
    tiny_qwen3_5_config(), tiny_qwen3_5_config(**EXPERTS_3_5),
])  # fmt: skip
def test_the_rotary_base_is_read_in_every_spelling_and_never_assumed(made, given, read):
    """Without it transformers 5.24 takes 500000 for Qwen3-VL and 10000 for Qwen3.5."""
    values = made.to_dict()
    text = values["text_config"]
    other = text.get("rope_parameters", text.get("rope_scaling"))
    other = {name: value for name, value in other.items() if name not in SECTION}
    rest = {name: value for name, value in text.items() if name not in ROTARY}
    values["text_config"] = rest | {"mrope_section": [2, 1, 1], **other} | given
    if isinstance(read, str):
        with pytest.raises(ValueError, match=read):
            type(made).from_dict(values)
    else:
        assert type(made).from_dict(values).text_config.rope_theta == read


@pytest.mark.parametrize("made", [tiny_qwen3_vl_config(), tiny_qwen3_5_config()])
@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 66.0},
        {"rope_parameters": {"rope_theta": 66.0, "rope_type": "axial"}},
        # transformers 5.24 makes axial of it.
        {"rope_parameters": {"rope_theta": 66.0, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 66.0}},
    ],
)
def test_the_rotary_base_of_a_tower_is_read_and_written(made, given):
    """Read back, what is written gives transformers 5.24 the same tower."""
    values = made.to_dict()
    for name in ROTARY:
        values["vision_config"].pop(name, None)
    values["vision_config"] |= given
    written = type(made).from_dict(values).to_dict()["vision_config"]
    assert (written | written.get("rope_parameters", {}))["rope_theta"] == 66.0


def test_the_interval_counts_only_without_a_list():
    made = values(layer_types=None, num_hidden_layers=8)
    full = [i for i in range(8) if Qwen3_5Config.from_dict(made).text_config.is_full(i)]
    assert full == [3, 7]
    made["text_config"]["full_attention_interval"] = 3
    full = [i for i in range(8) if Qwen3_5Config.from_dict(made).text_config.is_full(i)]
    assert full == [2, 5]
    made = values(full_attention_interval=2)
    assert [Qwen3_5Config.from_dict(made).text_config.is_full(i) for i in range(3)] == [
        False, True, False,
    ]  # fmt: skip


# Billions of parameters, vision tower included.
SIZES = {
    "qwen3.5-0.8b": 0.853, "qwen3.5-2b": 2.213, "qwen3.5-4b": 4.539, "qwen3.5-9b": 9.410,
    "qwen3.5-27b": 27.36, "qwen3.5-35b-a3b": 35.11, "qwen3.5-122b-a10b": 122.6,
    "qwen3.5-397b-a17b": 396.8,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_about_their_number_of_parameters(name):
    with paddle.LazyGuard():
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config.named(name))
    assert model.num_parameters() / 1e9 == pytest.approx(SIZES[name], rel=0.001)


def test_later_generations_and_names_of_the_hub_are_sizes_too():
    assert Qwen3_5Config.named("Qwen/Qwen3.8-27B") == Qwen3_5Config.named("qwen3.5-27b")
    assert Qwen3_5Config.named("Qwen3.6-35B-A3B") == Qwen3_5Config.named("qwen3.5-35b-a3b")
    with pytest.raises(ValueError, match=f"'qwen3.5-5b' is not a size.*{SIZE_NAMES[0]}"):
        Qwen3_5Config.named("qwen3.5-5b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; only True"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; only 'swish' or 'silu'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types lists 2 layers"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, "'mamba'"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25 but in the rotary"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type is 'linear'"),
        ({"rope_parameters": None, "rope_type": "llama3"}, "rope_type is 'llama3'"),
        ({"rope_parameters": [1]}, "text_config: rope_parameters is .1."),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2 but in"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; only 'float32'"),
        ({"layer_types": [["linear_attention"]]}, r"layer_types\[0\] is"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"rope_parameters": {"factor": 4.0}}, "rotary parameters have factor"),
        ({"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved False"),
        (
            {"rope_parameters": {"mrope_section": [1, 1, 1], "rope_theta": 1e4}},
            "mrope_section .* sums to 3",
        ),
        ({"sliding": 3}, "does not know the keys .'sliding'."),
    ],
)  # fmt: skip
def test_what_the_family_has_not_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Qwen3_5Config.from_dict(values(**text))


def test_other_models_and_deepstack_are_refused():
    with pytest.raises(ValueError, match="model_type is 'qwen3_vl'"):
        Qwen3_5Config.from_dict(values() | {"model_type": "qwen3_vl"})
    with pytest.raises(ValueError, match="'qwen3_5_text', a decoder alone"):
        Qwen3_5Config.from_dict({"model_type": "qwen3_5_text"})
    made = values()
    made["vision_config"]["rope_parameters"] = {"rope_type": "yarn"}
    with pytest.raises(ValueError, match="vision_config: rope_type is 'yarn' .* only 'axial'"):
        Qwen3_5Config.from_dict(made)
    made = values()
    made["vision_config"]["deepstack_visual_indexes"] = [0]
    with pytest.raises(ValueError, match="deepstack_visual_indexes is .0."):
        Qwen3_5Config.from_dict(made)


def test_keys_without_effect_in_a_mixture_of_experts_are_read_over():
    made = tiny_qwen3_5_config(**EXPERTS_3_5).to_dict() | {"quantization_config": None}
    made["text_config"] |= {
        "norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2,
        "intermediate_size": 100,
    }  # fmt: skip
    assert Qwen3_5Config.from_dict(made) == tiny_qwen3_5_config(**EXPERTS_3_5)
    assert all(Qwen3_5Config.from_dict(made).text_config.has_experts(i) for i in range(3))
