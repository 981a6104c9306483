"""CPU kernels that replace sums, shuffles and loops by matrix products.

Paddle's CPU sum over rows is slower than a matrix product. Its operations between tensors of two
shapes take nine times as long as oneDNN's, which run in place here. For the CPU only: a GPU may
multiply in TF32, which would round the terms of a sum.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.cpu import onednn
from paddle_vl.nn.experts import grouped_linear
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.norm import gemma_rms_norm, rms_norm, rms_quotient
from paddle_vl.nn.operations import column_sum, row_sum
from paddle_vl.nn.rotary import RotaryTables, apply_rotary


@row_sum.register("cpu")
def _row_sum(x: Tensor) -> Tensor:
    return paddle.matmul(x, ones(x.shape[-1], 1, x.dtype))


@column_sum.register("cpu")
def _column_sum(x_NC: Tensor) -> Tensor:
    return paddle.matmul(ones(1, x_NC.shape[0], x_NC.dtype), x_NC).reshape([x_NC.shape[1]])


@lru_cache(maxsize=256)
def ones(rows: int, columns: int, dtype: paddle.dtype = paddle.float32) -> Tensor:
    """A matrix of ones in host memory, for products that are sums; not to be written."""
    return paddle.to_tensor(np.ones([rows, columns], np.float32), dtype, paddle.CPUPlace())


def as_rows(x: Tensor) -> Tensor:
    """`[..., C]` as `[N, C]`, without an operation where it is that already."""
    return x if x.ndim == 2 else x.reshape([-1, x.shape[-1]])


def in_shape_of(x: Tensor, x_NC: Tensor) -> Tensor:
    """The inverse of `as_rows(x)`."""
    return x_NC if x.ndim == 2 else x_NC.reshape(x.shape)


def times_column_(x: Tensor, column: Tensor) -> Tensor:
    """`x * column` of `[..., C]` and `[..., 1]`."""
    if not onednn.takes(x, column):
        return x.multiply_(column)
    _column("mul", x, column)(x.data_ptr(), column.data_ptr(), x.data_ptr())
    return x


def minus_column_times_(x: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """`(x - column) * factor` of `[..., C]`, `[..., 1]` and `[..., C]`."""
    if not onednn.takes(x, column, factor):
        return x.subtract_(column).multiply_(factor)
    run = _column("sub", x, column, "mul")
    run(x.data_ptr(), column.data_ptr(), x.data_ptr(), factor.data_ptr())
    return x


def plus_column_times_(x: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """`x + column * factor` of `[..., C]`, `[..., 1]` and `[..., C]`."""
    if not onednn.takes(x, column, factor):
        return x.add_(factor * column)
    run = _column("mul", x, column, "add")
    run(factor.data_ptr(), column.data_ptr(), x.data_ptr(), x.data_ptr())
    return x


def times_matrix_(x_ZRS: Tensor, matrix_RS: Tensor) -> Tensor:
    """`x * matrix` for each of Z."""
    matrix_RS = matrix_RS.contiguous()
    if not onednn.takes(x_ZRS, matrix_RS):
        return x_ZRS.multiply_(matrix_RS)
    batch, size = x_ZRS.shape[0], math.prod(matrix_RS.shape)
    run = onednn.binary("mul", (batch, size), (1, size))
    run(x_ZRS.data_ptr(), matrix_RS.data_ptr(), x_ZRS.data_ptr())
    return x_ZRS


def times_row_(x_ZRS: Tensor, row_Z1S: Tensor) -> Tensor:
    """`x * row` of `[Z, R, S]` and `[Z, 1, S]`."""
    row_Z1S = row_Z1S.contiguous()
    if not onednn.takes(x_ZRS, row_Z1S):
        return x_ZRS.multiply_(row_Z1S)
    run = onednn.binary("mul", tuple(x_ZRS.shape), tuple(row_Z1S.shape))
    run(x_ZRS.data_ptr(), row_Z1S.data_ptr(), x_ZRS.data_ptr())
    return x_ZRS


def _column(name: str, x: Tensor, column: Tensor, then: str | None = None) -> onednn.Primitive:
    rows = math.prod(column.shape)
    return onednn.binary(name, (rows, x.shape[-1]), (rows, 1), then)


@apply_rotary.register("cpu")
def _apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    # One by one: both outputs of one PyLayer pass gradients, so an unused one would pass zeros.
    q_TNH = _Rotary.apply(q_TNH, *tables.of_heads(q_TNH.shape[-2]))
    k_TKH = _Rotary.apply(k_TKH, *tables.of_heads(k_TKH.shape[-2]))
    return q_TNH, k_TKH


class _Rotary(PyLayer):
    """Keeps the tables of all layers for the backward pass, and nothing else."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        wide = x.astype(cos.dtype)
        return (wide * cos).add_(_rotate_half(wide).multiply_(sin)).astype(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensor()
        wide = grad.astype(cos.dtype)
        # The transpose of rotate_half is its negative.
        grad_x = (wide * cos).subtract_(_rotate_half(wide * sin))
        return grad_x.astype(grad.dtype), None, None


def _rotate_half(x: Tensor) -> Tensor:
    """A product with a signed permutation: exact, and faster than splitting and joining."""
    return paddle.matmul(x, _swap(x.shape[-1], x.dtype))


@lru_cache(maxsize=16)
def _swap(width: int, dtype: paddle.dtype) -> Tensor:
    half = width // 2
    swap = np.zeros((width, width), dtype=np.float32)
    swap[np.arange(half) + half, np.arange(half)] = -1.0
    swap[np.arange(half), np.arange(half) + half] = 1.0
    return paddle.to_tensor(swap, dtype=dtype)


@biased_linear.register("cpu")
class _BiasedLinear(PyLayer):
    """The product is added to the bias, whose gradient is a product with ones."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient, not bias.stop_gradient)
        if x.dtype != paddle.float32:
            return paddle.matmul(x, weight).add_(bias)
        x_NI, columns = as_rows(x), weight.shape[1]
        # Starting from the bias costs less than a sum afterwards, which broadcasts.
        y_NO = paddle.addmm(bias.reshape([1, columns]), x_NI, weight)
        return y_NO if x.ndim == 2 else y_NO.reshape([*x.shape[:-1], columns])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_NO = as_rows(grad)
        grad_x = paddle.matmul(grad, weight, transpose_y=True) if needs_x else None
        grad_weight = None
        if needs_weight:
            x_NI = as_rows(x)
            grad_weight = paddle.matmul(x_NI, grad_NO, transpose_x=True)
        return grad_x, grad_weight, column_sum(grad_NO) if needs_bias else None


@grouped_linear.register("cpu")
class _GroupedLinear(PyLayer):
    """One product per expert. Reading the counts on the host costs nothing on the CPU."""

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, sizes):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.counts = sizes.counts_E.tolist()
        ctx.needs = (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return _rows_times_experts(x_NI, weight_EIO, ctx.counts)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO = ctx.saved_tensor()
        needs_x, needs_weight = ctx.needs
        grad_x = grad_weight = None
        if needs_x:
            grad_x = _rows_times_experts(grad_NO, weight_EIO, ctx.counts, transposed=True)
        if needs_weight:
            grad_weight = paddle.zeros_like(weight_EIO)
            for e, begin, end in _row_ranges(ctx.counts):
                paddle.matmul(
                    x_NI._slice(begin, end),
                    grad_NO._slice(begin, end),
                    transpose_x=True,
                    out=_matrix(grad_weight, e),
                )
        return grad_x, grad_weight


def _rows_times_experts(
    x_NI: Tensor, weight_EIO: Tensor, counts: list[int], transposed: bool = False
) -> Tensor:
    """Each product is written into its slice of the result, which saves a copy."""
    columns = weight_EIO.shape[1 if transposed else 2]
    y_NO = paddle.empty([x_NI.shape[0], columns], dtype=x_NI.dtype)
    for e, begin, end in _row_ranges(counts):
        paddle.matmul(
            x_NI._slice(begin, end),
            _matrix(weight_EIO, e),
            transpose_y=transposed,
            out=y_NO._slice(begin, end),
        )
    return y_NO


def _matrix(weight_EIO: Tensor, e: int) -> Tensor:
    """One expert's matrix `[I, O]`, a view of the stacked weights."""
    return weight_EIO._slice(e, e + 1).reshape_(weight_EIO.shape[1:])


def _row_ranges(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Expert, first row and end row of every expert that has rows."""
    end = 0
    for e, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            yield e, begin, end


# Kernels for other dtypes, by operation.
NORMS_IN_PADDLE = {norm: norm.kernels["cpu"] for norm in (rms_norm, gemma_rms_norm, rms_quotient)}


class _RMSNormByProducts(PyLayer):
    """`x / sqrt(mean(x^2) + epsilon) * (offset + weight)`; without a weight the factor is 1.

    The outer product of inverse roots and weights is a matrix product, and the input is kept
    instead of the quotient.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon, offset):
        x_NC = as_rows(x)
        inverse_N1 = paddle.rsqrt(row_sum(x_NC * x_NC).scale_(1.0 / x.shape[-1], epsilon))
        factor_1C = _factors(x, weight, offset)
        ctx.save_for_backward(x, inverse_N1, factor_1C)
        ctx.needs = [not t.stop_gradient for t in (x, weight) if t is not None]
        return in_shape_of(x, paddle.matmul(inverse_N1, factor_1C).multiply_(x_NC))

    @staticmethod
    def backward(ctx, grad):
        x, inverse_N1, factor_1C = ctx.saved_tensor()
        channels = x.shape[-1]
        grad_NC, x_NC = as_rows(grad), as_rows(x)
        product_NC = grad_NC * x_NC
        grads: list[Tensor | None] = [None] * len(ctx.needs)
        if len(ctx.needs) > 1 and ctx.needs[1]:
            grads[1] = paddle.matmul(inverse_N1, product_NC, transpose_x=True).reshape([channels])
        if ctx.needs[0]:
            along_N1 = paddle.matmul(product_NC, factor_1C, transpose_y=True)
            along_N1 = along_N1 * (inverse_N1 * inverse_N1 * inverse_N1) * (-1.0 / channels)
            grad_x = paddle.matmul(inverse_N1, factor_1C).multiply_(grad_NC)
            grads[0] = in_shape_of(x, plus_column_times_(grad_x, along_N1, x_NC))
        return grads[0] if len(grads) == 1 else tuple(grads)


def _factors(x: Tensor, weight_C: Tensor | None, offset: float) -> Tensor:
    if weight_C is None:
        return ones(1, x.shape[-1])
    factor_C = weight_C.detach()
    return (factor_C + offset if offset else factor_C).reshape([1, -1])


@rms_norm.register("cpu")
def _rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    if not _are_float32(x, weight_C):
        return NORMS_IN_PADDLE[rms_norm](x, weight_C, epsilon)
    return _RMSNormByProducts.apply(x, weight_C, epsilon, 0.0)


@gemma_rms_norm.register("cpu")
def _gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    if not _are_float32(x, weight_C):
        return NORMS_IN_PADDLE[gemma_rms_norm](x, weight_C, epsilon)
    return _RMSNormByProducts.apply(x, weight_C, epsilon, 1.0)


@rms_quotient.register("cpu")
def _rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    if not _are_float32(x):
        return NORMS_IN_PADDLE[rms_quotient](x, epsilon)
    return _RMSNormByProducts.apply(x, None, epsilon, 0.0)


def _are_float32(*tensors: Tensor) -> bool:
    return all(x.dtype == paddle.float32 and 0 not in x.shape for x in tensors)
