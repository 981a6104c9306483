"""Expert parallelism: the experts of a layer are divided over a group that exchanges token rows.

An all-to-all sends each row to the ranks of its experts, and another one returns the results. The
ranks of the group (see `paddle_vl.parallel.mesh`) have different rows: of different samples, and
under sequence parallelism each mp rank its share of a batch. An expert gets the rows of all of
them, so its gradient needs a sum only over the ranks with the same experts.

An all-to-all of uneven sizes needs them on the host. They depend on the layer's routing, and so on
the output of the layer before: the host reads them once per layer and micro-batch, in the forward
pass. The backward pass and a recomputed forward use the same sizes (`RoutedRows.plan`).

Shapes: N assignments of this rank's rows, sorted by expert; R received rows and one of zeros; S
ranks of the group; E experts, H of them on this rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import Dispatch, Experts, GroupSizes, reorder_rows, sort_by_expert
from paddle_vl.parallel.collectives import all_gathered


def shard_experts(group, make: Callable[[int], Experts], num_experts: int) -> Experts:
    """This rank's experts of a layer, with the exchange of rows; `make(n)` builds n experts.

    Args:
        group: of ranks with different rows; their number divides `num_experts`.
    """
    experts = make(num_experts // group.nranks)
    experts.num_experts = num_experts
    experts.exchange = RowExchange(group, num_experts)
    return experts


class ExchangePlan(NamedTuple):
    """Which rows leave and arrive.

    Attributes:
        leaving, arriving: rows to and from each rank of the group.
        sorting: sorts the arriving rows, and one row of zeros behind them, by expert.
        sizes: the rows of each of this rank's experts, then.
    """

    leaving: list[int]
    arriving: list[int]
    sorting: Dispatch
    sizes: GroupSizes


class RowExchange:
    """Runs a rank's experts on the rows that all ranks of the group send it."""

    def __init__(self, group, num_experts: int):
        self.group, self.num_local = group, num_experts // group.nranks

    def plan(self, counts_E: Tensor) -> ExchangePlan:
        """Gather the row counts of all ranks and read them: the one host read of a layer.

        Args:
            counts_E: int64, this rank's rows per expert.
        """
        size, rank, num_local = self.group.nranks, self.group.rank, self.num_local
        counts_SE = all_gathered(counts_E.unsqueeze(0), self.group)
        counts_SSH = counts_SE.numpy().reshape([size, size, num_local])
        counts_SS = counts_SSH.sum(axis=2)
        leaving, arriving = counts_SS[rank].tolist(), counts_SS[:, rank].tolist()
        # Rows arrive in the order (rank, expert). Paddle's kernels fail on zero rows, so the last
        # expert always gets one more row of zeros.
        own_SH = counts_SE[:, rank * num_local : (rank + 1) * num_local]
        block_R = paddle.searchsorted(
            own_SH.reshape([-1]).cumsum(),
            paddle.arange(sum(arriving) + 1, dtype="int64"),
            right=True,
        )
        expert_R = block_R.clip(max=size * num_local - 1) % num_local
        sorting = sort_by_expert(expert_R, num_local)
        own_H = counts_SSH[:, rank].sum(axis=0)
        own_H[-1] += 1
        return ExchangePlan(leaving, arriving, sorting, GroupSizes(sorting.counts, own_H.tolist()))

    def __call__(
        self, run: Callable[[Tensor, GroupSizes], Tensor], x_ND: Tensor, plan: ExchangePlan
    ) -> Tensor:
        """The experts' output for this rank's rows, in the rows' order.

        Args:
            run: applies this rank's experts to rows sorted by expert.
            x_ND: this rank's rows, sorted by expert.
            plan: for the counts of these rows.
        """
        leaving, arriving, (order_R, place_R, _), sizes = plan
        x_RD = _AllToAll.apply(x_ND, leaving, arriving, self.group)
        x_RD = paddle.concat([x_RD, paddle.zeros_like(x_ND[:1])])
        y_RD = run(reorder_rows(x_RD, order_R, place_R), sizes)
        y_RD = reorder_rows(y_RD, place_R, order_R)[:-1]
        return _AllToAll.apply(y_RD, arriving, leaving, self.group)


class _AllToAll(PyLayer):
    """Consecutive rows to each rank of the group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, x_ND, leaving, arriving, group):
        ctx.sizes, ctx.group = (leaving, arriving), group
        return _all_to_all(x_ND, leaving, arriving, group)

    @staticmethod
    def backward(ctx, grad_RD):
        leaving, arriving = ctx.sizes
        return _all_to_all(grad_RD, arriving, leaving, ctx.group)


def _all_to_all(x_ND: Tensor, leaving: list[int], arriving: list[int], group) -> Tensor:
    rows = paddle.empty([sum(arriving), x_ND.shape[1]], dtype=x_ND.dtype)
    dist.alltoall_single(rows, x_ND.contiguous(), leaving, arriving, group=group)
    return rows
