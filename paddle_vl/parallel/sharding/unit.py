"""A layer whose backward pass is one step: afterwards all its gradients are there.

Left to Paddle's engine, the operations of neighbouring layers interleave: a gradient that comes
through a slice of a weight may arrive after the layer's input got its own. So the layer's graph is
kept apart and run by a backward pass of its own, as recomputation does, inside of which parameters
have storage and behind which gradients are reduced, at the same places on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_vl.parallel.sharding.buckets import Bucket


class UnitForward:
    """Stands for a layer's forward, with or without recomputation in it.

    The layer takes tensors that need a gradient as positional arguments of their own, not inside
    of others, and returns one tensor or a tuple of them.

    Args:
        takes_storage: parameters have storage in forward and in backward only.
    """

    def __init__(self, layer: nn.Layer, bucket: Bucket, takes_storage: bool):
        self.forward = layer.forward
        self.bucket, self.takes_storage = bucket, takes_storage

    def __call__(self, *inputs: Any) -> Tensor:
        differentiable = [value for value in inputs if _needs_gradient(value)]
        if not (paddle.is_grad_enabled() and (self.bucket.trained or differentiable)):
            with self.storage():
                return self.forward(*inputs)
        # With it the backward pass comes here although no input needs a gradient.
        anchor = paddle.zeros([1])
        anchor.stop_gradient = False
        return _RunApart.apply(_Call(self, inputs), anchor, *differentiable)

    @contextmanager
    def storage(self) -> Iterator[None]:
        if not self.takes_storage:
            yield
            return
        self.bucket.give_storage()
        try:
            yield
        finally:
            self.bucket.take_storage()


class _Call:
    """Hides a unit and its inputs from Paddle, which would look for tensors in a tuple."""

    def __init__(self, unit: UnitForward, inputs: tuple):
        self.unit, self.inputs = unit, inputs


class _RunApart(PyLayer):
    @staticmethod
    def forward(ctx, call, anchor, *differentiable):
        ctx.unit, ctx.leaves, inputs = call.unit, [], []
        for value in call.inputs:
            if _needs_gradient(value):
                value = value.detach()
                value.stop_gradient = False
                ctx.leaves.append(value)
            inputs.append(value)
        with paddle.enable_grad(), ctx.unit.storage():
            output = ctx.unit.forward(*inputs)
        is_several = isinstance(output, tuple)
        ctx.outputs = output if is_several else (output,)
        return tuple(value.detach() for value in output) if is_several else output.detach()

    @staticmethod
    def backward(ctx, *grads):
        unit, outputs, leaves = ctx.unit, ctx.outputs, ctx.leaves
        del ctx.outputs, ctx.leaves
        pairs = [pair for pair in zip(outputs, grads, strict=True) if _needs_gradient(pair[0])]
        with unit.storage():
            if pairs:
                paddle.autograd.backward(*map(list, zip(*pairs, strict=True)))
        del outputs, pairs
        unit.bucket.reduce_gradients()
        # Paddle crashes on None for a tensor that needs a gradient.
        grads = [paddle.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return paddle.zeros([1]), *grads


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.stop_gradient
