"""Every collective that a run uses, against NumPy, for each operation, dtype, stride and size."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.multi_card_tests.gloo_checks.registry import (
    FLOATS,
    IN_NUMPY,
    INTEGERS,
    OP_NAMES,
    Op,
    assert_equal,
    check,
    message,
    rank,
    rows_of_ranks,
    size,
    still_in_step,
    tensor,
)


@check(**{f"{OP_NAMES[op]}-{t}": (op, t) for op in IN_NUMPY for t in (*FLOATS, *INTEGERS)})
def all_reduce(variant):
    op, dtype = variant
    x = rows_of_ranks(2, 3)
    result = tensor(x[rank()], dtype)
    dist.all_reduce(result, op)
    assert_equal(result, IN_NUMPY[op](x))


@check()
def all_reduce_of_booleans():
    result = paddle.to_tensor([rank() == 1, False])
    dist.all_reduce(result, Op.MAX)
    assert result.tolist() == [True, False]


@check()
def bfloat16_sums_round_once():
    # In bfloat16 256 + 1 is 256: rounding after each rank would lose every 1.
    result = tensor([256.0 if rank() == 0 else 1.0], "bfloat16")
    dist.all_reduce(result)
    assert_equal(result, [256.0 + size() - 1])


@check(column_slice=lambda x: x[:, 1:3], transposed=lambda x: x.transpose([1, 0]))
def all_reduce_of_a_view_writes_through_it(view):
    x = rows_of_ranks(3, 4)
    base = tensor(x[rank()])
    part = view(base)
    assert not part.is_contiguous()
    dist.all_reduce(part)
    expected = x[rank()].copy()
    # NumPy's method has the same name but other arguments.
    expected_part = expected[:, 1:3] if part.shape == [3, 2] else expected.T
    expected_part[...] = x.sum(axis=0)[:, 1:3] if part.shape == [3, 2] else x.sum(axis=0).T
    assert_equal(part, expected_part)
    assert_equal(base, expected)


@check()
def unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"paddle\.int16; on CPU ranks they take float16"):
        dist.all_reduce(paddle.ones([2], "int16"))


@check(**{dtype: dtype for dtype in (*FLOATS, *INTEGERS)})
def all_gather(dtype):
    x = rows_of_ranks(2, 3)
    parts = []
    dist.all_gather(parts, tensor(x[rank()], dtype))
    assert_equal(paddle.stack(parts), x)
    joined = paddle.empty([2 * size(), 3], dtype)
    dist.stream.all_gather(joined, tensor(x[rank()], dtype))
    assert_equal(joined, x.reshape(-1, 3))


@check()
def all_gather_of_a_view():
    x = rows_of_ranks(3, 4)
    joined = paddle.zeros([2, 3 * size()])
    dist.stream.all_gather(joined.transpose([1, 0]), tensor(x[rank()])[:, 1:3])
    assert_equal(joined, x[:, :, 1:3].reshape(-1, 2).T)


@check(**{OP_NAMES[op]: op for op in (Op.SUM, Op.MAX)})
def reduce_scatter(op):
    x = rows_of_ranks(2 * size(), 3)
    own = slice(2 * rank(), 2 * rank() + 2)
    for dtype in ("float32", "bfloat16"):
        full = tensor(x[rank()], dtype)
        out = paddle.empty([2, 3], dtype)
        dist.stream.reduce_scatter(out, full, op)
        assert_equal(out, IN_NUMPY[op](x)[own])
        assert_equal(full, x[rank()])


@check()
def reduce_scatter_into_its_own_input():
    x = rows_of_ranks(size(), 2)
    full = tensor(x[rank()])
    dist.stream.reduce_scatter(full[rank() : rank() + 1], full)
    assert_equal(full[rank()], x.sum(axis=0)[rank()])


@check()
def all_to_all_of_slices_of_different_length():
    expected = [message(source, rank()) for source in range(size())]
    sent = [message(rank(), target) for target in range(size())]
    joined = paddle.empty([sum(map(len, expected)), 3])
    dist.stream.alltoall_single(
        joined,
        tensor(np.concatenate(sent)),
        [len(part) for part in expected],
        [len(part) for part in sent],
    )
    assert_equal(joined, np.concatenate(expected))


@check()
def all_to_all_of_equal_slices():
    x = rows_of_ranks(2 * size(), 2)
    out = paddle.empty([2 * size(), 2])
    dist.alltoall_single(out, tensor(x[rank()]))
    assert_equal(out, x[:, 2 * rank() : 2 * rank() + 2].reshape(-1, 2))


@check()
def all_to_all_of_sizes_that_do_not_fit_is_refused():
    out, sizes = paddle.empty([2 * size()]), [2] * size()
    with pytest.raises(ValueError, match="sends rank . 3 elements, and the output has 2 for them"):
        dist.alltoall_single(out, paddle.ones([3 * size()]), [3] * size(), sizes)


@check(**{dtype: dtype for dtype in ("float32", "bfloat16", "float16", "int64", "bool")})
def broadcast(dtype):
    x = rows_of_ranks(2, 3, low=0, high=2)
    for src in range(size()):
        result = tensor(x[rank()], dtype)
        dist.broadcast(result, src)
        assert_equal(result, x[src])
    base = tensor(x[rank()], dtype)
    dist.broadcast(base[:, 1:], 1)
    assert_equal(base[:, 1:], x[1][:, 1:])


@check()
def empty_tensors():
    nothing = paddle.zeros([0, 3])
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    for collective in (dist.stream.all_gather, dist.stream.reduce_scatter):
        result = paddle.zeros([0, 3])
        collective(result, nothing)
        assert result.shape == [0, 3]
    if rank() == 0:
        dist.send(nothing, 1)
    elif rank() == 1:
        dist.recv(nothing, 0)
    assert nothing.shape == [0, 3]
    still_in_step()
