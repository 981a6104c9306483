"""Stand-in of `batched_gemm`, by batched_gemm.cu of Paddle 3.3.1: one cuBLAS call per batch."""

import paddle

from tests.support.gpu_stubs.contract import is_float32, is_half, need


def batched_gemm(lhs, rhs, batch_sizes, trans_lhs=False, trans_rhs=False):
    kernel = "batched_gemm"
    need(is_float32(lhs) or is_half(lhs), kernel, "float32 or bfloat16", lhs=lhs)
    need(lhs.dtype == rhs.dtype, kernel, "one dtype", lhs=lhs, rhs=rhs)
    whole = all(type(size) is int and size >= 0 for size in batch_sizes)
    need(whole, kernel, "a list of numbers on the host", batch_sizes=batch_sizes)
    need(sum(batch_sizes) == lhs.shape[0], kernel, "sizes of all rows", lhs=lhs, sizes=batch_sizes)
    # It has no gradient: the caller must have one of its own.
    needed = paddle.is_grad_enabled() and not (lhs.stop_gradient and rhs.stop_gradient)
    need(not needed, kernel, "a gradient of the caller's")
    if trans_lhs:
        fits = not trans_rhs and len(rhs.shape) == 2 and rhs.shape[0] == lhs.shape[0]
        need(fits, kernel, "as many rows on both sides", lhs=lhs, rhs=rhs)
    else:
        fits = rhs.shape[0] == len(batch_sizes) and rhs.shape[2 if trans_rhs else 1] == lhs.shape[1]
        need(fits, kernel, "a matrix per batch that fits the rows", lhs=lhs, rhs=rhs)
    return _products(lhs, rhs, batch_sizes, trans_lhs, trans_rhs)


def _products(lhs, rhs, batch_sizes, trans_lhs: bool, trans_rhs: bool):
    results, begin = [], 0
    for number, size in enumerate(batch_sizes):
        rows = lhs[begin : begin + size]
        if not trans_lhs:
            if size:
                results.append(paddle.matmul(rows, rhs[number], transpose_y=trans_rhs))
        elif size:
            results.append(paddle.matmul(rows, rhs[begin : begin + size], transpose_x=True))
        else:
            # Memory that nothing has written.
            results.append(paddle.full([lhs.shape[1], rhs.shape[1]], float("nan"), lhs.dtype))
        begin += size
    return paddle.stack(results) if trans_lhs else paddle.concat(results)
