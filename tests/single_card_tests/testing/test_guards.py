"""The guard against host reads, the recorder of them, and emulated bfloat16."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor

from paddle_vl.testing import emulated_bfloat16, forbid_host_reads, record_host_reads

READS = {
    "numpy": lambda x: x.numpy(),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "asarray": np.asarray,
    "array": np.array,
    "dlpack": np.from_dlpack,
    "bool": bool,
    "int": int,
    "float": float,
    "index": lambda x: [0, 1, 2][x.astype("int64")],
    "if": lambda x: 1 if x else 0,
    "print": str,
    "format": lambda x: f"{x}",
}
SHAPES = {
    "nonzero": lambda x: paddle.nonzero(x),
    "method": lambda x: x.nonzero(),
    "masked_select": lambda x: paddle.masked_select(x, x > 0),
    "bool index": lambda x: x[x > 0],
    "bool in a tuple": lambda x: x[(x > 0,)],
    "bool assignment": lambda x: x.__setitem__(x > 0, 3.0),
    "unique": lambda x: paddle.unique(x),
    "unique_consecutive": lambda x: paddle.unique_consecutive(x),
    "repeats": lambda x: paddle.repeat_interleave(x, x.astype("int64")),
}
PLAIN = {
    "slice": lambda x: x[:1],
    "gather": lambda x: paddle.index_select(x, paddle.to_tensor([0])),
    "shape": lambda x: (x.shape, len(x), x.size),
    "assignment": lambda x: x.__setitem__(slice(0, 1), 2.0),
    "product": lambda x: (x * 2).sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_values_raises(name):
    x = paddle.ones([])
    with forbid_host_reads(), pytest.raises(AssertionError, match="host read: Tensor"):
        READS[name](x)
    assert READS[name](x) is not None
    with record_host_reads() as reads:
        READS[name](x)
    assert len(reads) == 1
    assert reads[0].rpartition(":")[0].endswith("test_guards.py")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_values_raises_if_asked(name):
    x = paddle.to_tensor([1.0, 0.0, 2.0])
    with forbid_host_reads(shapes=True), pytest.raises(AssertionError, match="depends on values"):
        SHAPES[name](x.clone())
    with forbid_host_reads():
        SHAPES[name](x.clone())


@pytest.mark.parametrize("name", PLAIN)
def test_everything_else_passes(name):
    with forbid_host_reads(shapes=True):
        PLAIN[name](paddle.ones([3]))


def test_a_gradient_may_be_computed_but_not_read():
    x = paddle.ones([3])
    x.stop_gradient = False
    with forbid_host_reads(shapes=True):
        (x[:2] ** 2).sum().backward()
        with pytest.raises(AssertionError, match="host read"):
            x.grad.numpy()
    assert x.grad.tolist() == [2, 2, 0]


def test_blocks_nest_and_leave_everything_as_it_was():
    names = ("numpy", "__getitem__", "__bool__", "item")
    before = [getattr(paddle.Tensor, name) for name in names]
    with forbid_host_reads():
        with forbid_host_reads(shapes=True):
            pass
        with pytest.raises(AssertionError, match="host read"):
            paddle.ones([1]).item()
        paddle.nonzero(paddle.ones([1]))
    assert [getattr(paddle.Tensor, name) for name in names] == before


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
