"""Communication of equal parts without a gradient, and what fleet has no operation for.

Fleet's own operations between tensor-parallel layers, each with its gradient; T token rows, all act
on dim 0 but the first two:

| operation | forward | backward |
| --- | --- | --- |
| `mp_ops._c_identity` | as is | sum |
| `mp_ops._mp_allreduce` | sum | as is |
| `ScatterOp` | this rank's rows | gather rows |
| `AllGatherOp` | gather rows, which ranks use differently | sum, this rank's rows |
| `GatherOp` | gather rows, of which all ranks compute the same | this rank's rows |
| `ReduceScatterOp` | sum, this rank's rows | gather rows |
"""

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer


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


def sum_scattered(x_TD: Tensor, group) -> Tensor:
    """This rank's rows of the sum, without a gradient."""
    own = paddle.empty([x_TD.shape[0] // group.nranks, *x_TD.shape[1:]], dtype=x_TD.dtype)
    dist.stream.reduce_scatter(own, x_TD.contiguous(), group=group)
    return own


class _DivideGradient(PyLayer):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.ranks
