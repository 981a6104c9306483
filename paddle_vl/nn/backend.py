"""Which implementation an operation takes, and the reductions that depend on it.

Paddle's CPU kernels differ tenfold between equal formulas, so the hand-written backward passes of
this folder run in eager mode, and a traced program gets the plain formula. Row and column sums are
matrix products with ones on the CPU only: a GPU may multiply in TF32, which would round the terms.
"""

import paddle
from paddle import Tensor


def is_eager_cpu(x: Tensor) -> bool:
    """True when `x` lives on the CPU and operations run as they are called."""
    return paddle.in_dynamic_mode() and x.place.is_cpu_place()


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, kept: `[..., C]` to `[..., 1]`."""
    if is_eager_cpu(x):
        return paddle.matmul(x, paddle.ones([x.shape[-1], 1], dtype=x.dtype))
    return x.sum(axis=-1, keepdim=True)


def column_sum(x_NC: Tensor) -> Tensor:
    """Sum over the rows: `[N, C]` to `[C]`."""
    if is_eager_cpu(x_NC):
        ones = paddle.ones([1, x_NC.shape[0]], dtype=x_NC.dtype)
        return paddle.matmul(ones, x_NC).reshape([x_NC.shape[1]])
    return x_NC.sum(axis=0)
