"""Linears with a backward pass in two halves: the input's gradient now, the weight's later.

A schedule without bubbles (DualPipeV) fills its waits with the weights' gradients. Linears that are
split over mp processes are fleet's own, which have no such form: theirs come at once.
"""

from collections.abc import Iterable

from paddle import Tensor, nn
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import SplitBWMatmul

from paddle_vl.nn.linear import use_product


def split_backward(layers: Iterable[nn.Layer]) -> None:
    """Let the linears of these layers add to their weights' gradients when fleet asks for them.

    Hooks on the gradients of these weights are not called then.
    """
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                use_product(parameter, _product)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return SplitBWMatmul.apply(x, weight, bias)
