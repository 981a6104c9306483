"""Expert parallelism: the experts of a layer are divided over a group that exchanges token rows.

An all-to-all sends each row to the ranks of its experts, and another one returns the results. The
group consists of neighbouring dp ranks, which have different samples. An expert gets the rows of
all of them, so its gradient needs an all-reduce only over the ranks with the same experts.

An all-to-all of uneven sizes needs them on the host. They depend on the layer's routing, and so on
the output of the layer before: the host reads them once per layer and micro-batch, in the forward
pass. The backward pass and a recomputed forward use the same sizes (`RoutedRows.plan`).

Shapes: N assignments of this rank's rows, sorted by expert; R received rows; S ranks of the group;
E experts, H of them on this rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import Experts, reorder_rows
from paddle_vl.parallel.collectives import all_gathered


class FleetExpertSharding:
    """Shards experts over a group of ranks with different samples."""

    def __init__(self, group):
        self.group = group

    def shard(self, make: Callable[[int], Experts], num_experts: int) -> Experts:
        """This rank's experts, with the exchange of rows; `make(n)` builds n experts.

        Raises:
            ValueError: the number of ranks does not divide the number of experts.
        """
        size = self.group.nranks
        if num_experts % size:
            raise ValueError(
                f"text_config.num_experts {num_experts} does not divide by parallel.ep_degree "
                f"{size}: every rank holds equally many; choose another ep_degree"
            )
        experts = make(num_experts // size)
        experts.num_experts = num_experts
        experts.exchange = RowExchange(self.group, num_experts)
        return experts


class ExchangePlan(NamedTuple):
    """Which rows leave and arrive.

    Attributes:
        leaving, arriving: rows to and from each rank of the group.
        order: `[R]` int64, the permutation of the arriving rows that sorts them by expert.
        inverse: `[R]` int64, the inverse of `order`.
        counts: `[H]` int64, rows of each of this rank's experts, one more of the last.
    """

    leaving: list[int]
    arriving: list[int]
    order: Tensor
    inverse: Tensor
    counts: Tensor


class RowExchange:
    """Runs a rank's experts on the rows that all ranks of the group send it."""

    def __init__(self, group, num_experts: int):
        self.group, self.num_local = group, num_experts // group.nranks

    def plan(self, counts_E: Tensor) -> ExchangePlan:
        """Gather the row counts of all ranks and read them: the one host read of a layer.

        Args:
            counts_E: int64, this rank's rows per expert.
        """
        size, rank = self.group.nranks, self.group.rank
        counts_SE = all_gathered(counts_E.unsqueeze(0), self.group).numpy()
        counts_SSH = counts_SE.reshape([size, size, self.num_local])
        leaving, arriving_SH = counts_SSH[rank].sum(axis=1), counts_SSH[:, rank]
        order, inverse = _by_expert(arriving_SH)
        counts_H = arriving_SH.sum(axis=0)
        # Paddle's kernels fail on zero rows, so the last expert always gets one more row of zeros.
        counts_H[-1] += 1
        arriving = arriving_SH.sum(axis=1).tolist()
        return ExchangePlan(leaving.tolist(), arriving, order, inverse, paddle.to_tensor(counts_H))

    def __call__(
        self, run: Callable[[Tensor, Tensor], Tensor], x_ND: Tensor, plan: ExchangePlan
    ) -> Tensor:
        """The experts' output for this rank's rows, in the rows' order.

        Args:
            run: applies this rank's experts to rows sorted by expert with `[H]` counts.
            x_ND: this rank's rows, sorted by expert.
            plan: for the counts of these rows.
        """
        leaving, arriving, order, inverse, counts_H = plan
        x_RD = _AllToAll.apply(x_ND, leaving, arriving, self.group)
        x_RD = paddle.concat([reorder_rows(x_RD, order, inverse), paddle.zeros_like(x_ND[:1])])
        y_RD = run(x_RD, counts_H)[:-1]
        y_RD = reorder_rows(y_RD, inverse, order)
        return _AllToAll.apply(y_RD, arriving, leaving, self.group)


def _by_expert(arriving_SH: np.ndarray) -> tuple[Tensor, Tensor]:
    """The permutation from (rank, expert) order to expert order, and its inverse: `[R]` int64."""
    expert_R = np.tile(np.arange(arriving_SH.shape[1]), len(arriving_SH)).repeat(
        arriving_SH.reshape(-1)
    )
    order_R = np.argsort(expert_R, kind="stable")
    return paddle.to_tensor(order_R), paddle.to_tensor(np.argsort(order_R, kind="stable"))


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
