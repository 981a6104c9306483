"""Recomputation of parts of a layer, and the wrappers around a layer's forward.

A decoder layer keeps the bytes of `tests.support.kept_activations`, whose numbers are in
docs/memory.md.
"""

import gc
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.base.core import host_memory_stat_current_value

from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.vlm.modeling.flops import VLFlops
from paddle_vl.nn.linear import Linear
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing.qwen3_vl import token_rows
from tests.support.implementations import require_compiled
from tests.support.kept_activations import CHOICES, DenseLayer, documented_table
from tests.support.small_families import loss_of, pi07, qwen3_5_fresh
from tests.support.tiny import tiny_config, tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def materialized(make):
    model = make()
    model.materialize_all()
    return model


def adapted():
    model = tiny_model()
    model.add_lora(LoRAConfig(r=4, lora_dropout=0.2, target_modules="all-linear"))
    return model


def frozen_tower():
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = "visual" in name or "embed_tokens" in name
    return model


FAMILIES = {
    "qwen3_vl": tiny_model,
    "qwen3_vl experts": partial(tiny_model, **EXPERTS),
    "qwen3_vl adapters": adapted,
    "qwen3_vl frozen tower": frozen_tower,
    "qwen3_5": partial(materialized, qwen3_5_fresh),
    "pi07": partial(materialized, partial(pi07, "float32", False)),
}

HEAVY = ("qwen3_vl adapters", "qwen3_vl frozen tower", "qwen3_vl experts")


def used() -> int:
    gc.collect()
    return host_memory_stat_current_value("Allocated", 0)


def outcome(make, what: str) -> tuple[dict[str, np.ndarray], int, int]:
    """Loss and gradients, the bytes kept for the backward pass, and those left after it."""
    model = make()
    model.train()
    for chain in (model.vision_blocks, model.decoder_layers):
        recompute_layers(chain, what)
    paddle.seed(5)
    before = used()
    loss = loss_of(model)
    kept = used() - before
    loss.backward()
    found = {"loss": np.array(loss.numpy())}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = np.array(parameter.grad.numpy())
        parameter.clear_gradient(False)
    del loss
    return found, kept, used() - before


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.heavy] * (name in HEAVY)) for name in FAMILIES]
)
def test_parts_give_the_same_bits_and_leave_nothing(family):
    require_compiled()
    make = FAMILIES[family]
    # Tables that are made once.
    outcome(make, "none")
    wanted, most, usual = outcome(make, "none")
    kept = {"none": most}
    for what in ("act", "attention", "mlp"):
        found, kept[what], left = outcome(make, what)
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{what} {name}")
        assert left <= usual, (what, left)
    assert kept["none"] > kept["act"] > kept["attention"]
    assert kept["act"] > kept["mlp"]


@pytest.mark.parametrize("what", CHOICES)
def test_a_decoder_layer_keeps_the_bytes_of_the_formula(what):
    require_compiled()
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 128}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    kept, tokens = [], 64
    ids = token_rows([1] * tokens)
    for layers in (3, 4):
        model = tiny_model(num_hidden_layers=layers, **sizes)
        model.train()
        recompute_layers(model.decoder_layers, what)
        with paddle.no_grad():
            model(input_ids=ids)  # Makes the tables that stay.
        before = used()
        loss = model(input_ids=ids, labels=ids).loss
        kept.append(used() - before)
        del loss
    wanted = tokens * DenseLayer(64, 192, 8 * 8, 4 * 8, 8).kept_bytes(what, 4, on_gpu=False)
    assert kept[1] - kept[0] == wanted


def test_what_runs_again_are_the_counted_operations():
    config = tiny_config()
    text = config.text_config
    heads = [n * text.head_dim for n in (text.num_attention_heads, text.num_key_value_heads)]
    layer = DenseLayer(text.hidden_size, text.intermediate_size, *heads, text.head_dim)
    assert layer.flops_again("full") == 2 * VLFlops.layer_size(config, 0)


def test_the_documented_table_is_that_of_the_formula():
    text = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    assert documented_table() in text, documented_table()


def test_a_layer_without_the_part_is_refused():
    with pytest.raises(ValueError, match="Linear has no sublayer called self_attn or linear_attn"):
        recompute_layers([Linear(4, 4, bias=False)], "attention")


def noting(name: str, events: list[str]):
    def wrapper(forward, *inputs):
        events.append(name)
        return forward(*inputs)

    return wrapper


def linear_layer() -> Linear:
    paddle.seed(0)
    return Linear(4, 3, bias=True)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_sharding_is_around_recomputation(is_reversed):
    one, events = linear_layer(), []
    levels = [Level.RECOMPUTE, Level.SHARDING]
    for level in reversed(levels) if is_reversed else levels:
        wrap_layer(one, level, noting(level.name, events))
    x = paddle.ones([2, 4])
    np.testing.assert_array_equal(one(x).numpy(), linear_layer()(x).numpy())
    assert events == ["SHARDING", "RECOMPUTE"]


def test_a_wrapped_layer_is_what_it_was():
    one = paddle.nn.Sequential(linear_layer())
    names, parameters = list(one.state_dict()), one.parameters()
    wrap_layer(one[0], Level.SHARDING, noting("", []))
    assert isinstance(one[0], Linear)
    assert list(one.state_dict()) == names
    assert all(a is b for a, b in zip(one.parameters(), parameters, strict=True))
    assert "forward" not in vars(one[0])
    # Other layers of the class are unchanged.
    assert type(linear_layer()) is Linear
