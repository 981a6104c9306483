"""Kernels on the CPU by oneDNN's C API, and the same results by Paddle's kernels without it."""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import paddle
import pytest

from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.nn.cpu import compiled, kernel_check, onednn
from paddle_vl.nn.cpu import kernels as cpu
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.examples import examples_of
from paddle_vl.nn.kernels import TABLE
from paddle_vl.nn.operations import dropout, geglu, gelu, layer_norm, swiglu
from tests.support.implementations import require_compiled

pytestmark = pytest.mark.usefixtures("uncompiled")

OPERATIONS = {of for of, kernels in TABLE.items() if "oneDNN" in [k.source for k in kernels]}


@pytest.fixture(params=["oneDNN", "without oneDNN"])
def either(request, monkeypatch):
    if request.param == "oneDNN":
        assert onednn.is_available(), "Paddle's CPU wheel contains oneDNN"
    else:
        monkeypatch.setattr(onednn, "is_available", lambda: False)


def draw(*shape, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return paddle.to_tensor(values.astype(np.float32))


@pytest.mark.usefixtures("either")
def test_values_and_gradients_are_those_of_the_plain_operations():
    for operation in OPERATIONS:
        for name, make in examples_of(operation).items():
            inputs = kernel_check.inputs_of(operation, make)
            wide = replace(inputs, args=(3.0 * inputs.args[0], *inputs.args[1:]))
            assert kernel_check.largest_error(operation, wide) < 1e-5, name


# The derivative of the tanh form is a polynomial in oneDNN.
EXACT = {
    "gelu_erf": (lambda x: x * 0.5 * (1 + math.erf(x / 2**0.5)), 1e-6),
    "gelu_tanh": (
        lambda x: 0.5 * x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
        2e-6,
    ),
    "swish": (lambda x: x / (1 + math.exp(-x)), 1e-6),
}


@pytest.mark.parametrize("name", EXACT)
def test_activations_are_exact_far_from_zero_and_near_it(name):
    function, tolerance = EXACT[name]
    values = np.concatenate([np.linspace(-30, 30, 601), np.geomspace(1e-30, 1e-3, 60)])
    x = paddle.to_tensor(values.astype(np.float32))
    y, ones, grad = paddle.empty_like(x), paddle.ones_like(x), paddle.empty_like(x)
    onednn.eltwise(name, len(values))(x.data_ptr(), y.data_ptr())
    run = onednn.eltwise(name, len(values), gradient=True)
    run(x.data_ptr(), ones.data_ptr(), grad.data_ptr())
    given = x.numpy().astype(np.float64)
    np.testing.assert_allclose(y.numpy(), [*map(function, given)], rtol=2e-5, atol=tolerance)
    step = 1e-5
    slope = [(function(v + step) - function(v - step)) / (2 * step) for v in given]
    np.testing.assert_allclose(grad.numpy(), slope, atol=tolerance)


@pytest.mark.usefixtures("either")
def test_broadcasts_are_those_of_numpy():
    x, column, factor = draw(6, 5, 7), draw(6, 5, 1, seed=1), draw(6, 5, 7, seed=2)
    matrix = draw(9, 9, seed=3)[2:7, 1:8]
    row = draw(6, 2, 9, seed=4)[:, 1:, 2:]
    a, c, f, m, r = (t.numpy() for t in (x, column, factor, matrix, row))
    found = {
        "minus times": (cpu.minus_column_times_(x.clone(), column, factor), (a - c) * f),
        "plus product": (cpu.plus_column_times_(x.clone(), column, factor), a + c * f),
        "plus matrix": (cpu.plus_(x.clone(), matrix), a + m),
        "plus row": (cpu.plus_(x.clone(), row), a + r),
    }
    for name, (result, wanted) in found.items():
        np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e30])
def test_softmax_is_that_of_the_formula(scale):
    x = draw(3, 5, 70, scale=scale)
    x[0, 0, 20:] = -1e30
    powers = np.exp(x.numpy().astype(np.float64) - x.numpy().max(axis=-1, keepdims=True))
    wanted = powers / powers.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(cpu.softmax_(x).numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
def test_layer_norm_gives_gradients_to_what_is_trained_alone(trained):
    tensors = {"x": draw(6, 10, scale=3.0), "weight": draw(10, seed=1), "bias": draw(10, seed=2)}
    grads = []
    for device in ("cpu", "plain"):
        given = {name: x.detach() for name, x in tensors.items()}
        given[trained].stop_gradient = False
        with use_kernels(device):
            (layer_norm(*given.values(), 1e-6) * draw(6, 10, seed=3)).sum().backward()
        grads.append({name: x.grad for name, x in given.items()})
    assert [name for name, grad in grads[0].items() if grad is not None] == [trained]
    found, wanted = (of[trained].numpy() for of in grads)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture
def _strides():
    """Views keep their strides, as they do unless a run turns that off."""
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    yield
    paddle.set_flags(kept)


OTHER_INPUTS = {
    "float64": lambda: draw(6, 8).astype("float64"),
    "strided": lambda: draw(8, 6).transpose([1, 0]),
    "empty": lambda: paddle.zeros([0, 8]),
}


@pytest.mark.usefixtures("_strides")
@pytest.mark.parametrize("kind", OTHER_INPUTS)
def test_other_inputs_go_to_paddles_kernels(kind):
    x = OTHER_INPUTS[kind]()
    with use_kernels("cpu"):
        for unit in (swiglu, geglu, gelu):
            assert unit.chosen(x) == unit.plain
            np.testing.assert_allclose(unit(x).numpy(), unit.plain(x).numpy(), rtol=1e-6)
            assert unit.chosen(draw(6, 8)) == getattr(cpu, unit.__name__)


def test_results_do_not_depend_on_the_number_of_threads():
    x, grad = draw(333, 70), draw(333, 70, seed=1)
    results = []
    for threads in (1, 2):
        configure_cpu_runtime(threads)
        given = x.detach()
        given.stop_gradient = False
        with use_kernels("cpu"):
            gelu(given, True).backward(grad)
        results.append(given.grad.numpy())
    np.testing.assert_array_equal(*results)


def test_threads_of_python_may_call_one_primitive():
    tensors = [draw(200, 50, seed=n) for n in range(8)]

    def call(x):
        y = paddle.empty_like(x)
        for _ in range(50):
            onednn.eltwise("gelu_tanh", 10_000)(x.data_ptr(), y.data_ptr())
        return y.numpy()

    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(tensors, pool.map(call, tensors), strict=True):
            np.testing.assert_allclose(found, gelu.plain(x, True).numpy(), atol=1e-6)


def test_primitives_of_many_shapes_are_let_go():
    destroyed, functions = [], onednn._library().functions
    kept = functions.dnnl_primitive_destroy

    class Functions:
        def __getattr__(self, name):
            return getattr(functions, name)

        def dnnl_primitive_destroy(self, handle):
            destroyed.append(handle.value)
            return kept(handle)

    onednn.eltwise.cache_clear()
    onednn._library().functions = Functions()
    try:
        for size in range(1, 400):
            onednn.eltwise("swish", size)
    finally:
        onednn._library().functions = functions
    assert len(destroyed) == 399 - onednn.eltwise.cache_info().maxsize


def test_a_paddle_without_the_library_is_said_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(paddle, "__file__", str(tmp_path / "__init__.py"))
    for cached in (onednn._library, onednn.is_available):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="paddle_vl"):
            assert not onednn.is_available()
            assert not onednn.is_available()
        (line,) = [record.getMessage() for record in caplog.records]
        assert "libdnnl.so.3" in line
        with use_kernels("cpu"):
            x = draw(4, 6)
            np.testing.assert_allclose(swiglu(x).numpy(), swiglu.plain(x).numpy(), rtol=1e-6)
            assert dropout(x, 0.5).shape == [4, 6]
    finally:
        for cached in (onednn._library, onednn.is_available):
            cached.cache_clear()


def test_a_call_that_the_library_refuses_is_an_error(monkeypatch):
    monkeypatch.setitem(onednn.ELTWISE, "nonsense", 0x7FFF)
    with pytest.raises(onednn.OneDNNError, match="dnnl_eltwise_forward_primitive_desc_create"):
        onednn.eltwise("nonsense", 4)


@pytest.mark.parametrize("kernels", ["oneDNN", "compiled"])
def test_the_default_dtype_does_not_matter(kernels):
    kept = paddle.get_default_dtype()
    if kernels == "compiled":
        require_compiled()
    paddle.set_default_dtype("float64")
    try:
        assert not kernel_check.differences()
    finally:
        paddle.set_default_dtype(kept)
        compiled.disable()
