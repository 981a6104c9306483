"""In-place operations between a tensor and a smaller one, by oneDNN where Paddle's wheel has it.

Paddle's CPU kernels of two shapes take eight times as long as those of one.
"""

import math

from paddle import Tensor

from paddle_vl.nn.cpu import onednn


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


def _column(name: str, x: Tensor, column: Tensor, then: str | None = None) -> onednn.Primitive:
    rows = math.prod(column.shape)
    return onednn.binary(name, (rows, x.shape[-1]), (rows, 1), then)
