"""Tensor-parallel layers: fleet's with small additions, and some that fleet does not have.

Added to fleet's: several linears in one column-parallel layer, low-rank adapters, overlapped
products of several weights, and no overlapped products where they would fail.
`paddle_vl.parallel.tensor` builds the layers.
"""

from collections.abc import Sequence
from typing import Any, cast

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    ReduceScatterOp,
    RowSequenceParallelLinear,
)
from paddle.nn.initializer import Normal

from paddle_vl.nn.experts import Experts, RoutedRows
from paddle_vl.nn.linear import (
    AdaptableLinear,
    Columns,
    Linear,
    SeparateLinears,
    linear,
    mark_fused,
    split_columns,
)
from paddle_vl.nn.operations import slice_axis
from paddle_vl.parallel.collectives import all_gathered


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


class _Column(AdaptableLinear):
    """A linear behind a `RegionOps.enter_columns` that several may share, see `SplitColumns`.

    Attributes:
        own: the columns of its weight that this rank uses; None for all.
    """

    own: slice | None = None

    def factors(self) -> list[Tensor]:
        """What the input is multiplied by: the weight, and the adapter's `A`."""
        weight = self.weight if self.own is None else self.weight[:, self.own]
        return [weight] if self.lora is None else [weight, self.lora.A]

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.factors()[0]), x, self.own)


class Column(_Column, ColumnParallelLinear):
    """A column-parallel linear."""


class SplitColumns(SeparateLinears):
    """Column-parallel linears of one input, some frozen, some with adapters.

    With fleet's overlap of tensor parallelism the sum of the input's gradient, one for all of them,
    is hidden behind the products for the gradients of trained factors. Dropout in an adapter, whose
    rows are its own, leaves it where it is.
    """

    def __init__(self, group: Any, sequence_parallel: bool, *args: Any):
        super().__init__(*args)
        strategy: Any = fleet.fleet._user_defined_strategy
        options = strategy.hybrid_configs["mp_configs"]
        of_rows, of_all = options.sp_async_reduce_scatter, options.mp_async_allreduce
        self._overlaps = of_rows if sequence_parallel else of_all
        self._settings = group, sequence_parallel, sequence_parallel and options.recompute_allgather

    def forward(self, x: Tensor, num_rows: int | None = None) -> list[Tensor]:
        layers: list[Any] = list(self.children())
        factors = [factor for layer in layers for factor in layer.factors()]
        drops = any(layer.lora is not None and layer.lora.drops for layer in layers)
        is_hidden = self._overlaps and not drops and not x.stop_gradient
        if not is_hidden or all(factor.stop_gradient for factor in factors):
            return super().forward(x, num_rows)
        products = iter(_EnteredProducts.apply(x, *self._settings, *factors))
        found = []
        for layer in layers:
            y, *inner = (next(products) for _ in layer.factors())
            found.append(layer.adapted(y, x, layer.own, inner=inner[0] if inner else None))
        return found if num_rows is None else [slice_axis(y, 0, num_rows) for y in found]


class _EnteredProducts(PyLayer):
    """`RegionOps.enter_columns`, and products with several factors; as fleet's products of one."""

    @staticmethod
    def forward(ctx, x, group, splits_rows, gathers_again, *factors):
        ctx.settings = group, splits_rows, gathers_again
        rows = all_gathered(x, group) if splits_rows else x
        ctx.save_for_backward(x if gathers_again else rows, *factors)
        return tuple(paddle.matmul(rows, factor) for factor in factors)

    @staticmethod
    def backward(ctx, *grads):
        (group, splits_rows, gathers_again), (rows, *factors) = ctx.settings, ctx.saved_tensor()
        size, own, gathering = group.nranks, rows, None
        if gathers_again:
            rows = paddle.empty([size * own.shape[0], own.shape[1]], own.dtype)
            gathering = dist.stream.all_gather(rows, own, group=group, sync_op=False)
        terms = [paddle.matmul(g, f, transpose_y=True) for g, f in zip(grads, factors, strict=True)]
        own_sum = total = sum(terms[1:], terms[0])
        if gathering is not None:
            gathering.wait()
        task: Any
        if splits_rows:
            own_sum = paddle.empty([total.shape[0] // size, total.shape[1]], total.dtype)
            task = dist.stream.reduce_scatter(own_sum, total, group=group, sync_op=False)
        else:
            task = dist.all_reduce(total, group=group, sync_op=False)
        of_factors = [
            None if factor.stop_gradient else paddle.matmul(rows, grad, transpose_x=True)
            for grad, factor in zip(grads, factors, strict=True)
        ]
        task.wait()
        return own_sum, *of_factors


class _Row(AdaptableLinear):
    def forward(self, x: Tensor) -> Tensor:
        if self.lora is None:
            fleet_layer: Any = super()
            return fleet_layer.forward(x)
        # The adapter's output is part of the same sum.
        y = self.reduce(self.adapted(linear(x, self.weight), x))
        return y if self.bias is None else y + self.bias


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


class SharedHeadLinear(_Column):
    """A projection with fewer heads than ranks: replicated, each rank uses one head of it."""

    def __init__(
        self, in_features: int, out_features: int, init_std: float, num_heads: int, own_head: int
    ):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        width = out_features // num_heads
        self.own = slice(own_head * width, (own_head + 1) * width)
