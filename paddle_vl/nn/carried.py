"""Float32 values carried in rows of another dtype, exactly, so that they can travel with those.

A bfloat16 number has a third of a float32's bits: three of them, each the rounding of what the ones
before leave over, add up to it. Gradients come back in the rows' dtype, as all others there.
"""

import math
from collections.abc import Sequence

import paddle
from paddle import Tensor


def num_carrying_rows(shape: Sequence[int], width: int, dtype: paddle.dtype) -> int:
    """Rows of `width` that values of a shape take."""
    return -(-math.prod(shape) * _num_pieces(dtype) // width)


def carry(values: Tensor, width: int, dtype: paddle.dtype) -> Tensor:
    """Float32 values of any shape as rows `[num_carrying_rows, width]`."""
    pieces, left = [], values.reshape([-1])
    for _ in range(_num_pieces(dtype)):
        pieces.append(left.astype(dtype))
        left = left - pieces[-1].astype("float32")
    rows = num_carrying_rows(values.shape, width, dtype)
    missing = rows * width - len(pieces) * values.size
    if missing:
        pieces.append(paddle.zeros([missing], dtype=dtype))
    return paddle.concat(pieces).reshape([rows, width])


def carried(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The values of `carry`, float32."""
    size = math.prod(shape)
    flat, count = rows.reshape([-1]), _num_pieces(rows.dtype)
    pieces = [flat[i * size : (i + 1) * size].astype("float32") for i in range(count)]
    return sum(pieces[1:], pieces[0]).reshape(shape)


def _num_pieces(dtype: paddle.dtype) -> int:
    return 1 if dtype == paddle.float32 else 3
