"""`emulated_bfloat16` rounds as a GPU does: float32 arithmetic, one rounding per operator."""

import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor

from paddle_vl.testing import emulated_bfloat16


def narrow(*sizes: int) -> Tensor:
    x = paddle.randn(list(sizes)).astype("bfloat16")
    x.stop_gradient = False
    return x


def rounded(x: Tensor) -> Tensor:
    return x.astype("bfloat16").astype("float32")


def equal(x: Tensor, y: Tensor) -> bool:
    return bool((x.astype("float32") == y.astype("float32")).all())


def test_products_are_rounded_once_forward_and_backward():
    x, w, grad = narrow(3, 64), narrow(64, 5), paddle.randn([3, 5]).astype("bfloat16")
    with emulated_bfloat16():
        y = paddle.matmul(x, w)
        y.backward(grad)
        assert equal(x @ w, y)
    wide = [v.detach().astype("float32") for v in (x, w, grad)]
    assert y.dtype == x.grad.dtype == paddle.bfloat16
    assert equal(y, rounded(wide[0] @ wide[1]))
    assert equal(x.grad, rounded(wide[2] @ wide[1].t()))
    assert equal(w.grad, rounded(wide[0].t() @ wide[2]))


def test_every_operator_of_a_chain_rounds():
    x = narrow(2, 8).detach()
    with emulated_bfloat16():
        found = F.softmax(x * x + 1.0)
    wide = x.astype("float32")
    assert equal(found, rounded(F.softmax(rounded(rounded(wide * wide) + 1.0))))


def test_float32_beside_bfloat16_gives_float32():
    x, w = narrow(4).detach(), paddle.randn([4])
    with emulated_bfloat16():
        assert (x * w).dtype == (w + x).dtype == paddle.multiply(x, w).dtype == paddle.float32
        assert (x * paddle.ones([], dtype="bfloat16")).dtype == (2.0 * x).dtype == paddle.bfloat16


def test_operators_in_place_write_into_their_first_tensor():
    x = narrow(4).detach()
    wanted, same = rounded(x.astype("float32") + 3.0), x
    with emulated_bfloat16():
        x.add_(paddle.full([4], 3.0, dtype="bfloat16"))
    assert same is x
    assert equal(x, wanted)


def test_paddle_is_as_before_behind_the_block():
    with pytest.raises(ZeroDivisionError), emulated_bfloat16():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="bfloat16"):
        paddle.matmul(narrow(2, 2), narrow(2, 2))
