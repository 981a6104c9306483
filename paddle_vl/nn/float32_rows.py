"""Float32 values stored exactly in rows of another dtype, so that they can be sent with those rows.

A pipeline sends one tensor of one dtype from stage to stage. A bfloat16 has a third of a float32's
significant bits, so a float32 is the sum of three bfloat16: each is the rounded remainder of those
before it. Gradients come back in the dtype of the rows.
"""

import math
from collections.abc import Sequence

import paddle
from paddle import Tensor


def num_float32_rows(shape: Sequence[int], width: int, dtype: paddle.dtype) -> int:
    """Number of rows of `width` that values of this shape take."""
    return -(-math.prod(shape) * _num_pieces(dtype) // width)


def float32_to_rows(values: Tensor, width: int, dtype: paddle.dtype) -> Tensor:
    """Float32 values of any shape as rows `[num_float32_rows, width]` of `dtype`."""
    pieces, left = [], values.reshape([-1])
    for _ in range(_num_pieces(dtype)):
        pieces.append(left.astype(dtype))
        left = left - pieces[-1].astype("float32")
    rows = num_float32_rows(values.shape, width, dtype)
    missing = rows * width - len(pieces) * values.size
    if missing:
        pieces.append(paddle.zeros([missing], dtype=dtype))
    return paddle.concat(pieces).reshape([rows, width])


def float32_from_rows(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `float32_to_rows`, for values of this shape."""
    size = math.prod(shape)
    flat, count = rows.reshape([-1]), _num_pieces(rows.dtype)
    pieces = [flat[i * size : (i + 1) * size].astype("float32") for i in range(count)]
    return sum(pieces[1:], pieces[0]).reshape(shape)


def _num_pieces(dtype: paddle.dtype) -> int:
    return 1 if dtype == paddle.float32 else 3
