"""CPU kernels that replace sums, shuffles and loops by matrix products.

Paddle's CPU sum over rows is slower than a matrix product. For the CPU only: a GPU may multiply in
TF32, which would round the terms of a sum.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import grouped_linear
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.operations import column_sum, row_sum
from paddle_vl.nn.rotary import RotaryTables, apply_rotary


@row_sum.register("cpu")
def _row_sum(x: Tensor) -> Tensor:
    return paddle.matmul(x, paddle.ones([x.shape[-1], 1], dtype=x.dtype))


@column_sum.register("cpu")
def _column_sum(x_NC: Tensor) -> Tensor:
    ones = paddle.ones([1, x_NC.shape[0]], dtype=x_NC.dtype)
    return paddle.matmul(ones, x_NC).reshape([x_NC.shape[1]])


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
        return (wide * cos).add_(turned_by_product(wide).multiply_(sin)).astype(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensor()
        wide = grad.astype(cos.dtype)
        # The transpose of rotate_half is its negative.
        grad_x = (wide * cos).subtract_(turned_by_product(wide * sin))
        return grad_x.astype(grad.dtype), None, None


def turned_by_product(x: Tensor) -> Tensor:
    """A product with a signed permutation: exact, and faster than splitting and joining."""
    # A traced program has constants of its own.
    swap = _kept_swap if paddle.in_dynamic_mode() else _swap
    return paddle.matmul(x, swap(x.shape[-1], x.dtype))


def _swap(width: int, dtype: paddle.dtype) -> Tensor:
    half = width // 2
    swap = np.zeros((width, width), dtype=np.float32)
    swap[np.arange(half) + half, np.arange(half)] = -1.0
    swap[np.arange(half), np.arange(half) + half] = 1.0
    return paddle.to_tensor(swap, dtype=dtype)


_kept_swap = lru_cache(maxsize=16)(_swap)


@biased_linear.register("cpu")
class _BiasedLinear(PyLayer):
    """The bias is added in place, and its gradient is a product with ones."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient, not bias.stop_gradient)
        return paddle.matmul(x, weight).add_(bias)

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
    def forward(ctx, x_NI, weight_EIO, counts_E):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.counts = counts_E.tolist()
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
        return grad_x, grad_weight, None


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
