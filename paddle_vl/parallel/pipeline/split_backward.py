"""Linears whose backward pass is split: the input's gradient first, the weight's gradient later.

Zero-bubble schedules (DualPipeV) compute the weights' gradients where a stage would wait. Linears
that are split over a tensor-parallel group are fleet's own and have no such form: their weights'
gradients are computed with the inputs'.

Source: Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241.
"""

from collections.abc import Iterable

from paddle import Tensor, nn
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import SplitBWMatmul

from paddle_vl.nn.linear import use_product


def split_backward(layers: Iterable[nn.Layer]) -> None:
    """Make the linears of these layers compute their weights' gradients when fleet asks for them.

    Hooks on the gradients of these weights are not called then.
    """
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                use_product(parameter, _product)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return SplitBWMatmul.apply(x, weight, bias)
