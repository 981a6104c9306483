"""Low-rank adapters of linears.

Guarantees: the output is the linear's plus `scaling * dropout(x) A B`; a fresh adapter adds zero;
dropout, with its upscaling, acts on the input and only in training; merging keeps the output, for
both weight layouts and a linear with a bias.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.nn.linear import Linear, VocabHead
from paddle_vl.nn.lora import LowRankSettings, initial_a

LAYERS = {
    "linear": lambda: Linear(5, 7, bias=False, init_std=1.0),
    "with a bias": lambda: Linear(5, 7, bias=True, init_std=1.0),
    "head": lambda: VocabHead(5, 7, init_std=1.0),
}


def adapted(kind: str, dropout: float = 0.0):
    """A layer with a random adapter of rank 2, and its factors as arrays."""
    paddle.seed(0)
    layer = LAYERS[kind]()
    layer.add_low_rank(LowRankSettings(2, 1.5, dropout))
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=shape).astype(np.float32) for shape in ((5, 2), (2, 7))]
    layer.lora.A.set_value(factors[0])
    layer.lora.B.set_value(factors[1])
    return layer, *factors


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


@pytest.mark.parametrize("kind", LAYERS)
def test_output_is_the_linears_and_the_scaled_product(kind, x):
    layer, a, b = adapted(kind)
    lora, layer.lora = layer.lora, None
    base = layer(paddle.to_tensor(x)).numpy()
    layer.lora = lora
    found = layer(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(found, base + 1.5 * x @ a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_merged_weight_gives_the_same_output(kind, x):
    layer, *_ = adapted(kind)
    expected = layer(paddle.to_tensor(x)).numpy()
    layer.merge_low_rank()
    assert layer.lora is None
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_fresh_adapter_adds_zero_and_only_b_learns_at_first(x):
    paddle.seed(0)
    layer = Linear(5, 7, bias=False)
    base = layer(paddle.to_tensor(x)).numpy()
    layer.add_low_rank(LowRankSettings(2, 1.5))
    layer.lora.A.set_value(initial_a(np.random.default_rng(0), (5, 2)))
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


def test_initial_values_are_uniform_within_the_root_of_the_width():
    values = initial_a(np.random.default_rng(0), (64, 500))
    assert np.abs(values).max() <= 0.125
    assert values.std() == pytest.approx(0.125 / 3**0.5, rel=0.02)
