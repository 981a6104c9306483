"""`RegionOps` and `Vocabulary` of `paddle_vl.nn.placement` for several ranks: collectives around
tensor-parallel layers, and vision work divided over mp and cp ranks.

With `parallel.vision=spread` every item (image, video) is encoded on one rank, balanced by cost,
and one all-gather gives all rows to every rank. Its backward is one all-reduce if ranks use
different rows (sequence parallelism), and no collective if each uses all of them.

Shapes: T token rows; I items, M rows of all items, C their width; for Qwen3-VL, D decoder width and
G deepstack levels, C = (1 + G) * D.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    AllGatherOp,
    GatherOp,
    ScatterOp,
)

from paddle_vl.batch.rows import IGNORE_INDEX, RowPart
from paddle_vl.nn.operations import slice_axis
from paddle_vl.nn.placement import EncodeItems, EncodePatches, RegionOps, Vocabulary
from paddle_vl.nn.transfer import device_tensor, rows_in_order
from paddle_vl.parallel.collectives import (
    all_gathered_in_order,
    all_reduced,
    all_to_all,
    divide_gradient,
    in_turn,
    rows_of_items,
)
from paddle_vl.parallel.context_parallel import ContextGroup


class VocabularyGroup(Vocabulary):
    """One rank of a group that has equal shares of a head's vocabulary."""

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank, group.nranks
        self._cross_entropy = ParallelCrossEntropy(group, ignore_index=IGNORE_INDEX)

    def losses(self, logits_RV: Tensor, targets_R1: Tensor) -> Tensor:
        return self._cross_entropy(logits_RV, targets_R1)

    def largest(self, x: Tensor) -> Tensor:
        return all_reduced(x, self.group, dist.ReduceOp.MAX)

    def total(self, x: Tensor) -> Tensor:
        return all_reduced(x, self.group)


class SpreadOps(RegionOps):
    """The operations of one rank of a group that has the same images and videos.

    Args:
        vision_group: over which items are spread; None encodes all of them on every rank.
        sum_group: its ranks that use different rows of the items; None if all use all of them.
    """

    def __init__(
        self,
        vision_group: Any,
        sum_group: Any,
        layers_are_collective: bool = False,
        context: ContextGroup | None = None,
    ):
        super().__init__(layers_are_collective, context)
        self.vision_group, self.sum_group = vision_group, sum_group
        self.spreads_vision = vision_group is not None

    @property
    def replica_group(self) -> Any:
        """Ranks that encode all items alike, and use different rows; None if there are none."""
        return None

    def encode_visual(
        self,
        encode: EncodePatches,
        patches: Sequence[Tensor],
        grid_thw: np.ndarray,
        tower: nn.Layer,
        *,
        merge: int,
        width: int,
        num_levels: int,
        rows_of_ranks: Sequence[np.ndarray] | None = None,
        has_own_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        if self.spreads_vision:
            grid_thw = self._divided(grid_thw)
            num_patches_I = grid_thw.prod(axis=1)
            packed_MC = self._spread(
                lambda items: _encode_packed(encode, patches, grid_thw, items, merge, has_own_only),
                num_patches_I,
                num_patches_I // merge**2,
                tower,
                (1 + num_levels) * width,
                self.sum_group,
                rows_of_ranks,
            )
        else:
            merged, levels = encode(patches, grid_thw)
            if (group := self.replica_group) is None:
                return merged, levels
            # Packed, since ranks use different rows: one all-reduce for the gradient of all levels.
            packed_MC = paddle.concat([merged, *levels], axis=1)
            packed_MC = cast(Tensor, fleet_ops._c_identity(packed_MC, group=group))
        merged, *levels = paddle.split(packed_MC, 1 + num_levels, axis=1)
        return merged, levels

    def own_items(self, grid_thw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.spreads_vision:
            return super().own_items(grid_thw)
        grid_thw, group = self._divided(grid_thw), self.vision_group
        return grid_thw, assign_items(grid_thw.prod(axis=1), group.nranks)[group.rank]

    def _divided(self, grid_thw: np.ndarray) -> np.ndarray:
        if self.context.size == 1:
            return grid_thw
        # A long video may be all there is to spread: by its frames, which do not attend to each
        # other.
        return np.repeat(grid_thw * [0, 1, 1] + [1, 0, 0], grid_thw[:, 0], axis=0)

    def encode_items(
        self,
        encode: EncodeItems,
        costs_I: np.ndarray,
        rows_I: np.ndarray,
        tower: nn.Layer,
        width: int,
    ) -> Tensor:
        if not self.spreads_vision:
            return encode(None)
        return self._spread(encode, costs_I, rows_I, tower, width, None)

    def _spread(
        self,
        encode: Callable[[np.ndarray], Tensor],
        costs_I: np.ndarray,
        rows_I: np.ndarray,
        tower: nn.Layer,
        width: int,
        sum_group: Any,
        rows_of_ranks: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        """Rows `[M, C]` of all items in order, or this rank's of `rows_of_ranks`; each item is
        encoded on one rank."""
        assigned = assign_items(costs_I, self.vision_group.nranks)
        own = assigned[self.vision_group.rank]
        if own.size:
            own_MC = encode(own)
        elif self.layers_are_collective:
            own_MC = encode(own)[:0]
        else:
            parameters = tower.parameters()
            own_MC = paddle.zeros([0, width], dtype=parameters[0].dtype)
            # If the tower is trained, the rank must take part in the all-gather's backward.
            own_MC.stop_gradient = all(parameter.stop_gradient for parameter in parameters)
        numbers = [rows_of_items(items, rows_I) for items in assigned]
        if rows_of_ranks is not None:
            return _SendRows.apply(own_MC, numbers, rows_of_ranks, self.vision_group)
        return _GatherUneven.apply(own_MC, numbers, self.vision_group, sum_group)


class FleetRegionOps(SpreadOps):
    """The operations of one rank of a tensor-parallel group.

    Args:
        mp_group: with sequence parallelism that of fleet, which its operations use.
        sequence_parallel: keep `T / mp` token rows per rank between the sharded layers.
        spreads_vision: encode each item on one rank; otherwise all items on every rank.
        experts_are_whole: whether experts take this rank's token rows, of sequence parallelism;
            otherwise every rank has a part of each expert, for all rows.
    """

    def __init__(
        self,
        mp_group,
        sequence_parallel: bool,
        spreads_vision: bool,
        layers_are_collective: bool = False,
        experts_are_whole: bool = False,
        context: ContextGroup | None = None,
    ):
        vision_group, sum_group = mp_group, mp_group if sequence_parallel else None
        if context is not None:
            vision_group = context.cp_mp_group
            sum_group = vision_group if sequence_parallel else context.group
            if spreads_vision and sequence_parallel:
                context.shards_of_slice = mp_group.nranks
        super().__init__(
            vision_group if spreads_vision else None, sum_group, layers_are_collective, context
        )
        assert sequence_parallel or not experts_are_whole, "a rule of ParallelDegrees"
        self.experts_are_whole = experts_are_whole
        self.mp_group, self.sequence_parallel = mp_group, sequence_parallel
        self.vocabulary = VocabularyGroup(mp_group)

    @property
    def replica_group(self) -> Any:
        return self.mp_group if self.sequence_parallel else None

    @property
    def row_part(self) -> RowPart:
        if not self.sequence_parallel:
            return RowPart()
        return RowPart(self.mp_group.rank, self.mp_group.nranks)

    @property
    def expert_part(self) -> RowPart:
        return self.row_part if self.experts_are_whole else RowPart()

    def sum_routing(self, sums: Tensor) -> Tensor:
        if self.experts_are_whole:
            sums = cast(Tensor, fleet_ops._mp_allreduce(sums, group=self.mp_group))
        return self.context.total(sums)

    def pad_rows(self, x_TD: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x_TD
        # No rows are appended as well: the graph must be equal on all ranks, see `slice_axis`.
        missing = -x_TD.shape[0] % self.mp_group.nranks
        return paddle.concat([x_TD, paddle.zeros([missing, *x_TD.shape[1:]], dtype=x_TD.dtype)])

    def preceding_rows(self, x_TC: Tensor, count: int) -> Tensor:
        if not self.sequence_parallel:
            return super().preceding_rows(x_TC, count)
        # The last rows of all ranks; of ranks with fewer rows, all.
        own = min(count, x_TC.shape[0])
        tails = AllGatherOp.apply(x_TC[-own:])
        # All ranks use them in the same way, so that all sum their gradients.
        seen = paddle.concat([super().preceding_rows(x_TC, count), tails])
        begin = self.mp_group.rank * own
        return slice_axis(seen, begin, begin + count)

    def in_turn(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return in_turn(x, y)

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        return ScatterOp.apply(x_TD) if self.sequence_parallel else x_TD

    def leave_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        if not self.sequence_parallel:
            return x_TD
        return slice_axis(GatherOp.apply(x_TD), 0, num_rows)

    def enter_columns(self, x_TD: Tensor, num_rows: int | None = None) -> Tensor:
        if not self.sequence_parallel:
            return cast(Tensor, fleet_ops._c_identity(x_TD, group=self.mp_group))
        x_TD = AllGatherOp.apply(x_TD)
        return x_TD if num_rows is None else slice_axis(x_TD, 0, num_rows)

    def enter_head(self, x_TD: Tensor) -> Tensor:
        return cast(Tensor, fleet_ops._c_identity(x_TD, group=self.mp_group))

    def enter_replicated(self, x: Tensor) -> Tensor:
        return divide_gradient(x, self.mp_group.nranks)


def assign_items(costs_I: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Item numbers of every rank, ascending; greedily, each next costly item to the least loaded.

    Deterministic, so all ranks compute the same assignment.
    """
    load, items = [0] * num_ranks, [[] for _ in range(num_ranks)]
    for item in np.argsort(-costs_I, kind="stable"):
        rank = load.index(min(load))
        load[rank] += int(costs_I[item])
        items[rank].append(int(item))
    return [np.array(sorted(own), dtype=np.int64) for own in items]


def _encode_packed(
    encode: EncodePatches,
    patches: Sequence[Tensor],
    grid_thw: np.ndarray,
    items: np.ndarray,
    merge: int,
    has_own_only: bool,
) -> Tensor:
    """Merged rows and levels of some items side by side, `[M, C]`; one black row for no items."""
    if has_own_only:
        own_grid = grid_thw[items] if items.size else np.array([[1, merge, merge]])
        merged, levels = encode(patches, own_grid)
    elif items.size:
        rows = rows_of_items(items, grid_thw.prod(axis=1))
        own = [rows_in_order(each, rows) for each in patches]
        merged, levels = encode(own, grid_thw[items])
    else:
        # Its places are those of the first patches of any item.
        one_row = [paddle.zeros([merge**2, patches[0].shape[1]], dtype=patches[0].dtype)]
        one_row += [each[: merge**2] for each in patches[1:]]
        merged, levels = encode(one_row, np.array([[1, merge, merge]]))
    return paddle.concat([merged, *levels], axis=1)


class _SendRows(PyLayer):
    """Each row to the one rank that gets it; backward sends the gradients back.

    Args of `apply`: own rows; the numbers of the rows that each rank has, and of those that it
    gets, in its order; the group.
    """

    @staticmethod
    def forward(ctx, own_MC, numbers, rows_of_ranks, group):
        owner_M = np.empty(sum(map(len, numbers)), dtype=np.int64)
        place_M = np.empty_like(owner_M)
        for rank, own in enumerate(numbers):
            owner_M[own], place_M[own] = rank, np.arange(len(own))
        sent = [rows[owner_M[rows] == group.rank] for rows in rows_of_ranks]
        owners = owner_M[rows_of_ranks[group.rank]]
        # Rows arrive by their owners.
        arrival = np.argsort(owners, kind="stable")
        ctx.arrival, ctx.group = device_tensor(arrival), group
        places = place_M[np.concatenate(sent)]
        ctx.sent, ctx.shape = device_tensor(places), own_MC.shape
        # Samples that share an image get its rows several times.
        ctx.is_once = len(np.unique(places)) == len(places)
        ctx.sizes = [*map(len, sent)], np.bincount(owners, minlength=group.nranks).tolist()
        rows = all_to_all(paddle.index_select(own_MC, ctx.sent), *ctx.sizes, group)
        return paddle.index_select(rows, device_tensor(np.argsort(arrival)))

    @staticmethod
    def backward(ctx, grad):
        leaving, arriving = ctx.sizes
        rows = paddle.index_select(grad, ctx.arrival)
        rows = all_to_all(rows, arriving, leaving, ctx.group)
        zeros_MC = paddle.zeros(ctx.shape, dtype=grad.dtype)
        if not sum(leaving):
            return zeros_MC
        return paddle.scatter_(zeros_MC, ctx.sent, rows, overwrite=ctx.is_once)


class _GatherUneven(PyLayer):
    """`all_gathered_in_order`; backward keeps the gradients of this rank's rows, summed over the
    ranks of `sum_group` unless it is None."""

    @staticmethod
    def forward(ctx, own_MC, numbers, group, sum_group):
        ctx.own, ctx.sum_group = numbers[group.rank], sum_group
        return all_gathered_in_order(own_MC, numbers, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.sum_group is not None:
            grad = all_reduced(grad, ctx.sum_group)
        return rows_in_order(grad, ctx.own)
