"""The stand-ins of Paddle's GPU kernels, and how this package calls the kernels.

Guarantees: stand-ins have the parameters of the installed Paddle's functions; they refuse what the
kernels refuse; norms whose kernel does not take a case run in plain operators; rotary tables are
rounded once per forward pass; experts' matrices are copied for further blocks of few rows only;
many rows are multiplied once each, after one read of their numbers.

Kernels of a GPU that the models of both families call.

Guarantees: a forward and backward pass of each model calls each of Paddle's fused kernels as often
as its layers need it, and one that a layer leaves out is noticed. The kernels are the stand-ins of
`tests/support/gpu_stubs`.
"""

import inspect
from collections import Counter
from functools import partial

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
import pytest

from paddle_vl.nn.attention import RotaryTables, apply_rotary
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.experts import GroupSizes, grouped_linear
from paddle_vl.nn.operations import layer_norm, rms_norm
from paddle_vl.testing import (
    forbid_host_reads,
    record_host_reads,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.gpu_stubs.contract import ContractError, halves_are
from tests.support.gpu_stubs.installed import CALLS, STANDINS
from tests.support.gpu_stubs.pretended import pretended_gpu


@pytest.fixture(autouse=True)
def _kernels():
    with use_kernels("gpu"):
        yield


def draw(*shape, dtype="float32"):
    x = paddle.randn(list(shape), dtype=dtype)
    x.stop_gradient = False
    return x


@pytest.mark.parametrize("standin", STANDINS, ids=lambda standin: standin.name)
def test_a_standin_has_the_parameters_of_paddles_function(standin):
    assert callable(standin.own)
    if inspect.isbuiltin(standin.own):
        return
    own, mine = inspect.signature(standin.own), inspect.signature(standin.standin)
    assert list(own.parameters) == list(mine.parameters)
    for name, parameter in own.parameters.items():
        assert parameter.default == mine.parameters[name].default, name


REFUSED = {
    "a weight of another dtype": lambda: F.rms_norm(draw(4, 8), [8], draw(8, dtype="float64")),
    "no rows to normalize": lambda: F.rms_norm(draw(0, 8), [8], draw(8)),
    "a weight of another width": lambda: F.rms_norm(draw(4, 8), [8], draw(4)),
    "a residual of another shape": lambda: incubate.fused_rms_norm(
        draw(4, 8).detach(), draw(8), None, 1e-6, 1, None, draw(2, 8)
    ),
    "a gradient of sum and norm": lambda: incubate.fused_rms_norm(
        draw(4, 8), draw(8), None, 1e-6, 1, None, draw(4, 8)
    ),
    "a large epsilon": lambda: F.layer_norm(draw(4, 8), [8], draw(8), draw(8), 0.01),
    "tables of another dtype": lambda: incubate.fused_rotary_position_embedding(
        draw(1, 4, 2, 8),
        sin=paddle.rand([4, 8]).astype("float64"),
        cos=paddle.rand([4, 8]).astype("float64"),
        use_neox_rotary_style=False,
    ),
    "tables of fewer rows": lambda: incubate.fused_rotary_position_embedding(
        draw(1, 4, 2, 8),
        sin=paddle.rand([3, 8]),
        cos=paddle.rand([3, 8]),
        use_neox_rotary_style=False,
    ),
    "pairs of neighbours": lambda: incubate.fused_rotary_position_embedding(
        draw(1, 4, 2, 8), sin=paddle.rand([4, 8]), cos=paddle.rand([4, 8])
    ),
    "numbers of rows on the device": lambda: incubate.batched_gemm(
        draw(4, 8).detach(), draw(2, 8, 3).detach(), paddle.to_tensor([1, 3])
    ),
    "numbers of other rows": lambda: incubate.batched_gemm(
        draw(4, 8).detach(), draw(2, 8, 3).detach(), [1, 2]
    ),
    "a gradient of products": lambda: incubate.batched_gemm(draw(4, 8), draw(2, 8, 3), [1, 3]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_standin_refuses_what_the_kernel_refuses(case):
    with halves_are("float64"), pytest.raises(ContractError):
        REFUSED[case]()


def test_norms_that_no_kernel_takes_run_in_plain_operators():
    x, weight = draw(4, 8), draw(8, dtype="float64")
    with use_kernels("plain"):
        wanted = rms_norm(x, weight, 1e-6), layer_norm(x, draw(8) * 0 + 1, draw(8) * 0, 0.5)
    found = rms_norm(x, weight, 1e-6), layer_norm(x, draw(8) * 0 + 1, draw(8) * 0, 0.5)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_rotary_tables_are_rounded_once_for_all_layers():
    tables = RotaryTables(paddle.rand([4, 8]), paddle.rand([4, 8]))
    q, k = draw(4, 2, 8, dtype="float64"), draw(4, 1, 8, dtype="float64")
    with halves_are("float64"):
        first = apply_rotary(q, k, tables)
        rounded = tables.astype(paddle.float64)
        apply_rotary(*first, tables)
    assert tables.astype(paddle.float64) is rounded


@pytest.fixture
def copies(monkeypatch):
    """Number of matrices in every copy that a product makes."""
    found, select = [], paddle.index_select

    def recording(x, index, *rest):
        if len(x.shape) == 3:
            found.append(index.shape[0])
        return select(x, index, *rest)

    monkeypatch.setattr(paddle, "index_select", recording)
    return found


@pytest.mark.parametrize(
    ("counts", "matrices"),
    [
        ([40, 30, 30], []),
        # R = 128 rows: (384 - 1) // 128 blocks beyond the first of each expert.
        ([384, 0, 0], [2, 2]),
        ([100, 34, 250], [2, 2]),
        # More than a tile per expert, unread: R = 384, and (768 - 1) // 384 further blocks.
        ([700, 0, 68], [1, 1]),
    ],
    ids=str,
)
def test_matrices_are_copied_for_further_blocks_only(counts, matrices, copies):
    x, weight = draw(sum(counts), 4), draw(3, 4, 5)
    sizes = GroupSizes(paddle.to_tensor(counts), may_read=False)
    with forbid_host_reads():
        y = grouped_linear(x, weight, sizes)
        y.sum().backward()
    assert copies == matrices
    begins = np.cumsum([0, *counts])
    for e in range(3):
        rows = slice(begins[e], begins[e + 1])
        wanted = x.numpy()[rows] @ weight.numpy()[e]
        np.testing.assert_allclose(y.numpy()[rows], wanted, atol=1e-5)
        wanted = np.broadcast_to(x.numpy()[rows].sum(0)[:, None], (4, 5))
        np.testing.assert_allclose(weight.grad.numpy()[e], wanted, atol=1e-4)


def test_many_rows_are_multiplied_once_each_after_one_read(copies, monkeypatch):
    """More than a tile per expert: no padding, and no read in the backward pass or a later one."""
    counts, multiplied, product = [700, 0, 68], [], incubate.batched_gemm

    def counting(lhs, rhs, sizes, **how):
        multiplied.append(sum(sizes))
        return product(lhs, rhs, sizes, **how)

    monkeypatch.setattr(incubate, "batched_gemm", counting)
    x, weight = draw(768, 4), draw(3, 4, 5)
    sizes = GroupSizes(paddle.to_tensor(counts))
    with record_host_reads() as reads:
        y = grouped_linear(x, weight, sizes)
        grouped_linear(x, weight, sizes)
        y.sum().backward()
    assert len(reads) == 1
    assert multiplied == [768] * 4
    assert copies == []


@pytest.mark.parametrize("counts", [[2, 0, 5, 1], [0, 0, 8, 0]], ids=str)
def test_numbers_of_rows_on_the_host_need_no_copy(counts, copies):
    results = []
    for on_host in (None, counts):
        paddle.seed(0)
        x, weight = draw(sum(counts), 4), draw(4, 4, 5)
        y = grouped_linear(x, weight, GroupSizes(paddle.to_tensor(counts), on_host))
        (y * y).sum().backward()
        results.append([y.numpy(), x.grad.numpy(), weight.grad.numpy()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert copies == []


BUILDS = {
    "qwen3_vl": tiny_qwen3_vl,
    "experts": partial(tiny_qwen3_vl, **EXPERTS),
    "pi07": tiny_pi07,
}
QWEN3_VL = {
    "layer_norm": 7, "rms_norm": 10, "fused_rms_norm": 3, "rms_norm_grad": 3,
    "fused_rotary_position_embedding": 10, "flash_attn_unpadded": 2, "flashmask_attention": 3,
}  # fmt: skip
COUNTS = {
    "qwen3_vl": QWEN3_VL,
    "experts": QWEN3_VL,
    "pi07": {
        "layer_norm": 7, "fused_rms_norm_ext": 27, "fused_rotary_position_embedding": 12,
        "flash_attn": 7, "flashmask_attention": 3,
    },
}  # fmt: skip


def calls_of(name: str) -> Counter:
    """Calls of each kernel in a forward and backward pass."""
    model = BUILDS[name]()
    begin = len(CALLS)
    with pretended_gpu() as attention:
        if name == "pi07":
            losses = model(tiny_pi07_batch())
            loss = losses["MSE"] + losses["CE"]
        else:
            loss = model(**tiny_qwen3_vl_batch()).loss
        loss.backward()
    return Counter([*CALLS[begin:], *(call.name for call in attention)])


@pytest.mark.parametrize("name", BUILDS)
def test_fused_kernels_of_a_model(name):
    assert dict(calls_of(name)) == COUNTS[name]
