"""Gradients made whole: over the ranks of one model, and over the parts of the data."""

from collections.abc import Iterator, Sequence

import paddle
import paddle.distributed as dist
from paddle import Tensor

# Elements that travel in one collective: large enough to hide latency, small beside a model.
BUCKET_ELEMENTS = 1 << 25


@paddle.no_grad()
def sum_partial_gradients(parameters: Sequence[Tensor], group) -> None:
    """Sum over the mp group the gradients of `is_partial` parameters, see `parallel.tensor`."""
    sum_gradients([p for p in parameters if getattr(p, "is_partial", False)], group)


@paddle.no_grad()
def sum_gradients(parameters: Sequence[Tensor], group) -> None:
    """Add up gradients over a group, in few collectives, the same ones on every rank.

    A rank without a gradient for a parameter takes part with zeros; where no rank has one, as for
    the vision tower in a text-only step, all of them end with zeros.
    """
    trained = [parameter for parameter in parameters if not parameter.stop_gradient]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = paddle.zeros_like(parameter)
    for bucket in _buckets(trained):
        flat = paddle.concat([p.grad.astype("float32").reshape([-1]) for p in bucket])
        dist.all_reduce(flat, group=group)
        totals = paddle.split(flat, [p.size for p in bucket])
        for parameter, total in zip(bucket, totals, strict=True):
            paddle.assign(
                total.reshape(parameter.shape).astype(parameter.grad.dtype), parameter.grad
            )


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for parameter in parameters:
        if bucket and filled + parameter.size > BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += parameter.size
    if bucket:
        yield bucket
