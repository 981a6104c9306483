"""Tensor-parallel layers: fleet's with small additions, and some that fleet does not have.

Added to fleet's: several linears in one column-parallel layer, low-rank adapters, and no overlapped
products where they would fail. `paddle_vl.parallel.tensor` builds the layers.
"""

from collections.abc import Sequence
from typing import Any, cast

from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    ReduceScatterOp,
    RowSequenceParallelLinear,
)
from paddle.nn.initializer import Normal

from paddle_vl.nn.experts import Experts, RoutedRows
from paddle_vl.nn.linear import AdaptableLinear, Columns, Linear, linear, mark_fused, split_columns
from paddle_vl.nn.operations import slice_axis


class _FusedColumns(nn.Layer):
    """Several linears in one column-parallel layer of fleet; a rank has `[q | k | v]` of its heads.

    Fleet's overlapped products always return gradients of input and weight, which Paddle refuses if
    one is frozen; the plain product runs then.
    """

    weight: Tensor
    _OVERLAPS = ("mp_async_allreduce", "sp_async_reduce_scatter")

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float,
        group,
        splits: bool = True,
    ):
        settings: dict[str, Any] = {
            "weight_attr": Normal(std=init_std),
            "has_bias": False,
            "gather_output": False,
            "mp_group": group,
        }
        # Fleet's layer is next in the MRO.
        fleet_layer: Any = super()
        fleet_layer.__init__(in_features, sum(one.width for one in columns), **settings)
        mark_fused(self.weight, columns)
        self.own_widths = [one.width // group.nranks for one in columns] if splits else []
        self._enabled = [name for name in self._OVERLAPS if getattr(self, name, False)]

    def forward(self, x: Tensor, num_rows: int | None = None) -> Sequence[Tensor]:
        for name in self._enabled:
            setattr(self, name, not (x.stop_gradient or self.weight.stop_gradient))
        fleet_layer: Any = super()
        y = fleet_layer.forward(x)
        if num_rows is not None:
            y = slice_axis(y, 0, num_rows)
        return split_columns(y, self.own_widths)


class FusedColumns(_FusedColumns, ColumnParallelLinear):
    """Takes all token rows."""


class FusedColumnsOfRows(_FusedColumns, ColumnSequenceParallelLinear):
    """Takes this rank's token rows and all-gathers them."""


class Column(AdaptableLinear, ColumnParallelLinear):
    """A column-parallel linear behind a `RegionOps.enter_columns` that several may share."""

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight), x)


class _Row(AdaptableLinear):
    def forward(self, x: Tensor) -> Tensor:
        if self.lora is None:
            fleet_layer: Any = super()
            return fleet_layer.forward(x)
        # The adapter's output is part of the same sum.
        return self.reduce(self.adapted(linear(x, self.weight), x))


class Row(_Row, RowParallelLinear):
    """A row-parallel linear that returns all token rows."""

    def reduce(self, terms_TD: Tensor) -> Tensor:
        return cast(Tensor, fleet_ops._mp_allreduce(terms_TD, group=self.model_parallel_group))


class RowToRows(_Row, RowSequenceParallelLinear):
    """A row-parallel linear that returns this rank's token rows."""

    def reduce(self, terms_TD: Tensor) -> Tensor:
        return ReduceScatterOp.apply(terms_TD)


class SplitExperts(Experts):
    """Experts whose inner features are sharded; their outputs are summed over the mp group.

    Args:
        inner: inner features of this rank.
        sequence_parallel: return this rank's token rows of the sum.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        init_std: float,
        group,
        sequence_parallel: bool,
    ):
        super().__init__(num_experts, width, inner, init_std)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(
        self,
        x_RD: Tensor,
        indices_RK: Tensor,
        weights_RK: Tensor,
        rows: RoutedRows | None = None,
    ) -> Tensor:
        terms_TD = super().forward(x_RD, indices_RK, weights_RK, rows)
        if self.sequence_parallel:
            return ReduceScatterOp.apply(terms_TD)
        return cast(Tensor, fleet_ops._mp_allreduce(terms_TD, group=self.group))


class SharedHeadLinear(AdaptableLinear):
    """A projection with fewer heads than ranks: replicated, each rank uses one head of it."""

    def __init__(
        self, in_features: int, out_features: int, init_std: float, num_heads: int, own_head: int
    ):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        width = out_features // num_heads
        self.own = slice(own_head * width, (own_head + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight[:, self.own]), x, self.own)
