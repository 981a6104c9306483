"""Collectives on tensors without autograd, and the reduction of gradients.

Fleet's own operations between tensor-parallel layers have gradients; T token rows, all but the
first two act on dim 0:

| operation | forward | backward |
| --- | --- | --- |
| `mp_ops._c_identity` | identity | all-reduce |
| `mp_ops._mp_allreduce` | all-reduce | identity |
| `ScatterOp` | keep this rank's rows | all-gather |
| `AllGatherOp` | all-gather; ranks use the rows differently | reduce-scatter |
| `GatherOp` | all-gather; ranks compute the same from the rows | keep this rank's rows |
| `ReduceScatterOp` | reduce-scatter | all-gather |
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients_with_group,
)

from paddle_vl.nn.flat_buckets import fill_gradient
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.nn.transfer import rows_in_order

# Elements per collective: large enough to hide latency, small beside a model.
BUCKET_ELEMENTS = 1 << 25


def divide_gradient(x: Tensor, ranks: int) -> Tensor:
    """Identity; backward divides by `ranks`, for equal gradients before an all-reduce."""
    return _DivideGradient.apply(x, ranks)


def all_reduced(x: Tensor, group, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum of every rank's `x`, or another reduction; without a gradient."""
    total = x.clone()
    dist.all_reduce(total, op=operation, group=group)
    return total


def all_gathered(x_TD: Tensor, group) -> Tensor:
    """The rows of all ranks, equally many each, in the group's order; without a gradient."""
    rows = paddle.empty([x_TD.shape[0] * group.nranks, *x_TD.shape[1:]], dtype=x_TD.dtype)
    dist.stream.all_gather(rows, x_TD.contiguous(), group=group)
    return rows


def all_gathered_in_order(own_MC: Tensor, numbers: Sequence[np.ndarray], group) -> Tensor:
    """Rows of all ranks in the order of their numbers; without a gradient.

    Ranks have different numbers of rows, which are padded for the all-gather. Without any row no
    rank communicates.

    Args:
        numbers: row numbers of each rank in the group's order, every one from 0 on once.
    """
    longest, missing = max(map(len, numbers)), max(map(len, numbers)) - own_MC.shape[0]
    if not longest:
        return own_MC.clone()
    if missing:
        padding = paddle.zeros([missing, *own_MC.shape[1:]], dtype=own_MC.dtype)
        own_MC = paddle.concat([own_MC, padding])
    places = [rank * longest + np.arange(len(own)) for rank, own in enumerate(numbers)]
    order = np.argsort(np.concatenate(numbers))
    return rows_in_order(all_gathered(own_MC, group), np.concatenate(places)[order])


def all_to_all(x_ND: Tensor, leaving: list[int], arriving: list[int], group) -> Tensor:
    """Consecutive rows to each rank of the group, and so many from each; without a gradient."""
    rows = paddle.empty([sum(arriving), x_ND.shape[1]], dtype=x_ND.dtype)
    dist.alltoall_single(rows, x_ND.contiguous(), leaving, arriving, group=group)
    return rows


def rows_of_items(items: np.ndarray, rows_I: np.ndarray) -> np.ndarray:
    """`[M]` int64: numbers of the rows of some items, in the order of the items.

    Args:
        rows_I: number of rows of every item.
    """
    ends_I = rows_I.cumsum()
    ranges = [np.arange(int(rows_I[i])) + int(ends_I[i] - rows_I[i]) for i in items]
    return np.concatenate([np.zeros(0, dtype=np.int64), *ranges])


def gathered_arrays(value: Tensor, group) -> list[np.ndarray]:
    """The values of all ranks on the host, of equal shape, in the group's order."""
    shards: list[Tensor] = []
    dist.all_gather(shards, value, group=group)
    return [shard.numpy() for shard in shards]


def gathered_rows(own: np.ndarray, group) -> np.ndarray:
    """The rows of all ranks, equally many each, in the group's order."""
    sent = paddle.to_tensor(own.reshape(-1).view(np.uint8))
    return all_gathered(sent, group).numpy().view(own.dtype).reshape([-1, *own.shape[1:]])


@paddle.no_grad()
def all_reduce_partial_gradients(tensors: Iterable[tuple[Tensor, ParamSpec]], group) -> None:
    """All-reduce partial gradients (see `ParamSpec`) over the mp group."""
    all_reduce_gradients([t for t, spec in tensors if spec.has_partial_gradient], group)


@paddle.no_grad()
def all_reduce_gradients(tensors: Sequence[Tensor], group) -> None:
    """All-reduce gradients in fleet's buckets, which are the same on every rank.

    A missing gradient counts as zeros and becomes zeros if no rank has one, as for the vision tower
    in a text-only step; the optimizer leaves such a parameter out. Fleet leaves missing gradients
    out of its buckets, so ranks that miss different ones would sum unrelated gradients.
    """
    trained = [tensor for tensor in tensors if not tensor.stop_gradient]
    for tensor in trained:
        fill_gradient(tensor)
    fused_allreduce_gradients_with_group(trained, group, 4 * BUCKET_ELEMENTS, scale=1.0)


class InOrder:
    """Starts the collective of each part once it and all parts before it are complete.

    Ranks whose micro-batches have different optional branches complete parts in different orders,
    and a part in which a gradient is missing never.

    Args:
        starts: of each part, in the order of all ranks.
    """

    def __init__(self, starts: Sequence[Callable[[], None]]):
        self._starts = starts
        self._complete: set[int] = set()
        self._num_started = 0

    def complete(self, number: int) -> None:
        """A part has all of its gradients."""
        self._complete.add(number)
        while self._num_started in self._complete:
            self._num_started += 1
            self._starts[self._num_started - 1]()

    def finish(self) -> None:
        """After the last backward pass: start the others, and begin anew."""
        for start in self._starts[self._num_started :]:
            start()
        self._complete, self._num_started = set(), 0


class AllToAll(PyLayer):
    """Consecutive rows to each rank of the group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, x_ND, leaving, arriving, group):
        ctx.sizes, ctx.group = (leaving, arriving), group
        return all_to_all(x_ND, leaving, arriving, group)

    @staticmethod
    def backward(ctx, grad_RD):
        leaving, arriving = ctx.sizes
        return all_to_all(grad_RD, arriving, leaving, ctx.group)


class _InTurn(PyLayer):
    """Views of other shapes: Paddle takes equal ones for tensors that are written in place."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.needs_x = not x.stop_gradient
        return x.unsqueeze(0), y.unsqueeze(0)

    @staticmethod
    def backward(ctx, grad_x, grad_y):
        return grad_x.squeeze(0) if ctx.needs_x else None, grad_y.squeeze(0)


def in_turn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See `RegionOps.in_turn`."""
    if y.stop_gradient or not paddle.is_grad_enabled():
        return x, y
    x, y = _InTurn.apply(x, y)
    return x.squeeze(0), y.squeeze(0)


class _DivideGradient(PyLayer):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.ranks
