"""A sharding unit: a layer whose parameters are unsharded for its forward and for its backward.

In one backward pass of Paddle's engine the operations of neighbouring layers interleave: the
gradient of a sliced weight may arrive after that of the layer's input. So the layer has a separate
graph with its own backward pass, as in recomputation. Parameters have storage inside it, and all
gradients exist and are reduced after it, in the same order on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.parallel.sharding.buckets import Bucket


class UnshardedBuckets:
    """The unsharded buckets of stage 3: those in use, kept ones, a prefetched one.

    Besides kept ones at most two are unsharded at any time. Every rank uses the same buckets in the
    same order, so all ranks start the same all-gathers.

    Attributes:
        kept: those that stay unsharded after a use of theirs.
    """

    def __init__(self):
        self._unsharded: set[Bucket] = set()
        self.kept: set[Bucket] = set()
        self._prefetched: Bucket | None = None

    @contextmanager
    def use(self, bucket: Bucket, following: Bucket | None = None) -> Iterator[None]:
        """Unshard a bucket inside the block, and after it if it is kept.

        Args:
            following: the next bucket; its all-gather starts before any computation here.
        """
        if bucket not in self._unsharded:
            bucket.unshard()
            self._unsharded.add(bucket)
        if bucket is self._prefetched:
            self._prefetched = None
        if following is not None and following not in self._unsharded and self._prefetched is None:
            following.start_all_gather()
            self._prefetched = following
        try:
            yield
        finally:
            if bucket not in self.kept:
                self._reshard(bucket)

    def discard_prefetched(self) -> None:
        """Drop the prefetched bucket if it was not used."""
        if self._prefetched is not None:
            self._prefetched.discard_all_gather()
            self._prefetched = None

    def reshard_all(self) -> None:
        """Reshard everything; nothing is in use."""
        self.discard_prefetched()
        self.kept.clear()
        for bucket in list(self._unsharded):
            self._reshard(bucket)

    def _reshard(self, bucket: Bucket) -> None:
        self._unsharded.discard(bucket)
        bucket.reshard()


class UnitForward:
    """Wraps a layer's forward, with or without recomputation in it.

    Tensors that need a gradient must be positional arguments of the layer, not nested ones. It
    returns one tensor or a tuple of tensors.

    Attributes:
        previous, following: neighbours in the chain. The following one runs next in a forward pass;
            the previous one in a backward pass, if it has an open graph.
        num_open: graphs of this layer whose backward pass has not run.

    Args:
        unsharded: unshards the bucket in forward and backward; None at stage 2.
        keeps: whether a forward pass with gradients keeps the bucket unsharded until the end of the
            step.
        after_backward: called after each backward pass, with whether it was that of the last open
            graph.
    """

    def __init__(
        self,
        bucket: Bucket,
        unsharded: UnshardedBuckets | None,
        keeps: bool,
        after_backward: Callable[[Bucket, bool], None],
    ):
        self.bucket, self.unsharded, self.keeps = bucket, unsharded, keeps
        self.after_backward = after_backward
        self.previous: UnitForward | None = None
        self.following: UnitForward | None = None
        self.num_open = 0

    def __call__(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        differentiable = [value for value in inputs if needs_gradient(value)]
        if not (paddle.is_grad_enabled() and (self.bucket.trained or differentiable)):
            with self.in_forward():
                return forward(*inputs)
        self.num_open += 1
        # Makes autograd call this backward even if no input needs a gradient.
        anchor = paddle.zeros([1])
        anchor.stop_gradient = False
        # Paddle would search a tuple of the inputs for tensors.
        return _RunApart.apply(self, partial(forward, *inputs), anchor, *differentiable)

    def in_forward(self) -> AbstractContextManager:
        """The context of the layer's forward."""
        # Frees the input of the previous micro-batch's last reduction before these activations.
        self.bucket.reductions.make_room()
        following = self.following.bucket if self.following else None
        return self._use(following)

    def in_backward(self) -> AbstractContextManager:
        """The context of its backward pass, with the recomputed forward."""
        previous = self.previous
        return self._use(previous.bucket if previous and previous.num_open else None)

    def end_backward(self) -> None:
        self.num_open -= 1
        self.after_backward(self.bucket, self.num_open == 0)

    def _use(self, next_bucket: Bucket | None) -> AbstractContextManager:
        if self.unsharded is None:
            return nullcontext()
        if self.keeps and paddle.is_grad_enabled():
            self.unsharded.kept.add(self.bucket)
        return self.unsharded.use(self.bucket, next_bucket)


class TableForward(UnitForward):
    """Wraps the forward of a token embedding or a head, which may share a weight.

    An embedding's backward pass does not need the weight. A head's follows the loss at once, so the
    weight stays unsharded for it.
    """

    def __call__(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        if any(needs_gradient(value) for value in inputs):
            return super().__call__(forward, *inputs)
        with self.in_forward():
            return forward(*inputs)

    def in_forward(self) -> AbstractContextManager:
        if self.num_open and self.unsharded is not None:
            self.unsharded.kept.add(self.bucket)
        return super().in_forward()

    def in_backward(self) -> AbstractContextManager:
        if self.num_open == 1 and not self.keeps and self.unsharded is not None:
            self.unsharded.kept.discard(self.bucket)
        return super().in_backward()


class _RunApart(PyLayer):
    @staticmethod
    def forward(ctx, unit, layer, anchor, *differentiable):
        ctx.unit, ctx.leaves, inputs = unit, [], []
        for value in layer.args:
            if needs_gradient(value):
                value = value.detach()
                value.stop_gradient = False
                ctx.leaves.append(value)
            inputs.append(value)
        with paddle.enable_grad(), unit.in_forward():
            output = layer.func(*inputs)
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
                tensors, gradients = zip(*pairs, strict=True)
                paddle.autograd.backward(list(tensors), list(gradients))
        del outputs, pairs
        unit.end_backward()
        # Paddle crashes on None for a tensor that needs a gradient.
        grads = [paddle.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return paddle.zeros([1]), *grads


def needs_gradient(value: Any) -> bool:
    """Whether this is a tensor that needs a gradient."""
    return isinstance(value, Tensor) and not value.stop_gradient
