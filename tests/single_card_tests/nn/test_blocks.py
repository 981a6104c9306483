"""Norms, rotary embedding, linears, activations, dropout and losses against their formulas.

The oracle is the formula in a few differentiable operations, independent of hand-written backward
passes.
"""

from contextlib import contextmanager

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_vl.nn.attention import (
    RotaryTables,
    apply_rotary,
    interleaved_mrope_axis,
)
from paddle_vl.nn.head_loss import next_token_targets, num_targets, summed_cross_entropy
from paddle_vl.nn.linear import Linear, linear
from paddle_vl.nn.operations import (
    RowDropout,
    activation,
    add_rms_norm,
    geglu,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
    rms_quotient,
    swiglu,
)
from tests.support.implementations import implementation
from tests.support.tolerance import BLOCK


@pytest.fixture(params=[True, False], ids=["strides", "no-strides"])
def _stride_kernels(request):
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": request.param})
    yield
    paddle.set_flags(kept)


@pytest.fixture(params=["compiled", "plain", "gpu"])
def _kernels(request):
    with implementation(request.param):
        yield


def draw(*shape, seed=0):
    value = np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)
    return paddle.to_tensor(value, stop_gradient=False)


def assert_same(function, formula, *inputs):
    """Equal values and equal gradients of a weighted sum, for every input."""
    found, wanted = function(*inputs), formula(*inputs)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=BLOCK, rtol=BLOCK)
    weight = draw(*found.shape, seed=9).detach()
    pairs = [paddle.grad((out * weight).sum(), inputs) for out in (found, wanted)]
    for mine, plain in zip(*pairs, strict=True):
        np.testing.assert_allclose(mine.numpy(), plain.numpy(), atol=1e-5, rtol=1e-5)


def root(x):
    return (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def centred(x):
    return x - x.mean(-1, keepdim=True)


def tanh_gelu(x):
    return 0.5 * x * (1 + ((2 / np.pi) ** 0.5 * (x + 0.044715 * x.pow(3))).tanh())


def sum_and_norm(combine):
    """The norm after a residual, and its formula; both results pass gradients."""

    def formula(x, residual, weight):
        return combine(x + residual, weight * (x + residual) / root(x + residual))

    return lambda x, r, w: combine(*add_rms_norm(x, r, w, 1e-6)), formula


# The block, its formula, and the shapes of the inputs behind the first; None for that of the first.
FORMULAS = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: w * x / root(x), (8,)),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b, 1e-6),
        lambda x, w, b: w * centred(x) / root(centred(x)) + b,
        (8,), (8,),
    ),
    "gemma_rms_norm": (
        lambda x, w: gemma_rms_norm(x, w, 1e-6), lambda x, w: (1 + w) * x / root(x), (8,)
    ),
    "rms_quotient": (lambda x: rms_quotient(x, 1e-6), lambda x: x / root(x)),
    "product of sum and norm": (*sum_and_norm(lambda x, y: x * y), None, (8,)),
    "sum of sum and norm": (*sum_and_norm(lambda x, y: x + 2 * y), None, (8,)),
    "geglu": (geglu, lambda gate, up: tanh_gelu(gate) * up, None),
    "geglu of halves": (geglu, lambda x: tanh_gelu(x[..., :4]) * x[..., 4:]),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, None),
    "swiglu of halves": (swiglu, lambda x: F.silu(x[..., :4]) * x[..., 4:]),
    "linear": (linear, lambda x, w, b: paddle.matmul(x, w) + b, (8, 5), (5,)),
}  # fmt: skip


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("leading", [(6,), (2, 3)], ids=["rows", "more dims"])
def test_a_block_equals_its_formula(name, leading):
    block, formula, *shapes = FORMULAS[name]
    # A residual has token rows.
    leading = (6,) if "sum" in name else leading
    others = [draw(*(shape or (*leading, 8)), seed=n) for n, shape in enumerate(shapes, 1)]
    assert_same(block, formula, draw(*leading, 8), *others)


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
@pytest.mark.parametrize("norm", [rms_norm, gemma_rms_norm], ids=["rms", "gemma"])
def test_norms_of_no_rows_have_no_rows_and_a_gradient_of_zero(norm):
    weight = draw(8)
    out = norm(draw(0, 8), weight, 1e-6)
    assert out.shape == [0, 8]
    out.sum().backward()
    assert not weight.grad.numpy().any()


TABLES = RotaryTables(draw(6, 8).detach(), draw(6, 8, seed=1).detach())
# Of the inputs those that train; the others are frozen, and get no gradient.
FROZEN = {
    "norm after a residual": (lambda x, r, w: add_rms_norm(x, r, w, 1e-6), "x"),
    "weight of a norm": (lambda x, _, w: rms_norm(x, w, 1e-6), "x"),
    "input of a norm": (lambda x, _, w: rms_norm(x, w, 1e-6), "w"),
    "half of geglu": (lambda x, r, _: geglu(x, r), "x"),
    "weight of a linear": (lambda x, r, _: linear(x, r.T, None), "x"),
    "input of a linear": (lambda x, r, _: linear(x, r.T, None), "r"),
    "queries": (lambda x, r, w: apply_rotary(x.unsqueeze(1), r.unsqueeze(1), TABLES)[1], "r"),
}


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(name):
    run, trained = FROZEN[name]
    inputs = {"x": draw(6, 8), "r": draw(6, 8, seed=1), "w": draw(8)}
    for key, tensor in inputs.items():
        tensor.stop_gradient = key != trained
    paddle.utils.flatten(run(*inputs.values()))[-1].sum().backward()
    assert [key for key, tensor in inputs.items() if tensor.grad is not None] == [trained]


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
def test_biases_sum_the_rows_of_an_input_without_gradient():
    x, layer, bias = draw(6, 8).detach(), Linear(8, 5, bias=True), draw(8, seed=1)
    layer(x).sum().backward()
    layer_norm(x, draw(8), bias, 1e-6).sum().backward()
    assert layer.bias.grad.numpy().tolist() == [6.0] * 5
    assert bias.grad.numpy().tolist() == [6.0] * 8


def rotate(x, cos, sin):
    rotated = paddle.concat([-x[..., 4:], x[..., :4]], axis=-1)
    return x * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)


# The kernel in C multiplies and adds at once.
@pytest.mark.parametrize("_kernels", ["plain", "gpu"], indirect=True)
@pytest.mark.usefixtures("_stride_kernels", "_kernels")
@pytest.mark.parametrize("rows", [(2, 5), (7,), (0,)], ids=["batch", "rows", "empty"])
def test_rotary_equals_rotate_half_to_the_bit(rows):
    cos, sin = draw(*rows, 8).detach(), draw(*rows, 8, seed=1).detach()
    tables = RotaryTables(cos, sin)
    q, k = draw(*rows, 3, 8), draw(*rows, 2, 8)
    q_grad, k_grad = draw(*rows, 3, 8, seed=2).detach(), draw(*rows, 2, 8, seed=3).detach()
    found = apply_rotary(q, k, tables)
    paddle.autograd.backward(list(found), [q_grad, k_grad])
    tables.prepare([3, 2])
    for x, out, again, grad in zip(
        (q, k), found, apply_rotary(q, k, tables), (q_grad, k_grad), strict=True
    ):
        assert np.array_equal(out.numpy(), again.numpy())
        assert np.array_equal(out.numpy(), rotate(x, cos, sin).numpy())
        # The transpose: rotate_half of the product with the sines, subtracted.
        wide = grad * sin.unsqueeze(-2)
        back = paddle.concat([-wide[..., 4:], wide[..., :4]], axis=-1)
        assert np.array_equal(x.grad.numpy(), (grad * cos.unsqueeze(-2) - back).numpy())


def test_interleaved_axes_of_the_specification():
    assert "".join("THW"[axis] for axis in interleaved_mrope_axis(8, [4, 2, 2])) == "THWTHWTT"
    published = "".join("THW"[axis] for axis in interleaved_mrope_axis(64, [24, 20, 20]))
    assert published == "THW" * 20 + "TTTT"


def test_the_tanh_and_the_exact_gelu_are_told_apart():
    x = draw(100)
    difference = activation("gelu")(x) - activation("gelu_pytorch_tanh")(x)
    assert 1e-5 < float(difference.abs().max()) < 1e-2
    with pytest.raises(ValueError, match="'relu6'.*gelu_pytorch_tanh"):
        activation("relu6")


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
def test_rows_are_dropped_in_training_only():
    x, layer, entered = paddle.ones([6, 8]), RowDropout(0.25), []

    @contextmanager
    def random_state():
        entered.append(1)
        yield

    # Numbers are drawn in the context that is set.
    layer.random = random_state
    paddle.seed(5)
    found = layer(x)
    paddle.seed(5)
    assert (found == layer(x)).all()
    assert set(np.unique(found.numpy())) == {np.float32(0.0), np.float32(1 / 0.75)}
    layer.eval()
    assert (layer(x) == x).all()
    assert entered == [1, 1]
    assert (RowDropout(0.0)(x) == x).all()


def test_targets_are_labels_moved_left_within_each_sample():
    labels = paddle.to_tensor([[1, 2, 3], [4, -100, 6]])
    assert next_token_targets(labels).numpy().tolist() == [2, 3, -100, -100, 6, -100]


@pytest.mark.usefixtures("_stride_kernels", "_kernels")
def test_loss_is_the_sum_over_targets_and_their_count():
    logits, targets = draw(5, 7), paddle.to_tensor([3, -100, 0, -100, 6])

    def formula(logits):
        chosen = F.log_softmax(logits)[paddle.to_tensor([0, 2, 4]), paddle.to_tensor([3, 0, 6])]
        return -chosen.sum()

    assert_same(lambda x: summed_cross_entropy(x, targets), formula, logits)
    assert float(num_targets(targets)) == 3.0
