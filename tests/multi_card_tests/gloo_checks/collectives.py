"""Every collective against NumPy, for each operation, dtype, stride, size and variant."""

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.multi_card_tests.gloo_checks.registry import (
    FLOATS,
    IN_NUMPY,
    INTEGERS,
    NOW_OR_TASK,
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


@check(**{f"{OP_NAMES[op]}-{dtype}": (op, dtype) for op in IN_NUMPY for dtype in FLOATS})
def all_reduce(variant):
    op, dtype = variant
    x = rows_of_ranks(2, 3)
    result = tensor(x[rank()], dtype)
    dist.all_reduce(result, op)
    assert_equal(result, IN_NUMPY[op](x))


@check(**{f"{OP_NAMES[op]}-{t}": (op, t) for op in IN_NUMPY if op != Op.AVG for t in INTEGERS})
def all_reduce_integers(variant):
    all_reduce(variant)


@check()
def all_reduce_of_booleans():
    result = paddle.to_tensor([rank() == 1, False])
    dist.all_reduce(result, Op.MAX)
    assert result.tolist() == [True, False]


@check()
def all_reduce_on_calc_stream():
    x = rows_of_ranks(3)
    result = tensor(x[rank()])
    dist.stream.all_reduce(result, Op.AVG, use_calc_stream=True)
    assert_equal(result, x.sum(axis=0) / np.float32(size()))


@check()
def bfloat16_sums_round_once():
    # 256 + 1 is 256 in bfloat16: rounding after each rank would lose every 1.
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
    # NumPy has the method under the same name, but not its argument.
    expected_part = expected[:, 1:3] if part.shape == [3, 2] else expected.T
    expected_part[...] = x.sum(axis=0)[:, 1:3] if part.shape == [3, 2] else x.sum(axis=0).T
    assert_equal(part, expected_part)
    assert_equal(base, expected)


@check()
def average_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"AVG got a tensor of paddle\.int64"):
        dist.all_reduce(paddle.ones([2], "int64"), Op.AVG)


@check()
def unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"paddle\.int16; on CPU processes they take float16"):
        dist.all_reduce(paddle.ones([2], "int16"))


@check(first=0, last=-1)
def reduce(dst):
    dst = dst % size()
    x = rows_of_ranks(2, 2)
    for on_calc_stream in NOW_OR_TASK.values():
        result = tensor(x[rank()], "bfloat16")
        dist.stream.reduce(result, dst, sync_op=True, use_calc_stream=on_calc_stream)
        assert_equal(result, x.sum(axis=0) if rank() == dst else x[rank()])


@check(**{dtype: dtype for dtype in (*FLOATS, *INTEGERS)})
def all_gather(dtype):
    x = rows_of_ranks(2, 3)
    parts = []
    dist.all_gather(parts, tensor(x[rank()], dtype))
    assert_equal(paddle.stack(parts), x)
    for on_calc_stream in NOW_OR_TASK.values():
        joined = paddle.empty([2 * size(), 3], dtype)
        dist.stream.all_gather(joined, tensor(x[rank()], dtype), use_calc_stream=on_calc_stream)
        assert_equal(joined, x.reshape(-1, 3))
        parts = [paddle.empty([2, 3], dtype) for _ in range(size())]
        dist.stream.all_gather(parts, tensor(x[rank()], dtype), use_calc_stream=on_calc_stream)
        assert_equal(paddle.stack(parts), x)


@check()
def all_gather_of_a_view():
    x = rows_of_ranks(3, 4)
    joined = paddle.zeros([2, 3 * size()])
    dist.stream.all_gather(joined.transpose([1, 0]), tensor(x[rank()])[:, 1:3])
    assert_equal(joined, x[:, :, 1:3].reshape(-1, 2).T)


@check(**NOW_OR_TASK)
def reduce_scatter(on_calc_stream):
    x = rows_of_ranks(2 * size(), 3)
    own = slice(2 * rank(), 2 * rank() + 2)
    for op in (Op.SUM, Op.MAX, Op.AVG):
        for dtype in ("float32", "bfloat16"):
            whole = tensor(x[rank()], dtype)
            expected = IN_NUMPY[op](x)[own]
            out = paddle.empty([2, 3], dtype)
            dist.stream.reduce_scatter(out, whole, op, use_calc_stream=on_calc_stream)
            assert_equal(out, expected)
            parts = list(paddle.split(whole, size()))
            out = paddle.empty([2, 3], dtype)
            dist.stream.reduce_scatter(out, parts, op, use_calc_stream=on_calc_stream)
            assert_equal(out, expected)
            assert_equal(whole, x[rank()])


@check()
def reduce_scatter_average_by_its_plain_name():
    x = rows_of_ranks(size())
    out = paddle.empty([1])
    dist.reduce_scatter(out, tensor(x[rank()]), Op.AVG)
    assert_equal(out, (x.sum(axis=0) / np.float32(size()))[rank() : rank() + 1])


@check()
def reduce_scatter_into_its_own_input():
    x = rows_of_ranks(size(), 2)
    whole = tensor(x[rank()])
    dist.stream.reduce_scatter(whole[rank() : rank() + 1], whole)
    assert_equal(whole[rank()], x.sum(axis=0)[rank()])


@check(**NOW_OR_TASK)
def all_to_all(on_calc_stream):
    x = rows_of_ranks(size(), 2, 3)
    out = [paddle.empty([2, 3]) for _ in range(size())]
    dist.stream.alltoall(out, list(tensor(x[rank()])), use_calc_stream=on_calc_stream)
    assert_equal(paddle.stack(out), x[:, rank()])
    out = paddle.empty([size(), 2, 3])
    dist.stream.alltoall(out, tensor(x[rank()]), use_calc_stream=on_calc_stream)
    assert_equal(out, x[:, rank()])


@check(**NOW_OR_TASK)
def all_to_all_of_uneven_parts(on_calc_stream):
    expected = [message(source, rank()) for source in range(size())]
    sent = [message(rank(), target) for target in range(size())]
    out = [paddle.empty(part.shape) for part in expected]
    parts = [tensor(part) for part in sent]
    dist.stream.alltoall(out, parts, use_calc_stream=on_calc_stream)
    for part, wanted in zip(out, expected, strict=True):
        assert_equal(part, wanted)
    joined = paddle.empty([sum(map(len, expected)), 3])
    dist.stream.alltoall_single(
        joined,
        tensor(np.concatenate(sent)),
        [len(part) for part in expected],
        [len(part) for part in sent],
        use_calc_stream=on_calc_stream,
    )
    assert_equal(joined, np.concatenate(expected))


@check()
def all_to_all_single_of_even_parts():
    x = rows_of_ranks(2 * size(), 2)
    out = paddle.empty([2 * size(), 2])
    dist.alltoall_single(out, tensor(x[rank()]))
    assert_equal(out, x[:, 2 * rank() : 2 * rank() + 2].reshape(-1, 2))


@check()
def all_to_all_of_sizes_that_do_not_fit_is_refused():
    out = [paddle.empty([2]) for _ in range(size())]
    with pytest.raises(ValueError, match="sends rank . 3 elements, and its place there has 2"):
        dist.alltoall(out, [paddle.ones([3]) for _ in range(size())])


@check(**{dtype: dtype for dtype in ("float32", "bfloat16", "float16", "int64", "bool")})
def broadcast(dtype):
    x = rows_of_ranks(2, 3, low=0, high=2)
    for src in range(size()):
        for on_calc_stream in NOW_OR_TASK.values():
            result = tensor(x[rank()], dtype)
            dist.stream.broadcast(result, src, use_calc_stream=on_calc_stream)
            assert_equal(result, x[src])
    base = tensor(x[rank()], dtype)
    dist.broadcast(base[:, 1:], 1)
    assert_equal(base[:, 1:], x[1][:, 1:])


@check(**NOW_OR_TASK)
def scatter(on_calc_stream):
    x = rows_of_ranks(size(), 3)
    for src in (0, size() - 1):
        parts = list(tensor(x[src])) if rank() == src else []
        out = paddle.empty([3])
        dist.stream.scatter(out, parts, src, use_calc_stream=on_calc_stream)
        assert_equal(out, x[src][rank()])
        out = paddle.empty([1, 3])
        dist.stream.scatter(out, tensor(x[src]), src, use_calc_stream=on_calc_stream)
        assert_equal(out, x[src][rank()][None])


@check()
def gather():
    x = rows_of_ranks(2, 3)
    parts = [paddle.empty([2, 3]) for _ in range(size())] if rank() == 1 else []
    dist.gather(tensor(x[rank()]), parts, dst=1)
    if rank() == 1:
        assert_equal(paddle.stack(parts), x)


@check()
def objects():
    found = []
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()})
    assert found == [{"rank": each, "text": "x" * each} for each in range(size())]
    shared = [["of", rank()]]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [["of", 1]]


@check()
def empty_tensors():
    nothing = paddle.zeros([0, 3])
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.reduce(nothing, 0)
    for result, collective in (
        (paddle.zeros([0, 3]), dist.stream.all_gather),
        (paddle.zeros([0, 3]), dist.stream.reduce_scatter),
        (paddle.zeros([0, 3]), dist.stream.alltoall),
    ):
        collective(result, nothing)
        assert result.shape == [0, 3]
    if rank() == 0:
        dist.send(nothing, 1)
    elif rank() == 1:
        dist.recv(nothing, 0)
    assert nothing.shape == [0, 3]
    still_in_step()
