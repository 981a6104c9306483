"""Fused and separate projections, and low-rank adapters of linears."""

import numpy as np
import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.schema import LoRAConfig, TrainConfig
from paddle_vl.nn.linear import (
    Columns,
    FusedLinear,
    Linear,
    SeparateLinears,
    VocabHead,
    fused_columns,
)
from paddle_vl.nn.lora import LowRankSettings, initial_factor
from paddle_vl.testing.qwen3_vl import token_rows
from paddle_vl.train.freeze import freeze_parameters, treated_apart
from paddle_vl.train.optimizer import Optimizer
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import build
from tests.support.tiny import tiny_config, tiny_model

QUERIES = "model.language_model.layers.1.self_attn.q_proj.weight"


def fused_weights(model) -> list[paddle.Tensor]:
    return [parameter for parameter in model.parameters() if fused_columns(parameter)]


def gradients(model) -> dict[str, np.ndarray]:
    ids = token_rows([1, 2, 3, 4, 5], [6, 7, 8, 9, 1])
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        item.key: item.of_own(item.parameter.grad.numpy())
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }


def test_each_linear_draws_what_it_would_draw_by_itself():
    paddle.seed(1)
    layer = FusedLinear(6, [Columns("a", 4), Columns("b", 3)])
    paddle.seed(1)
    alone = [Linear(6, width, False).weight.numpy() for width in (4, 3)]
    np.testing.assert_array_equal(layer.weight.numpy(), np.concatenate(alone, axis=1))


def test_separating_changes_neither_outputs_nor_gradients_nor_values():
    fused, apart = tiny_model(), tiny_model()
    apart.separate(fused_weights(apart))
    assert fused_weights(fused)
    assert not fused_weights(apart)
    wanted, values = gradients(fused), fused.hf_state_dict()
    for key, array in apart.hf_state_dict().items():
        np.testing.assert_array_equal(array, values[key], err_msg=key)
    for key, found in gradients(apart).items():
        np.testing.assert_allclose(found, wanted[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_a_model_without_values_yet_is_separated_too():
    paddle.seed(5)
    wanted = Qwen3VLForConditionalGeneration.from_config(tiny_config()).hf_state_dict()
    paddle.seed(5)
    model = Qwen3VLForConditionalGeneration.from_config(tiny_config(), materialize=False)
    model.separate(fused_weights(model)[:3])
    assert len(fused_weights(model)) == 3
    model.materialize_all()
    for key, array in model.hf_state_dict().items():
        np.testing.assert_array_equal(array, wanted[key], err_msg=key)


def test_an_adapter_stands_beside_a_linear_of_its_own_in_that_layer_alone():
    model = tiny_model()
    model.add_lora(LoRAConfig(r=2, target_modules=["*.layers.1.*.q_proj"]))
    apart = [
        isinstance(layer, SeparateLinears)
        for decoder_layer in model.decoder_layers
        for layer in (decoder_layer.self_attn.qkv_proj, decoder_layer.mlp.gate_up_proj)
    ]
    assert apart == [False, False, True, False, False, False]
    assert set(model.adapter.targets) == {QUERIES.removesuffix(".weight")}


def test_linears_of_one_weight_have_one_rate_and_one_decay_and_are_frozen_together():
    named, train = list(tiny_model().hf_named_parameters()), TrainConfig(output_dir="o")
    with pytest.raises(ValueError, match=r"q_proj.* have different settings of their weight decay"):
        Optimizer(named, train, {QUERIES})
    with pytest.raises(ValueError, match="have different settings of their learning rate"):
        Optimizer(named, train, set(), rate_factors={QUERIES: 0.5})
    with pytest.raises(ValueError, match="they are trained together or not at all"):
        Optimizer([(n, p) for n, p in named if n != QUERIES], train, set())
    trained = {name for name, _ in named} - {QUERIES}
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj.*separate them first"):
        freeze_parameters(named, trained)
    assert len(treated_apart(named, trained.__contains__)) == 1


@pytest.mark.parametrize(
    ("setting", "is_frozen"),
    [
        ("model.freeze=['*layers.1.self_attn.q_proj*']", True),
        ("train.weight_decay_exclude=['*layers.1.self_attn.q_proj*']", False),
        ("train.part_learning_rates={'*layers.1.self_attn.q_proj*': 1.0e-20}", True),
    ],
)
def test_a_run_has_apart_what_a_setting_treats_alone(setting, is_frozen, tmp_path):
    trainer = build(write_tiny_run(tmp_path), tmp_path / "out", "train.max_steps=2", setting)
    model = trainer.runner.model
    before = model.hf_state_dict()
    layers = [decoder_layer.self_attn.qkv_proj for decoder_layer in model.decoder_layers]
    assert [isinstance(layer, SeparateLinears) for layer in layers] == [
        number == 1 for number in range(len(layers))
    ]
    assert trainer.run() is None
    after = model.hf_state_dict()
    assert np.array_equal(after[QUERIES], before[QUERIES]) == is_frozen
    keys = QUERIES.replace("q_proj", "k_proj")
    assert not np.array_equal(after[keys], before[keys])
    saved = read_checkpoint_headers(tmp_path / "out" / "checkpoint-2", "optimizer")
    assert (f"{QUERIES}/moment1" in saved) == (not setting.startswith("model.freeze"))
    assert saved[f"{keys}/moment1"].shape == before[keys].shape[::-1]


LAYERS = {
    "linear": lambda: Linear(5, 7, bias=False, init_std=1.0),
    "with a bias": lambda: Linear(5, 7, bias=True, init_std=1.0),
    "head": lambda: VocabHead(5, 7, init_std=1.0),
}


def adapted(kind: str, dropout: float = 0.0, is_dora: bool = False):
    """A layer with a random adapter of rank 2, and its factors as arrays."""
    paddle.seed(0)
    layer = LAYERS[kind]()
    layer.add_low_rank(LowRankSettings(2, 1.5, dropout, is_dora))
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=shape).astype(np.float32) for shape in ((5, 2), (2, 7))]
    layer.lora.A.set_value(factors[0])
    layer.lora.B.set_value(factors[1])
    return layer, *factors


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


@pytest.mark.parametrize("kind", LAYERS)
def test_output_is_the_linears_and_the_scaled_product_and_stays_when_merged(kind, x):
    layer, a, b = adapted(kind)
    lora, layer.lora = layer.lora, None
    base = layer(paddle.to_tensor(x)).numpy()
    layer.lora = lora
    found = layer(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(found, base + 1.5 * x @ a @ b, rtol=1e-5, atol=1e-5)
    layer.merge_low_rank()
    assert layer.lora is None
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_dora_scales_the_columns_and_stays_when_merged(kind, drops, x, monkeypatch):
    """With dropout the base's own output is not scaled, but its change with the dropped input."""
    layer, a, b = adapted(kind, dropout=0.5, is_dora=True)
    magnitude = np.linspace(0.5, 2.0, 7, dtype=np.float32)
    layer.lora.magnitude.set_value(magnitude)
    layer.training = layer.lora.training = drops
    kept = x * np.array([2, 0, 2, 2, 0], np.float32) if drops else x
    monkeypatch.setattr(layer.lora, "dropped", lambda _: paddle.to_tensor(kept))
    weight = layer.weight.numpy().T if kind == "head" else layer.weight.numpy()
    scales = magnitude / np.linalg.norm(weight + 1.5 * a @ b, axis=0)
    expected = x @ weight + (scales - 1) * (kept @ weight) + scales * 1.5 * (kept @ a @ b)
    if getattr(layer, "bias", None) is not None:
        layer.bias.set_value(magnitude)
        expected += magnitude
    found = layer(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if not drops:
        layer.merge_low_rank()
        np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), found, rtol=1e-5, atol=1e-5)


def test_a_fresh_adapter_adds_zero_and_only_b_learns_at_first(x):
    paddle.seed(0)
    layer = Linear(5, 7, bias=False)
    base = layer(paddle.to_tensor(x)).numpy()
    layer.add_low_rank(LowRankSettings(2, 1.5))
    layer.lora.A.set_value(initial_factor(np.random.default_rng(0), (5, 2), True, "peft"))
    y = layer(paddle.to_tensor(x))
    np.testing.assert_array_equal(y.numpy(), base)
    y.sum().backward()
    assert np.abs(layer.lora.B.grad.numpy()).min() > 0
    assert np.abs(layer.lora.A.grad.numpy()).max() == 0


def test_dropout_zeroes_and_scales_the_input_in_training_only(x):
    layer, a, b = adapted("linear", dropout=0.5)
    rows = paddle.to_tensor(np.repeat(x[:1], 400, axis=0))
    lora = layer.lora
    layer.eval()
    whole = (1.5 * x[:1] @ a @ b)[0]
    np.testing.assert_allclose(lora(rows).numpy()[0], whole, rtol=1e-5)
    layer.train()
    found = lora(rows).numpy()
    # Each row is the doubled input under one of 2^5 masks.
    masks = np.array([[int(bit) for bit in f"{number:05b}"] for number in range(32)])
    possible = 1.5 * (2 * masks * x[:1]) @ a @ b
    distance = np.abs(found[:, None] - possible[None]).max(axis=-1)
    assert (distance.min(axis=1) < 1e-4).all()
    assert len(set(distance.argmin(axis=1))) > 20


@pytest.mark.parametrize(
    ("is_a", "law", "std"), [(True, "peft", 0.125 / 3**0.5), (True, "openpi", 0.01),
                             (False, "peft", 0.0), (False, "openpi", 0.01)],
)  # fmt: skip
def test_initial_values_of_both_laws(is_a, law, std):
    values = initial_factor(np.random.default_rng(0), (64, 500), is_a, law)
    assert values.std() == pytest.approx(std, rel=0.02)
    assert law != "peft" or np.abs(values).max() <= 0.125
