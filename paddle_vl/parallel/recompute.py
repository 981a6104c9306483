"""Recomputation: a layer keeps its inputs only and runs again in the backward pass."""

from collections.abc import Iterable

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute


def recompute_layers(layers: Iterable[nn.Layer]) -> None:
    """Make every call of these layers during training a recomputed one.

    A layer must take its tensors as positional arguments, the hidden rows first, so that Paddle
    tracks them. Evaluation and generation are not affected.
    """
    for layer in layers:
        layer.forward = _Recomputed(layer)


class _Recomputed:
    def __init__(self, layer: nn.Layer):
        self.layer = layer
        self.forward = layer.forward

    def __call__(self, hidden, *inputs):
        is_trained = not all(p.stop_gradient for p in self.layer.parameters())
        needs_gradient = is_trained or not hidden.stop_gradient
        if not (self.layer.training and paddle.is_grad_enabled() and needs_gradient):
            return self.forward(hidden, *inputs)
        if hidden.stop_gradient:
            # Paddle recomputes through an operation of the inputs alone: without one that needs a
            # gradient, the layer's own parameters would silently get none.
            hidden = hidden.detach()
            hidden.stop_gradient = False
        return recompute(self.forward, hidden, *inputs)
