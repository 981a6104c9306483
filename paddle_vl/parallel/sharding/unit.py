"""A layer whose backward pass is one step: afterwards all its gradients are there.

Left to Paddle's engine, the operations of neighbouring layers interleave: a gradient that comes
through a slice of a weight may arrive after the layer's input got its own. So the layer's graph is
kept apart and run by a backward pass of its own, as recomputation does, inside of which parameters
have storage and behind which gradients are reduced, at the same places on every rank.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.parallel.sharding.buckets import Bucket
from paddle_vl.parallel.sharding.storage import Storage


class UnitForward:
    """Wraps a layer's forward, with or without recomputation in it.

    The layer takes tensors that need a gradient as positional arguments of their own, not inside
    of others, and returns one tensor or a tuple of them.

    Attributes:
        previous, following: of its chain. The following one runs next in a forward pass; the
            previous one in a backward pass, if it has an open graph.
        num_open: graphs of this layer that await their backward pass.

    Args:
        storage: gives parameters storage in forward and in backward only; None if they have it.
        keeps: what a forward pass with a graph gathered stays until the storage is freed.
        behind_backward: called behind each backward pass.
    """

    def __init__(
        self,
        bucket: Bucket,
        storage: Storage | None,
        keeps: bool,
        behind_backward: Callable[[Bucket], None],
    ):
        self.bucket, self.storage, self.keeps = bucket, storage, keeps
        self.behind_backward = behind_backward
        self.previous: UnitForward | None = None
        self.following: UnitForward | None = None
        self.num_open = 0

    def __call__(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        differentiable = [value for value in inputs if needs_gradient(value)]
        if not (paddle.is_grad_enabled() and (self.bucket.trained or differentiable)):
            with self.in_forward():
                return forward(*inputs)
        self.num_open += 1
        # With it the backward pass comes here although no input needs a gradient.
        anchor = paddle.zeros([1])
        anchor.stop_gradient = False
        return _RunApart.apply(_Call(self, forward, inputs), anchor, *differentiable)

    def in_forward(self) -> AbstractContextManager:
        """Where the layer's forward runs."""
        # What the last micro-batch's end started is not to be held beside these activations.
        self.bucket.reductions.make_room()
        following = self.following.bucket if self.following else None
        return self._whole(following)

    def in_backward(self) -> AbstractContextManager:
        """Where its backward pass runs, the recomputed forward in it."""
        previous = self.previous
        return self._whole(previous.bucket if previous and previous.num_open else None)

    def end_backward(self) -> None:
        """Behind that."""
        self.num_open -= 1
        self.behind_backward(self.bucket)

    def _whole(self, next_bucket: Bucket | None) -> AbstractContextManager:
        if self.storage is None:
            return nullcontext()
        if self.keeps and paddle.is_grad_enabled():
            self.storage.keep(self.bucket)
        return self.storage.of(self.bucket, next_bucket)


class TableForward(UnitForward):
    """Wraps the forward of a token embedding or a head, whose weight others may use too.

    A look-up's backward pass does without the weight. A head's comes right behind the loss, so the
    weight stays whole for it.
    """

    def __call__(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        if any(needs_gradient(value) for value in inputs):
            return super().__call__(forward, *inputs)
        with self.in_forward():
            return forward(*inputs)

    def in_forward(self) -> AbstractContextManager:
        if self.num_open:
            self.storage.keep(self.bucket)
        return super().in_forward()

    def in_backward(self) -> AbstractContextManager:
        if self.num_open == 1 and not self.keeps:
            self.storage.release(self.bucket)
        return super().in_backward()


class _Call:
    """Hides a unit and its inputs from Paddle, which would look for tensors in a tuple."""

    def __init__(self, unit: UnitForward, forward: Callable[..., Any], inputs: tuple):
        self.unit, self.forward, self.inputs = unit, forward, inputs


class _RunApart(PyLayer):
    @staticmethod
    def forward(ctx, call, anchor, *differentiable):
        ctx.unit, ctx.leaves, inputs = call.unit, [], []
        for value in call.inputs:
            if needs_gradient(value):
                value = value.detach()
                value.stop_gradient = False
                ctx.leaves.append(value)
            inputs.append(value)
        with paddle.enable_grad(), ctx.unit.in_forward():
            output = call.forward(*inputs)
        is_several = isinstance(output, tuple)
        ctx.outputs = output if is_several else (output,)
        return tuple(value.detach() for value in output) if is_several else output.detach()

    @staticmethod
    def backward(ctx, *grads):
        unit, outputs, leaves = ctx.unit, ctx.outputs, ctx.leaves
        del ctx.outputs, ctx.leaves
        pairs = [pair for pair in zip(outputs, grads, strict=True) if needs_gradient(pair[0])]
        with unit.in_backward():
            if pairs:
                paddle.autograd.backward(*map(list, zip(*pairs, strict=True)))
        del outputs, pairs
        unit.end_backward()
        # Paddle crashes on None for a tensor that needs a gradient.
        grads = [paddle.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return paddle.zeros([1]), *grads


def needs_gradient(value: Any) -> bool:
    """Whether it is a tensor that a backward pass goes through."""
    return isinstance(value, Tensor) and not value.stop_gradient


def chained(units: Sequence[UnitForward]) -> None:
    """Tell units that run one behind the other of each other."""
    for one, two in itertools.pairwise(units):
        one.following, two.previous = two, one
