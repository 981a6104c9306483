"""Activation recomputation: a layer keeps its inputs only and runs again in the backward pass."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.utils import recompute

from paddle_vl.parallel.layer_wrappers import Level, wrap_layer


def recompute_layers(layers: Iterable[nn.Layer]) -> None:
    """Recompute the activations of these layers in training; evaluation and generation do not.

    A layer must take its tensors as positional arguments, the hidden rows first, so that Paddle
    tracks them.
    """
    for layer in layers:
        wrap_layer(layer, Level.RECOMPUTE, partial(_recomputed, layer))


def _recomputed(layer: nn.Layer, forward: Callable[..., Any], hidden: Tensor, *inputs: Any) -> Any:
    is_trained = not all(p.stop_gradient for p in layer.parameters())
    needs_gradient = is_trained or not hidden.stop_gradient
    if not (layer.training and paddle.is_grad_enabled() and needs_gradient):
        return forward(hidden, *inputs)
    if hidden.stop_gradient:
        # Paddle's recompute is an autograd operation on the inputs: if none of them needs a
        # gradient, the layer's parameters would silently get none.
        hidden = hidden.detach()
        hidden.stop_gradient = False
    return recompute(forward, hidden, *inputs)
