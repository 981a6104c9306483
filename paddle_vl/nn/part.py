"""Cutting tensors so that the graph does not depend on where they are cut."""

import paddle
from paddle import Tensor


def part(x: Tensor, begin: int, end: int, axis: int = 0) -> Tensor:
    """`x[begin:end]` along an axis, by an operator whether that is some of `x`, all or nothing.

    Paddle leaves `x[:n]` out of the graph where it takes all. Backward would then visit the layers
    in another order than on a rank where it takes less, and collectives would not match.
    """
    return paddle.slice(x, [axis], [begin], [end])
