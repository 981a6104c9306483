"""Dropout on the CPU by the compiled kernel.

Guarantees: entries are dropped with exactly the probability that is asked for, at the resolution of
32 bits, and the others scaled; the state of Paddle's generator decides which, and advances; they
are those that NumPy's generator draws; the gradient passes where values do; other inputs go to
Paddle's dropout.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.nn.cpu import compiled
from paddle_vl.nn.operations import dropout, use_kernels
from tests.support.implementations import implementation


@pytest.fixture(autouse=True)
def _kernels():
    with implementation("compiled"):
        yield


def kept_entries(size, p, words):
    """A byte for each entry, and for those that equal the first byte of `p` three more."""
    generator = np.random.SFC64()
    generator.state = {
        "bit_generator": "SFC64", "has_uint32": 0, "uinteger": 0,
        "state": {"state": np.array([*words, 1], dtype=np.uint64)},
    }  # fmt: skip
    generator.random_raw(12)
    first, rest = divmod(round(p * 2**32), 1 << 24)
    drawn = generator.random_raw(-(-size // 8)).view(np.uint8)[:size]
    is_kept, ties = drawn > first, np.flatnonzero(drawn == first)
    is_kept[ties] = generator.random_raw(ties.size) & np.uint64(0xFFFFFF) >= rest
    return is_kept


@pytest.mark.parametrize("p", [0.0005, 0.1, 0.25, 0.5, 0.9, 0.999, 2**-32])
def test_entries_are_dropped_with_their_probability_and_the_others_scaled(p):
    paddle.seed(3)
    words = compiled.dropout_seed()
    paddle.seed(3)
    y = dropout(paddle.ones([1000, 1001]), p).numpy()
    np.testing.assert_array_equal((y != 0).reshape([-1]), kept_entries(y.size, p, words))
    deviation = (p * (1 - p) / y.size) ** 0.5
    assert abs((y == 0).mean() - p) < 4 * deviation + 1e-9
    np.testing.assert_allclose(y[y != 0], 1 / (1 - p), rtol=1e-6)


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


def test_another_dtype_is_kept():
    x = paddle.ones([64, 64], dtype="float64")
    with use_kernels("cpu"):
        assert dropout.chosen(x, 0.5) == dropout.plain
        y = dropout(x, 0.5)
    assert set(np.unique(y.numpy())) == {0.0, 2.0}
