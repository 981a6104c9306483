"""Gradients made whole: over the ranks of one model, and over the parts of the data."""

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients_with_group,
)

from paddle_vl.nn.master_weights import gradient_of

# Elements that travel in one collective: large enough to hide latency, small beside a model.
BUCKET_ELEMENTS = 1 << 25


@paddle.no_grad()
def sum_partial_gradients(parameters: Sequence[Tensor], group) -> None:
    """Sum over the mp group the gradients of `is_partial` parameters, see `parallel.tensor`."""
    sum_gradients([p for p in parameters if getattr(p, "is_partial", False)], group)


@paddle.no_grad()
def sum_gradients(parameters: Sequence[Tensor], group) -> None:
    """Add up gradients over a group, in fleet's buckets, the same ones on every rank.

    A rank without a gradient for a parameter takes part with zeros; where no rank has one, as for
    the vision tower in a text-only step, all of them end with zeros. Fleet leaves missing ones out,
    and ranks that miss different ones would add up what does not belong together.
    """
    trained = [parameter for parameter in parameters if not parameter.stop_gradient]
    for parameter in trained:
        if gradient_of(parameter) is None:
            parameter.grad = paddle.zeros_like(parameter)
    fused_allreduce_gradients_with_group(trained, group, 4 * BUCKET_ELEMENTS, scale=1.0)
