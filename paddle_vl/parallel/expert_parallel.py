"""Expert parallelism: the experts of a layer are divided over a group that exchanges token rows.

An all-to-all sends each row to the ranks of its experts, and another one returns the results. The
ranks of the group (see `paddle_vl.parallel.mesh`) have different rows: of different samples, and
under sequence parallelism each mp rank its share of a batch. An expert gets the rows of all of
them, so its gradient needs a sum only over the ranks with the same experts.

An all-to-all of uneven sizes needs them on the host. They depend on the layer's routing, and so on
the output of the layer before: the host reads them once per layer and micro-batch, in the forward
pass. The backward pass and a recomputed forward use the same sizes (`RoutedRows.plan`).

With an `ExpertCapacity` each two ranks exchange as many rows as there is room for, and the host
reads nothing: the rows of a rank sit at the first of its places, and the other places are holes.

Shapes: N assignments of this rank's rows, sorted by expert; R received rows and one of zeros; S
ranks of the group; E experts, H of them on this rank; C places, equally many for each rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import paddle
from paddle import Tensor

from paddle_vl.nn.experts import (
    Dispatch,
    ExpertCapacity,
    Experts,
    GroupSizes,
    reorder_rows,
    sort_by_expert,
)
from paddle_vl.parallel.collectives import AllToAll, all_gathered


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

    def plan(
        self, dispatch: Dispatch, copies: int, capacity: ExpertCapacity | None = None
    ) -> tuple[Dispatch, ExchangePlan]:
        """Gather the row counts of all ranks, and without a capacity read them: the one host read
        of a layer.

        Args:
            dispatch: of this rank's rows.
            copies: experts of each row.

        Returns:
            The dispatch of the rows that leave, and what becomes of them.
        """
        size, rank, num_local = self.group.nranks, self.group.rank, self.num_local
        counts_SE = all_gathered(dispatch.counts.unsqueeze(0), self.group)
        if capacity is not None:
            room = capacity.room(copies, size)
            dispatch, is_overflow = self._seated(dispatch, room)
            capacity.overflows.append(is_overflow)
            return dispatch, self._plan_of_places(counts_SE, room)
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
        sizes = GroupSizes(sorting.counts, own_H.tolist())
        return dispatch, ExchangePlan(leaving, arriving, sorting, sizes)

    def _seated(self, dispatch: Dispatch, room: int) -> tuple[Dispatch, Tensor]:
        """The rows of each rank at its places, and whether some rank has more than `room`. These
        share its last place."""
        order_N, place_N, counts_E, _ = dispatch
        size, total = self.group.nranks, order_N.shape[0]
        leaving_S = counts_E.reshape([size, -1]).sum(axis=1)
        ends_S, numbers_N = leaving_S.cumsum(), paddle.arange(total, dtype="int64")
        rank_N = paddle.searchsorted(ends_S, numbers_N, right=True)
        own_N = numbers_N - paddle.index_select(ends_S - leaving_S, rank_N)
        place_of_sorted_N = rank_N * room + own_N.clip(max=room - 1)
        holes_C = paddle.full([size * room], total, dtype="int64")
        order_C = paddle.scatter(holes_C, place_of_sorted_N, order_N)
        place_N = paddle.index_select(place_of_sorted_N, place_N)
        return Dispatch(order_C, place_N, counts_E, has_holes=True), (leaving_S > room).any()

    def _plan_of_places(self, counts_SE: Tensor, room: int) -> ExchangePlan:
        """Sorts the arriving rows by expert, and behind them the holes, which are zeros."""
        size, rank, num_local = self.group.nranks, self.group.rank, self.num_local
        ends_SH = counts_SE[:, rank * num_local : (rank + 1) * num_local].cumsum(axis=1)
        first_S1 = (paddle.arange(size, dtype="int64") * room).unsqueeze(1)
        # Of each rank the experts' rows, then holes, which are number H.
        ends_SX = paddle.concat([ends_SH.clip(max=room) + first_S1, first_S1 + room], axis=1)
        numbers_R = paddle.arange(size * room + 1, dtype="int64")
        block_R = paddle.searchsorted(ends_SX.reshape([-1]), numbers_R, right=True)
        kind_R = block_R.clip(max=size * (num_local + 1) - 1) % (num_local + 1)
        sorting = sort_by_expert(kind_R, num_local + 1)
        # The last expert gets one of them, as with exact sizes, for the same bits.
        is_last_H = paddle.arange(num_local, dtype="int64") == num_local - 1
        counts_H = sorting.counts[:num_local] + is_last_H.astype("int64")
        sizes = GroupSizes(counts_H, may_read=False)
        return ExchangePlan([room] * size, [room] * size, sorting, sizes)

    def __call__(
        self, run: Callable[[Tensor, GroupSizes], Tensor], x_ND: Tensor, plan: ExchangePlan
    ) -> Tensor:
        """The experts' output for this rank's rows, in the rows' order.

        Args:
            run: applies this rank's experts to rows sorted by expert.
            x_ND: this rank's rows, sorted by expert.
            plan: for the counts of these rows.
        """
        leaving, arriving, sorting, sizes = plan
        order_R, place_R = sorting.order, sorting.place
        x_RD = AllToAll.apply(x_ND, leaving, arriving, self.group)
        x_RD = paddle.concat([x_RD, paddle.zeros_like(x_ND[:1])])
        y_RD = run(reorder_rows(x_RD, order_R, place_R), sizes)
        y_RD = reorder_rows(y_RD, place_R, order_R)[:-1]
        return AllToAll.apply(y_RD, arriving, leaving, self.group)
