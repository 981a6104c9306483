"""CPU kernels that replace sums, shuffles and loops by matrix products.

Paddle's CPU sum over rows, and a product that broadcasts a column, are slower than a matrix
product. For the CPU only: a GPU may multiply in TF32, which would round the terms of a sum.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.cpu.broadcasts import plus_column_times_
from paddle_vl.nn.experts import grouped_linear
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.norm import gemma_rms_norm, layer_norm, rms_norm, rms_quotient
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
        x_NI, columns = x.reshape([-1, x.shape[-1]]), weight.shape[1]
        # Starting from the bias costs less than a sum afterwards, which broadcasts.
        y_NO = paddle.addmm(bias.reshape([1, columns]), x_NI, weight)
        return y_NO.reshape([*x.shape[:-1], columns])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_NO = grad.reshape([-1, grad.shape[-1]])
        grad_x = paddle.matmul(grad, weight, transpose_y=True) if needs_x else None
        grad_weight = None
        if needs_weight:
            x_NI = x.reshape([-1, x.shape[-1]])
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
NORMS_IN_PADDLE = {
    norm: norm.kernels["cpu"] for norm in (rms_norm, gemma_rms_norm, rms_quotient, layer_norm)
}


class _RMSNormByProducts(PyLayer):
    """`x / sqrt(mean(x^2) + epsilon) * (offset + weight)`; without a weight the factor is 1.

    The outer product of inverse roots and weights is a matrix product, and the input is kept
    instead of the quotient.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon, offset):
        x_NC = x.reshape([-1, x.shape[-1]])
        inverse_N1 = paddle.rsqrt(row_sum(x_NC * x_NC).scale_(1.0 / x.shape[-1], epsilon))
        factor_1C = _factors(x, weight, offset)
        ctx.save_for_backward(x, inverse_N1, factor_1C)
        ctx.needs = [not t.stop_gradient for t in (x, weight) if t is not None]
        return paddle.matmul(inverse_N1, factor_1C).multiply_(x_NC).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, inverse_N1, factor_1C = ctx.saved_tensor()
        channels = x.shape[-1]
        grad_NC, x_NC = grad.reshape([-1, channels]), x.reshape([-1, channels])
        product_NC = grad_NC * x_NC
        grads: list[Tensor | None] = [None] * len(ctx.needs)
        if len(ctx.needs) > 1 and ctx.needs[1]:
            grads[1] = paddle.matmul(inverse_N1, product_NC, transpose_x=True).reshape([channels])
        if ctx.needs[0]:
            along_N1 = paddle.matmul(product_NC, factor_1C, transpose_y=True)
            along_N1 = along_N1 * (inverse_N1 * inverse_N1 * inverse_N1) * (-1.0 / channels)
            grad_x = paddle.matmul(inverse_N1, factor_1C).multiply_(grad_NC)
            grads[0] = plus_column_times_(grad_x, along_N1, x_NC).reshape(x.shape)
        return grads[0] if len(grads) == 1 else tuple(grads)


def _factors(x: Tensor, weight_C: Tensor | None, offset: float) -> Tensor:
    if weight_C is None:
        return ones(1, x.shape[-1])
    factor_C = weight_C.detach()
    return (factor_C + offset if offset else factor_C).reshape([1, -1])


def repeated(x_N1: Tensor, channels: int) -> Tensor:
    """A column repeated, `[..., 1]` to `[..., C]`: products that broadcast a column are slow."""
    return paddle.matmul(x_N1, ones(1, channels))


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


def layer_norm_by_products(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    if not _are_float32(x, weight_C, bias_C):
        return NORMS_IN_PADDLE[layer_norm](x, weight_C, bias_C, epsilon)
    return _LayerNormByProducts.apply(x, weight_C, bias_C, epsilon)


def _are_float32(*tensors: Tensor) -> bool:
    # `x.size` takes as long as a small operation.
    return all(x.dtype == paddle.float32 and 0 not in x.shape for x in tensors)


class _LayerNormByProducts(PyLayer):
    """Keeps the input and two numbers per row; backward subtracts the mean again."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        channels = x.shape[-1]
        x_NC = x.reshape([-1, channels])
        mean_N1 = row_sum(x_NC).scale_(1.0 / channels)
        centred_NC = x_NC - repeated(mean_N1, channels)
        variance_N1 = row_sum(centred_NC * centred_NC).scale_(1.0 / channels)
        inverse_N1 = paddle.rsqrt(variance_N1 + epsilon)
        ctx.save_for_backward(x, mean_N1, inverse_N1, weight)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias)]
        y_NC = paddle.matmul(inverse_N1, weight.reshape([1, channels])).multiply_(centred_NC)
        return y_NC.add_(bias).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, mean_N1, inverse_N1, weight = ctx.saved_tensor()
        channels = x.shape[-1]
        grad_NC = grad.reshape([-1, channels])
        centred_NC = x.reshape([-1, channels]) - repeated(mean_N1, channels)
        product_NC = grad_NC * centred_NC
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_x = grad_weight = None
        if needs_weight:
            grad_weight = paddle.matmul(inverse_N1, product_NC, transpose_x=True)
            grad_weight = grad_weight.reshape([channels])
        if needs_x:
            weight_C1 = weight.reshape([channels, 1])
            along_N1 = paddle.matmul(product_NC, weight_C1) * (1.0 / channels)
            along_N1 = along_N1 * (inverse_N1 * inverse_N1 * inverse_N1)
            plain_N1 = paddle.matmul(grad_NC, weight_C1) * inverse_N1 * (1.0 / channels)
            grad_x = paddle.matmul(inverse_N1, weight_C1, transpose_y=True).multiply_(grad_NC)
            grad_x.subtract_(repeated(along_N1, channels).multiply_(centred_NC))
            grad_x = grad_x.subtract_(repeated(plain_N1, channels)).reshape(x.shape)
        return grad_x, grad_weight, column_sum(grad_NC) if needs_bias else None
