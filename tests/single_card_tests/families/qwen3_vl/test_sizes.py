"""The published sizes by name.

Guarantees: each size builds without allocating a parameter, has exactly the checkpoint format's
keys and shapes, listed here independently of the model, and the published number of parameters; the
hub's names are accepted.
"""

from math import prod

import paddle
import pytest

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.sizes import SIZE_NAMES, size_values

VOCAB, HEAD = 151936, 128
# layers, width, MLP, query heads, key heads, experts' width, tower (depth, width, MLP), tied
SHAPES = {
    "qwen3-vl-2b": (28, 2048, 6144, 16, 8, None, (24, 1024, 4096), True),
    "qwen3-vl-4b": (36, 2560, 9728, 32, 8, None, (24, 1024, 4096), True),
    "qwen3-vl-8b": (36, 4096, 12288, 32, 8, None, (27, 1152, 4304), False),
    "qwen3-vl-32b": (64, 5120, 25600, 64, 8, None, (27, 1152, 4304), False),
    "qwen3-vl-30b-a3b": (48, 2048, 6144, 32, 4, 768, (27, 1152, 4304), False),
    "qwen3-vl-235b-a22b": (94, 4096, 12288, 64, 4, 1536, (27, 1152, 4304), False),
}
COUNTS = {
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
}


def expected_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the checkpoint; linears are `[out, in]`."""
    layers, width, mlp, heads, key_heads, expert, (depth, h, inner), tied = SHAPES[name]
    shapes = {}

    def linear(key: str, d_in: int, d_out: int) -> None:
        shapes[f"{key}.weight"], shapes[f"{key}.bias"] = (d_out, d_in), (d_out,)

    def norm(key: str, size: int) -> None:
        shapes[f"{key}.weight"], shapes[f"{key}.bias"] = (size,), (size,)

    visual = "model.visual."
    shapes[f"{visual}patch_embed.proj.weight"] = (h, 3, 2, 16, 16)
    shapes[f"{visual}patch_embed.proj.bias"] = (h,)
    shapes[f"{visual}pos_embed.weight"] = (2304, h)
    for i in range(depth):
        block = f"{visual}blocks.{i}."
        norm(f"{block}norm1", h)
        norm(f"{block}norm2", h)
        linear(f"{block}attn.qkv", h, 3 * h)
        linear(f"{block}attn.proj", h, h)
        linear(f"{block}mlp.linear_fc1", h, inner)
        linear(f"{block}mlp.linear_fc2", inner, h)
    mergers = {"merger": h} | {f"deepstack_merger_list.{i}": 4 * h for i in range(3)}
    for merger, norm_size in mergers.items():
        norm(f"{visual}{merger}.norm", norm_size)
        linear(f"{visual}{merger}.linear_fc1", 4 * h, 4 * h)
        linear(f"{visual}{merger}.linear_fc2", 4 * h, width)
    shapes["model.language_model.embed_tokens.weight"] = (VOCAB, width)
    shapes["model.language_model.norm.weight"] = (width,)
    for i in range(layers):
        layer = f"model.language_model.layers.{i}."
        shapes[f"{layer}input_layernorm.weight"] = (width,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (width,)
        shapes[f"{layer}self_attn.q_proj.weight"] = (heads * HEAD, width)
        shapes[f"{layer}self_attn.k_proj.weight"] = (key_heads * HEAD, width)
        shapes[f"{layer}self_attn.v_proj.weight"] = (key_heads * HEAD, width)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, heads * HEAD)
        shapes[f"{layer}self_attn.q_norm.weight"] = (HEAD,)
        shapes[f"{layer}self_attn.k_norm.weight"] = (HEAD,)
        if expert is None:
            shapes[f"{layer}mlp.gate_proj.weight"] = (mlp, width)
            shapes[f"{layer}mlp.up_proj.weight"] = (mlp, width)
            shapes[f"{layer}mlp.down_proj.weight"] = (width, mlp)
        else:
            shapes[f"{layer}mlp.gate.weight"] = (128, width)
            shapes[f"{layer}mlp.experts.gate_up_proj"] = (128, width, 2 * expert)
            shapes[f"{layer}mlp.experts.down_proj"] = (128, expert, width)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, width)
    return shapes


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_a_size_has_the_published_keys_shapes_and_count_and_allocates_nothing(name):
    with paddle.LazyGuard():
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.named(name))
    wanted = expected_shapes(name)
    assert {key: tuple(shape) for key, shape in model.whole_shapes().items()} == wanted
    assert sum(map(prod, wanted.values())) == COUNTS[name]
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


def test_changing_what_was_given_changes_no_size():
    size_values("qwen3-vl-2b")["text_config"]["hidden_size"] = 1
    assert size_values("qwen3-vl-2b")["text_config"]["hidden_size"] == 2048
