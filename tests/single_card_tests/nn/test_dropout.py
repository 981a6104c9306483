"""Dropout on the CPU, of NumPy's generator and compiled: which entries, and how many."""

import numpy as np
import paddle
import pytest

from paddle_vl.nn.cpu import compiled
from paddle_vl.nn.cpu.kernels import dropout_threshold, kept_entries
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.operations import dropout
from tests.support.implementations import require_compiled


@pytest.fixture(autouse=True, params=["NumPy", "compiled"])
def _kernels(request):
    if request.param == "compiled":
        require_compiled()
    with use_kernels("cpu"):
        yield
    compiled.disable()


@pytest.mark.parametrize("p", [0.0005, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_entries_are_dropped_with_their_probability_and_the_others_scaled(p):
    paddle.seed(3)
    y = dropout(paddle.ones([1000, 1001]), p).numpy()
    deviation = (p * (1 - p) / y.size) ** 0.5
    assert abs((y == 0).mean() - p) < 4 * deviation
    np.testing.assert_allclose(y[y != 0], 1 / (1 - p), rtol=1e-6)


@pytest.mark.parametrize(("p", "wanted"), [(0.25, (64, 0)), (0.5, (128, 0)), (2**-32, (0, 1))])
def test_a_probability_is_a_byte_and_the_bytes_behind_it(p, wanted):
    assert dropout_threshold(p) == wanted


def test_bytes_that_are_equal_to_the_probability_are_decided_by_further_ones():
    # Without them 25 / 256 of the entries would be dropped, or 26 / 256.
    is_kept = kept_entries([4_000_000], 0.1, [1, 2, 3])
    assert abs((~is_kept).mean() - 0.1) < 5e-4
    assert min(abs(0.1 - 25 / 256), abs(0.1 - 26 / 256)) > 1e-3


def test_the_state_of_paddles_generator_decides_and_advances():
    x = paddle.ones([40, 50])
    paddle.seed(5)
    first, second = dropout(x, 0.3), dropout(x, 0.3)
    paddle.seed(5)
    assert (dropout(x, 0.3) == first).all()
    assert not (first == second).all()


def test_gradients_pass_where_values_do():
    x = paddle.ones([7, 9])
    x.stop_gradient = False
    y = dropout(x * 1.0, 0.4)
    (y * 3.0).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 3.0 * y.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("p", "wanted"), [(0.0, 1.0), (1.0, 0.0)])
def test_none_and_all_may_be_dropped(p, wanted):
    assert (dropout(paddle.ones([3, 4]), p) == wanted).all()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_keep_theirs(dtype):
    y = dropout(paddle.ones([64, 64], dtype=dtype), 0.5)
    assert y.dtype == getattr(paddle, dtype)
    assert set(np.unique(y.astype("float32").numpy())) == {0.0, 2.0}
