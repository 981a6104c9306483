"""Configurations of Qwen3-VL, Qwen3.5 and Qwen4-Exp, and damaged ones of policies. Keys and shapes
of models are those of test_golden.py."""

import json
from math import prod

import paddle
import pytest

from paddle_vl import (
    PI07Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen4ExpConfig,
    Qwen4ExpForConditionalGeneration,
)
from paddle_vl.config.families import family_of, model_values
from paddle_vl.families.qwen3_5.sizes import SIZE_NAMES as SIZES_3_5
from paddle_vl.families.qwen3_vl.sizes import SIZE_NAMES
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.testing import (
    EXPERTS_3_5,
    tiny_qwen3_5_config,
    tiny_qwen3_vl_config,
    tiny_qwen4_exp_config,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.tiny import GOLDEN, tiny_config

KINDS = ["dense_tied", "dense_untied", "moe"]
MADE = [
    tiny_qwen3_vl_config(), tiny_qwen3_vl_config(**EXPERTS),
    tiny_qwen3_5_config(), tiny_qwen3_5_config(**EXPERTS_3_5), tiny_qwen4_exp_config(),
]  # fmt: skip
DENSE = (MADE[0], MADE[2])


def refusal(config_class, values: dict, tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        config_class.from_pretrained(tmp_path)
    return str(error.value)


# Files.


@pytest.mark.parametrize(
    ("family", "config_class", "kind"),
    [
        *(("qwen_vl", Qwen3VLConfig, kind) for kind in KINDS),
        *(("qwen3_5", Qwen3_5Config, kind) for kind in KINDS),
        *(("qwen4_exp", Qwen4ExpConfig, kind) for kind in ("full", "sparse", "ple")),
    ],
)
def test_both_dialects_give_the_same_and_what_is_written_is_read_again(
    family, config_class, kind, tmp_path
):
    """Of Qwen3-VL the hub's is written."""
    folder = GOLDEN / family / "models" / kind
    files = folder / "config.json", folder / "config.hub_style.json"
    config, hub = map(config_class.from_pretrained, files)
    new, published = (json.loads(file.read_text()) for file in files)
    # Kept for other software; only the hub's file says that there are such layers.
    layers, written = "mtp_num_hidden_layers", hub.to_dict()
    assert written["text_config"].pop(layers, 0) == published["text_config"].get(layers, 0)
    assert written == config.to_dict()
    config.save_pretrained(tmp_path)
    assert config_class.from_pretrained(tmp_path) == config
    if family != "qwen_vl":
        text = new["text_config"]
        types = [each.replace("indexed", "full") for each in text["layer_types"]]
        assert written["text_config"]["layer_types"] == types
        assert written["text_config"]["rope_parameters"] == text["rope_parameters"]
        if family == "qwen4_exp":
            # What transformers writes of the decoder, but for those types.
            alike = set(text) - {"layer_types", "dtype", "use_cache"}
            assert alike == set(written["text_config"]) - {"layer_types"}
            assert all(written["text_config"][key] == text[key] for key in alike)
        return
    for key in ("model_type", "architectures"):
        assert written[key] == published[key]
    for part in ("text_config", "vision_config"):
        for key in set(published[part]) & set(written[part]) - {"tie_word_embeddings"}:
            assert written[part][key] == published[part][key], key
    assert not {"rope_parameters", "num_local_experts"} & set(written["text_config"])


@pytest.mark.parametrize("made", MADE)
def test_what_hf_writes_without_effect_is_read_over(made):
    values = made.to_dict() | {"torch_dtype": "bfloat16", "id2label": {"0": "a"}}
    values["quantization_config"] = None
    values["text_config"] |= {"use_cache": True, "pruned_heads": {}, "dtype": "bfloat16"}
    values["vision_config"] |= {"return_dict": True}
    if made is MADE[4]:
        values["text_config"] |= {"number_of_conv_states": 1, "full_attention_interval": 1}
    if made is MADE[3]:
        values["text_config"] |= {
            "norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2,
            "intermediate_size": 100,
        }  # fmt: skip
    assert type(made).from_dict(values) == made


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
    for name, config_class in (
        ("config.json", Qwen3VLConfig),
        ("config.json", PI07Config),
        ("generation_config.json", GenerationConfig),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(RuntimeError, match=rf"/{name} .*{named}"):
            config_class.from_pretrained(tmp_path)


# Rotary settings.

ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
SECTION = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 7.0}
MISSING = "text_config: rope_theta is missing"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"rope_theta": 7.0}, 7.0),
        ({"rope_scaling": SECTION}, 7.0),
        ({"rope_parameters": SECTION, "rope_theta": None}, 7.0),
        ({"rope_parameters": SECTION, "rope_scaling": SECTION}, 7.0),
        ({"rope_scaling": SECTION | {"rope_theta": None}, "rope_theta": 7.0}, 7.0),
        ({}, MISSING),
        ({"rope_theta": None}, MISSING),
        ({"rope_parameters": SECTION | {"rope_theta": None}}, MISSING),
        ({"rope_parameters": SECTION, "rope_theta": 8.0}, "rope_theta is 8.0 but .* 7.0"),
        # transformers 5.24 takes rope_scaling then, whole.
        (
            {"rope_parameters": SECTION, "rope_scaling": SECTION | {"rope_theta": 8.0}},
            "rope_parameters .* and rope_scaling .* differ",
        ),
    ],
)
@pytest.mark.parametrize("made", MADE)
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


@pytest.mark.parametrize("made", DENSE)
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


@pytest.mark.parametrize(
    "section", [[2, 2], [4], [2, 1, 1, 0], [4, 0, 0], [-2, 3, 3], [1, 2, 1], "211", 4, [2.0, 1, 1]]
)
def test_rotary_sections_that_make_no_sense_are_refused(section, tmp_path):
    values = tiny_config().to_dict()
    values["text_config"]["rope_scaling"]["mrope_section"] = section
    assert "mrope_section" in refusal(Qwen3VLConfig, values, tmp_path)


def test_the_interval_of_full_attention_counts_only_without_a_list():
    def full(number: int, **text) -> list[int]:
        text_config = Qwen3_5Config.from_dict(values_3_5(**text)).text_config
        return [i for i in range(number) if text_config.is_full(i)]

    assert full(8, layer_types=None, num_hidden_layers=8) == [3, 7]
    fewer = {"layer_types": None, "num_hidden_layers": 8, "full_attention_interval": 3}
    assert full(8, **fewer) == [2, 5]
    assert full(3, full_attention_interval=2) == [1]


# Published sizes: numbers of parameters; of Qwen3.5 in billions, vision tower included.

COUNTS = {
    "qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064, "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
}  # fmt: skip
BILLIONS = {
    "qwen3.5-0.8b": 0.853, "qwen3.5-2b": 2.213, "qwen3.5-4b": 4.539, "qwen3.5-9b": 9.410,
    "qwen3.5-27b": 27.36, "qwen3.5-35b-a3b": 35.11, "qwen3.5-122b-a10b": 122.6,
    "qwen3.5-397b-a17b": 396.8, "qwen3.8-2.4t-a95b": 2420.3, "qwen3.8-flash-next": 177.392830576,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SIZE_NAMES, *BILLIONS])
def test_a_size_has_the_published_count_allocates_nothing_and_survives_its_file(name, tmp_path):
    is_new = name in BILLIONS
    config_class, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    if is_new:
        config_class, model_class = Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if name == "qwen3.8-flash-next":
        config_class, model_class = Qwen4ExpConfig, Qwen4ExpForConditionalGeneration
    config = config_class.named(name)
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path) == config
    with paddle.LazyGuard():
        model = model_class(config)
    assert not any(parameter._is_initialized() for parameter in model.parameters())
    if is_new:
        assert model.num_parameters() / 1e9 == pytest.approx(BILLIONS[name], rel=0.001)
        return
    assert model.num_parameters() == sum(map(prod, model.whole_shapes().values())) == COUNTS[name]
    text = config.text_config
    found = text.max_position_embeddings, text.rope_theta, text.mrope_section
    assert found == (262144, 5000000, [24, 20, 20])
    levels = [5, 11, 17] if name in ("qwen3-vl-2b", "qwen3-vl-4b") else [8, 16, 24]
    assert config.vision_config.deepstack_visual_indexes == levels
    experts = [getattr(text, name, None) for name in ("num_experts", "num_experts_per_tok")]
    assert experts == ([128, 8] if "-a" in name else [None, None])


def test_names_of_the_hub_and_later_generations_are_understood_and_others_refused():
    for config_class, size, names in (
        (Qwen3VLConfig, "qwen3-vl-30b-a3b",
         ("Qwen/Qwen3-VL-30B-A3B-Thinking", "Qwen3-VL-30B-A3B-Instruct")),
        (Qwen3_5Config, "qwen3.5-27b", ("Qwen/Qwen3.8-27B",)),
        (Qwen3_5Config, "qwen3.5-35b-a3b", ("Qwen3.6-35B-A3B",)),
        (Qwen4ExpConfig, "qwen3.8-flash-next", ("Qwen/Qwen3.8-Flash-Next",)),
    ):  # fmt: skip
        for name in names:
            assert config_class.named(name) == config_class.named(size)
    with pytest.raises(ValueError, match="'qwen3-vl-7b' is not a size.* qwen3-vl-2b, qwen3-vl-4b"):
        Qwen3VLConfig.named("qwen3-vl-7b")
    with pytest.raises(ValueError, match=f"'qwen3.5-5b' is not a size.*{SIZES_3_5[0]}"):
        Qwen3_5Config.named("qwen3.5-5b")
    of_runs = {"qwen3.8-27b": "Qwen3.5", "Qwen/Qwen3.8-Flash-Next": "Qwen4-Exp"}
    for name, family in of_runs.items():
        assert family_of(model_values(name)).name == family


# Values that make no sense.

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
TEXT = ("vlm_config", "gemma3_config", "text_config")
TOWER = ("vlm_config", "gemma3_config", "vision_config")
SIZES_OF_POLICIES = [
    *(((), name) for name in (
        "chunk_size", "n_action_steps", "n_obs_steps", "history_interval", "max_state_dim",
        "max_action_dim", "prompt_max_length", "num_steps", "spacetime_layer_stride",
    )),
    *((TEXT, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim")),
    *((TOWER, name) for name in ("num_hidden_layers", "patch_size", "num_attention_heads")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config_class", "base", "sections", "name"),
    [
        *((Qwen3VLConfig, tiny_config(**EXPERTS).to_dict, (part,), name) for part, name in SIZES),
        *((PI07Config, dict, sections, name) for sections, name in SIZES_OF_POLICIES),
    ],
)
def test_sizes_that_make_no_sense_are_refused(config_class, base, sections, name, tmp_path):
    for value in (0, -1, True, 2.0, "4", [4], 10**9):
        if value == 10**9 and name == "num_experts_per_tok":
            # Must not exceed the number of experts.
            continue
        values = inner = base()
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[name] = value
        assert f"{name} is {value!r}; it must be" in refusal(config_class, values, tmp_path)


def of_exp(**text) -> dict:
    made = tiny_qwen4_exp_config().to_dict()
    made["text_config"] |= text
    return made


def values_3_5(**text) -> dict:
    made = tiny_qwen3_5_config().to_dict()
    made["text_config"] |= text
    return made


INDEXER = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget")]
INDEXER.append("indexer_compress_ratio")
REFUSED: dict[str, list[tuple[str, dict, str]]] = {
    "Qwen3-VL": [
        ("text_config", {"rope_theta": 0}, "rope_theta is 0; it must be above 1"),
        ("text_config", {"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ("text_config", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ("text_config", {"num_attention_heads": 3}, "is not a multiple of num_key_value_heads 2"),
        ("text_config", {"attention_bias": 0}, "attention_bias is 0; it must be true or false"),
        ("text_config", {"mlp_only_layers": [-1]}, r"mlp_only_layers\[0\] is -1"),
        ("text_config", {"mlp_only_layers": "1"}, "mlp_only_layers is '1'"),
        ("text_config", {"mlp_only_layers": [1, 3]}, r"\[3\] lie outside the decoder's 3 layers"),
        ("text_config", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ("text_config", {"rope_scaling": [1]}, r"text_config: rope_scaling is \[1\]"),
        ("text_config", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; .* num_experts 6"),
        ("text_config", {"num_local_experts": 4}, "num_experts is 6 but num_local_experts 4"),
        ("text_config", {"num_shared_experts": 8}, "does not know the keys .*num_shared_experts"),
        ("text_config", {"quantization_config": {"bits": 4}}, "text_config of .*; quantized"),
        ("vision_config", {"deepstack_visual_indexes": 1}, "deepstack_visual_indexes is 1"),
        ("vision_config", {"deepstack_visual_indexes": [1, 0]}, "must ascend"),
        ("vision_config", {"deepstack_visual_indexes": [True]}, r"\[0\] is True"),
        ("vision_config", {"deepstack_visual_indexes": [7]}, r"\[7\] lie outside the tower's 2 bl"),
        ("vision_config", {"hidden_act": "$\\frac{"}, "hidden_act is"),
        ("vision_config", {"num_heads": 3}, "must give a head width"),
        ("vision_config", {"out_hidden_size": 8}, "out_hidden_size 8 differs from .* 16"),
        ("vision_config", {"num_position_embeddings": 15}, "15 is not a square"),
        ("", {"quantization_config": {"quant_method": "fp8"}}, "_config is 'fp8'; quantized weigh"),
        ("", {"quantization": {"bits": 4}}, r"quantization is \{'bits': 4\}; .* load the model"),
        ("", {"image_token_id": 64}, "image_token_id 64 lies outside .* 64"),
        ("", {"image_token_id": 61}, "must be four different tokens"),
        ("", {"model_type": "qwen2_vl"}, "model_type is 'qwen2_vl'"),
        ("", {"text_config": [1]}, r"text_config is \[1\]; a section"),
    ],
    "Qwen3.5": [
        ("text_config", {"attn_output_gate": False}, "attn_output_gate is False; only True"),
        ("text_config", {"output_gate_type": "tanh"}, "'tanh'; only 'swish' or 'silu'"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("text_config", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("text_config", {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings is True"),
        ("text_config", {"layer_types": ["linear_attention"] * 2}, "layer_types lists 2 layers"),
        ("text_config", {"layer_types": ["linear_attention", "mamba", "full_attention"]}, "mamba"),
        ("text_config", {"layer_types": None, "full_attention_interval": 0}, "interval is 0"),
        ("text_config", {"layer_types": [["linear_attention"]]}, r"layer_types\[0\] is"),
        ("text_config", {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ("text_config", {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multi"),
        ("text_config", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple"),
        ("text_config", {"partial_rotary_factor": 0.25}, "factor is 0.25 but in the rotary"),
        ("text_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("text_config", {"rope_parameters": None, "rope_type": "llama3"}, "'llama3'"),
        ("text_config", {"rope_parameters": {"factor": 4.0}}, "rotary parameters have factor"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, "interleaved False"),
        ("text_config", {"rope_parameters": SECTION | {"mrope_section": [1] * 3}}, "sums to 3"),
        ("text_config", {"mamba_ssm_dtype": "bfloat16"}, "'bfloat16'; only 'float32'"),
        ("text_config", {"sliding": 3}, "does not know the keys .'sliding'."),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' .* only 'axial'"),
        ("vision_config", {"deepstack_visual_indexes": [0]}, "deepstack_visual_indexes is .0."),
        ("", {"model_type": "qwen3_vl"}, "model_type is 'qwen3_vl'"),
        ("", {"model_type": "qwen3_5_text"}, "'qwen3_5_text', a decoder alone"),
    ],
    "Qwen4-Exp": [
        ("text_config", {"indexer_kv_heads": 2}, "indexer_kv_heads is 2; it must be .* 1"),
        ("text_config", {"indexer_budget": 5}, "indexer_budget 5 is not .*_compress_ratio 2"),
        ("text_config", {"indexer_head_dim": 4}, "indexer_head_dim 4 is below the 8 rotated"),
        ("text_config", {"indexer_n_heads": 0}, "indexer_n_heads is 0; it must be at least 1"),
        ("text_config", {"indexer_budget": None}, "indexer_budget must be given beside .*ratio 2"),
        ("text_config", dict.fromkeys(INDEXER), "layer_types has attention.*n_heads, .*missing"),
        ("text_config", {"ple_layer_ids": [0, 1]}, r"ple_layer_ids \[0\] lie outside .* 1 to 3"),
        ("text_config", {"ple_layer_ids": [4]}, r"ple_layer_ids \[4\] lie outside .* 1 to 3"),
        ("text_config", {"ple_layer_ids": [2]}, r"ple_layer_ids \[2\] are attention layers"),
        ("text_config", {"ple_embed_dim": 18}, "ple_embed_dim 18 is not a multiple of the 4 hash"),
        ("text_config", {"ple_embed_dim": 0}, "ple_embed_dim is 0; it must be at least 1"),
        ("text_config", {"ngram_size": 1}, "ngram_size is 1; it must be at least 2"),
        ("text_config", {"ple_conv_kernel_size": 0}, "ple_conv_kernel_size is 0"),
        ("text_config", {"split_ngram_parts": 0}, "split_ngram_parts is 0; it must be at least 1"),
        ("text_config", {"ngram_vocab_size_base": 0}, "ngram_vocab_size_base is 0"),
        ("text_config", {"make_ngram_vocab_size_divisible_by": 0}, "divisible_by is 0"),
        ("text_config", {"eos_token_id": None}, "eos_token_id is None; .* token below .* 64"),
        ("text_config", {"eos_token_id": []}, r"eos_token_id is \[\]; .* token below .* 64"),
        ("text_config", {"eos_token_id": 64}, "eos_token_id is 64; .* token below .* 64"),
        ("text_config", {"pad_token_id": 64}, "pad_token_id 64 lies outside vocab_size 64"),
        ("text_config", {"hc_count": 1}, "hc_count is 1; it must be at least 2"),
        ("text_config", {"output_gate_type": "swish"}, "'swish'; only 'silu' or 'sigmoid'"),
        ("text_config", {"layer_types": ["mamba"] * 3}, "mamba"),
        ("text_config", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; .* num_experts 6"),
        ("text_config", {"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ("text_config", {"ple_embedding_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'; only"),
        ("text_config", {"rope_parameters": None, "mrope_section": [11, 11, 10]}, "rope_theta is"),
        ("text_config", {"sliding": 3}, "does not know the keys .'sliding'."),
        ("vision_config", {"out_hidden_size": 8}, "out_hidden_size 8 differs from .* 16"),
        ("", {"quantization_config": {"quant_method": "fp8"}}, "_config is 'fp8'; quantized weigh"),
        ("", {"model_type": "qwen4_exp_text"}, "'qwen4_exp_text', a decoder alone"),
        ("", {"model_type": "qwen3_5_moe"}, "'qwen3_5_moe'; 'qwen4_exp' is needed"),
    ],
    "pi07": [
        ("", {"dataset_names": ["a", "a"]}, "dataset_names is"),
        ("", {"dataset_names": []}, "dataset_names is"),
        ("", {"dataset_to_norm_index": {"a": 3}}, "dataset_to_norm_index of 'a' is 3"),
        ("", {"input_features": [1]}, r"input_features is \[1\]"),
        ("input_features", {"state": {"type": "STATE", "shape": [0]}}, r"shape\[0\] is 0"),
        ("input_features", {"state": {"type": "STATE", "shape": [2, 3]}}, "STATE has 1 dim"),
        ("input_features", {"camera0": {"type": "VISUAL", "shape": [3]}}, "VISUAL has 3 dims"),
        ("", {"normalization_mapping": ["a"]}, r"normalization_mapping is \['a'\]"),
        ("", {"resize_imgs_with_padding": 448}, "resize_imgs_with_padding is 448"),
        ("", {"resize_imgs_with_padding": [448]}, r"resize_imgs_with_padding\[1\] is missing"),
        ("", {"vlm_config": 3}, "vlm_config is 3; a section"),
        ("vlm_config", {"gemma3_config": {"text_config": {"rope_theta": 0}}}, "rope_theta is 0"),
        ("", {"dropout": "0.1"}, "dropout is '0.1'"),
    ],
}
BASES = {
    "Qwen3-VL": (Qwen3VLConfig, tiny_config(**EXPERTS).to_dict),
    "Qwen3.5": (Qwen3_5Config, values_3_5),
    "Qwen4-Exp": (Qwen4ExpConfig, of_exp),
    "pi07": (PI07Config, dict),
}


@pytest.mark.parametrize(
    ("family", "section", "given", "message"),
    [(family, *row) for family, rows in REFUSED.items() for row in rows],
)
def test_values_that_make_no_sense_are_refused(family, section, given, message, tmp_path):
    config_class, base = BASES[family]
    values = base()
    (values.setdefault(section, {}) if section else values).update(given)
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal(config_class, values, tmp_path))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ({"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}, {}),
        ({"layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention"]}, {}),
        ({"ple_layer_ids": [3, 1, 3]}, {}),
        (
            {"ple_layer_ids": None, "eos_token_id": None},
            {"ple_layer_ids": [], "ngram_layers": [], "ngram_boundary": None},
        ),
        ({"ple_embed_dim": None}, {"ple_embed_dim": 16, "ngram_width": 4}),
        ({"eos_token_id": [7, 5]}, {"ngram_boundary": 7}),
        ({"output_gate_type": None}, {"output_gate": "silu"}),
        ({"pad_token_id": 9}, {"padding_idx": 9}),
    ],
)
def test_spellings_of_qwen4_exp_mean_the_same(text, read):
    """Also the type that early exports have."""
    wanted = {"ple_layer_ids": [1, 3], "ngram_layers": [0, 2], "ngram_boundary": 5} | read
    for early in (False, True):
        values = of_exp(**text)
        if early:
            values["model_type"] = "qwen3_8_flash_next"
            values["text_config"]["model_type"] = "qwen3_8_flash_next_text"
            values["vision_config"]["model_type"] = "qwen3_8_flash_next"
        found = Qwen4ExpConfig.from_dict(values)
        assert found.to_dict()["model_type"] == "qwen4_exp"
        assert [found.text_config.is_full(i) for i in range(3)] == [False, True, False]
        assert {name: getattr(found.text_config, name) for name in wanted} == wanted


def test_a_dense_model_knows_no_experts(tmp_path):
    values = tiny_config().to_dict()
    values["text_config"]["num_experts"] = 4
    assert "does not know the keys ['num_experts']" in refusal(Qwen3VLConfig, values, tmp_path)
