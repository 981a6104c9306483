"""Tables whose rows are divided over ranks: a rank asks the owners for the rows that it uses.

The owners are the ranks that have all parameters of a stage between them: sharding x mp, or ep if
that is larger. Each has R / S consecutive rows and their optimizer state; dp ranks have copies.
A rank sends the numbers of its rows, each once, and gets the rows; in the backward pass it sends
their gradients, summed over their uses, and an owner adds up what it gets, in the order of ranks.
So what travels depends on the batch, not on the table. Of a table without a gradient nothing is
sent in the backward pass.

Under sequence parallelism an mp rank asks for the rows of its token rows. Without it each asks for
1 / mp of them, and gets the others from the mp ranks, so that owners get every gradient once.

An all-to-all of uneven sizes needs them on the host: it reads them once per table and micro-batch,
in the forward pass. The backward pass and a recomputed forward use the same plan.

Shapes: T token rows, Y rows of the table for each; N = T * Y numbers of this rank, U different
ones; Q numbers that ranks ask this one for; S ranks; R rows of the table, D their width.
"""

from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.distributed.fleet.utils.sequence_parallel_utils import GatherOp

from paddle_vl.batch.rows import RowPart
from paddle_vl.nn.operations import slice_axis
from paddle_vl.nn.row_table import RowTable
from paddle_vl.parallel.collectives import AllToAll, all_gathered, all_to_all, in_turn


class RequestPlan(NamedTuple):
    """Which rows a rank asks for, and which it is asked for.

    Attributes:
        places: the place of each number of this rank's `[T, Y]` among the U different ones, which
            are sorted by owner.
        asked: `[Q]`, the numbers that this rank is asked for, counted from its first row.
        leaving, arriving: requests to and from each rank.
        num_rows: token rows of all mp ranks.
    """

    places: Tensor
    asked: Tensor
    leaving: list[int]
    arriving: list[int]
    num_rows: int


class ShardedTable(RowTable):
    """This rank's rows of a table.

    Args:
        group: the ranks that have all rows between them.
        mp_group: those of them with the same token rows, or under sequence parallelism with shards
            of them; None for one rank.
        sequence_parallel: whether they have shards.
    """

    def __init__(
        self,
        group: Any,
        mp_group: Any,
        sequence_parallel: bool,
        num_rows: int,
        width: int,
        init_std: float = 0.02,
    ):
        assert num_rows % group.nranks == 0, "a rule of ParallelDegrees"
        self._own = num_rows // group.nranks
        super().__init__(self._own, width, init_std, first=group.rank * self._own)
        self.group, self.mp_group, self.sequence_parallel = group, mp_group, sequence_parallel

    @paddle.no_grad()
    def plan(self, numbers_TY: Tensor) -> RequestPlan:
        """Exchange requests for rows; the host reads how many, once."""
        size, rank, num_rows = self.group.nranks, self.group.rank, numbers_TY.shape[0]
        if self.mp_group is not None:
            part = RowPart(self.mp_group.rank, self.mp_group.nranks)
            if missing := -num_rows % part.size:
                # Under sequence parallelism there are none. The first row is asked for anyway.
                filler = numbers_TY[:1].expand([missing, -1])
                numbers_TY = paddle.concat([numbers_TY, filler])
            numbers_TY = part.of_rows(numbers_TY)
        numbers_N = numbers_TY.reshape([-1])
        order_N = paddle.argsort(numbers_N)
        sorted_N = paddle.index_select(numbers_N, order_N)
        is_new_N = (paddle.diff(sorted_N, prepend=sorted_N[:1] - 1) != 0).astype("int64")
        found_N = is_new_N.cumsum()
        place_N = paddle.scatter(paddle.zeros_like(order_N), order_N, found_N - 1)
        # Different numbers before each owner's end.
        ends_S = paddle.searchsorted(sorted_N, paddle.arange(1, size + 1) * self._own)
        counted_N = paddle.concat([paddle.zeros_like(found_N[:1]), found_N])
        counts_S = paddle.diff(paddle.index_select(counted_N, ends_S), prepend=counted_N[:1])
        counts_SS = all_gathered(counts_S.unsqueeze(0), self.group).numpy()
        leaving, arriving = counts_SS[rank].tolist(), counts_SS[:, rank].tolist()
        # Equal numbers have the same place.
        different_U = paddle.scatter(paddle.zeros_like(sorted_N), found_N - 1, sorted_N)
        different_U = different_U[: sum(leaving)]
        asked_Q1 = all_to_all(different_U.unsqueeze(1), leaving, arriving, self.group)
        return RequestPlan(
            place_N.reshape(numbers_TY.shape),
            asked_Q1.squeeze(1) - rank * self._own,
            leaving,
            arriving,
            num_rows,
        )

    def forward(self, plan: RequestPlan) -> Tensor:
        """Rows `[T, Y, D]` of this rank's token rows."""
        return self._exchanged(self._looked_up(plan), plan)

    def beside(self, x: Tensor, plan: RequestPlan) -> tuple[Tensor, Tensor]:
        x, rows_QD = in_turn(x, self._looked_up(plan))
        return x, self._exchanged(rows_QD, plan)

    def _looked_up(self, plan: RequestPlan) -> Tensor:
        # Paddle's kernels fail on no rows, so one is looked up for nobody.
        asked = paddle.concat([plan.asked, paddle.zeros([1], dtype="int64")])
        return F.embedding(asked, self.weight)[:-1]

    def _exchanged(self, rows_QD: Tensor, plan: RequestPlan) -> Tensor:
        rows_UD = AllToAll.apply(rows_QD, plan.arriving, plan.leaving, self.group)
        rows_TYD = F.embedding(plan.places, rows_UD)
        if self.mp_group is None or self.sequence_parallel:
            return rows_TYD
        return slice_axis(GatherOp.apply(rows_TYD), 0, plan.num_rows)
