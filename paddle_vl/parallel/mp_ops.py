"""Communication inside a model-parallel group, each operation with its gradient.

What one rank does in the forward pass and what in the backward pass come as a pair: leaving one out
gives numbers that look right and train on a part. T token rows; all of these act on dim 0.

| operation | forward | backward |
| --- | --- | --- |
| `copy_to_group` | as is | sum |
| `sum_over_group` | sum | as is |
| `scatter_rows` | this rank's rows | gather rows |
| `gather_rows` | gather rows | sum, this rank's rows |
| `replicate_rows` | gather rows | this rank's rows |
| `sum_scatter_rows` | sum, this rank's rows | gather rows |
| `divide_gradient` | as is | an equal part |
"""

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer


def copy_to_group(x: Tensor, group) -> Tensor:
    """In front of a product whose columns are split: every rank's part of the gradient counts."""
    return _Copy.apply(x, group)


def sum_over_group(x: Tensor, group) -> Tensor:
    """Behind a product whose rows are split: every rank holds a part of the sum."""
    return _Sum.apply(x, group)


def scatter_rows(x_TD: Tensor, group) -> Tensor:
    """The same rows on every rank to each rank's own part of them."""
    return _ScatterRows.apply(x_TD, group)


def gather_rows(x_TD: Tensor, group) -> Tensor:
    """Each rank's rows to all rows, which the ranks then use in different ways."""
    return _GatherRows.apply(x_TD, group)


def replicate_rows(x_TD: Tensor, group) -> Tensor:
    """Each rank's rows to all rows, of which the ranks then all compute the same."""
    return _ReplicateRows.apply(x_TD, group)


def sum_scatter_rows(x_TD: Tensor, group) -> Tensor:
    """Parts of a sum over all rows to each rank's own rows of the sum."""
    return _SumScatterRows.apply(x_TD, group)


def divide_gradient(x: Tensor, ranks: int) -> Tensor:
    """In front of what every rank computes alike, where the ranks' gradients are summed."""
    return _DivideGradient.apply(x, ranks)


def summed(x: Tensor, group) -> Tensor:
    """The sum of every rank's `x`, without a gradient."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(x_TD: Tensor, group) -> Tensor:
    """Equal numbers of rows of every rank, rank by rank, without a gradient."""
    rows = paddle.empty([x_TD.shape[0] * group.nranks, *x_TD.shape[1:]], dtype=x_TD.dtype)
    dist.stream.all_gather(rows, x_TD.contiguous(), group=group)
    return rows


def own_rows(x_TD: Tensor, group) -> Tensor:
    """This rank's part of the rows, without a gradient."""
    rows = x_TD.shape[0] // group.nranks
    return x_TD[group.rank * rows : (group.rank + 1) * rows].contiguous()


def sum_scattered(x_TD: Tensor, group) -> Tensor:
    """This rank's rows of the sum, without a gradient."""
    own = paddle.empty([x_TD.shape[0] // group.nranks, *x_TD.shape[1:]], dtype=x_TD.dtype)
    dist.stream.reduce_scatter(own, x_TD.contiguous(), group=group)
    return own


class _Copy(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group)


class _Sum(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class _DivideGradient(PyLayer):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.ranks


class _ScatterRows(PyLayer):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return own_rows(x_TD, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group)


class _GatherRows(PyLayer):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return gathered(x_TD, group)

    @staticmethod
    def backward(ctx, grad):
        return sum_scattered(grad, ctx.group)


class _ReplicateRows(PyLayer):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return gathered(x_TD, group)

    @staticmethod
    def backward(ctx, grad):
        return own_rows(grad, ctx.group)


class _SumScatterRows(PyLayer):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return sum_scattered(x_TD, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group)
