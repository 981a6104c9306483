"""Fleet's layers with what this package adds to them, and those that fleet has not.

Fleet's hold one model-parallel rank's part. Added here: several linears in one column layer, low
rank adapters, and overlaps that stand back where they would fail. See `paddle_vl.parallel.tensor`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    ReduceScatterOp,
    RowSequenceParallelLinear,
)
from paddle.nn.initializer import Normal

from paddle_vl.nn.experts import Experts
from paddle_vl.nn.functional import slice_axis
from paddle_vl.nn.linear import (
    AdaptableLinear,
    Columns,
    Linear,
    fused_columns,
    linear,
    mark_fused,
    split_columns,
)


def split_axis(parameter: Tensor) -> int | None:
    """The dim of a parameter that is split over the group; None when every rank has all of it."""
    return getattr(parameter, "split_axis", None) if parameter.is_distributed else None


def mark_split(parameter: Tensor, axis: int, blocks: int = 1) -> None:
    """Ranks have parts along that axis, of each of several equal blocks that lie behind each other:
    gate and up in one tensor."""
    # Fleet's clipping and its checkpoints read the first of these, its layers set both.
    parameter.is_distributed = True
    parameter.split_axis = axis
    parameter.split_blocks = blocks


def split_blocks(parameter: Tensor, value: np.ndarray, of_ranks: int) -> list[np.ndarray]:
    """The blocks of a value along the split axis, of each of which ranks have an equal part.

    Args:
        of_ranks: the value is one rank's of so many; 1 for the whole.
    """
    cuts: Any = getattr(parameter, "split_blocks", 1)
    if columns := fused_columns(parameter):
        cuts = np.cumsum([one.width // of_ranks for one in columns])[:-1]
    return np.split(value, cuts, axis=parameter.split_axis)


class _FusedColumns:
    """Several linears in one of fleet's column layers, of which a rank has `[q | k | v]`.

    Fleet's overlapped products return gradients of both factors whether or not both are wanted, and
    Paddle refuses that of a frozen one: there the plain product runs.
    """

    _OVERLAPS = ("mp_async_allreduce", "sp_async_reduce_scatter")

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float,
        group,
        splits: bool = True,
    ):
        super().__init__(
            in_features,
            sum(one.width for one in columns),
            weight_attr=Normal(std=init_std),
            has_bias=False,
            gather_output=False,
            mp_group=group,
        )
        mark_fused(self.weight, columns)
        self.own_widths = [one.width // group.nranks for one in columns] if splits else []
        known = [name for name in self._OVERLAPS if hasattr(self, name)]
        if not known:
            raise RuntimeError(
                f"{type(self).__mro__[2].__name__} of paddlepaddle {paddle.__version__} has none "
                f"of {', '.join(self._OVERLAPS)}, which have to be off for frozen weights; install "
                "paddlepaddle 3.3"
            )
        self._asked = [name for name in known if getattr(self, name)]

    def forward(self, x: Tensor, num_rows: int | None = None) -> list[Tensor]:
        for name in self._asked:
            setattr(self, name, not (x.stop_gradient or self.weight.stop_gradient))
        y = super().forward(x)
        if num_rows is not None:
            y = slice_axis(y, 0, num_rows)
        return split_columns(y, self.own_widths)


class FusedColumns(_FusedColumns, ColumnParallelLinear):
    """Of all token rows."""


class FusedColumnsOfRows(_FusedColumns, ColumnSequenceParallelLinear):
    """Of this rank's token rows, which are gathered first."""


class Column(AdaptableLinear, ColumnParallelLinear):
    """One linear of several that stand apart: its input has been entered once for all of them."""

    def __init__(self, in_features: int, out_features: int, init_std: float, group):
        super().__init__(
            in_features,
            out_features,
            weight_attr=Normal(std=init_std),
            has_bias=False,
            gather_output=False,
            mp_group=group,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight), x)


class _Row(AdaptableLinear):
    def __init__(self, in_features: int, out_features: int, init_std: float, group):
        super().__init__(
            in_features,
            out_features,
            weight_attr=Normal(std=init_std),
            has_bias=False,
            input_is_parallel=True,
            mp_group=group,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.lora is None:
            return super().forward(x)
        # The adapter's product is a part of the same sum.
        return self.leave(self.adapted(linear(x, self.weight), x))


class Row(_Row, RowParallelLinear):
    """To all token rows, summed over the ranks."""

    def leave(self, parts_TD: Tensor) -> Tensor:
        return fleet_ops._mp_allreduce(parts_TD, group=self.model_parallel_group)


class RowToRows(_Row, RowSequenceParallelLinear):
    """To this rank's token rows of the sum."""

    def leave(self, parts_TD: Tensor) -> Tensor:
        return ReduceScatterOp.apply(parts_TD)


class SplitExperts(Experts):
    """Some inner features of every expert; their outputs are parts of a sum over the ranks."""

    def __init__(self, num_experts, width, inner, init_std, group, sequence_parallel):
        super().__init__(num_experts, width, inner, init_std)
        mark_split(self.gate_up_proj, axis=2, blocks=2)
        mark_split(self.down_proj, axis=1)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        parts_TD = super().forward(x_TD, indices_TK, weights_TK)
        if self.sequence_parallel:
            return ReduceScatterOp.apply(parts_TD)
        return fleet_ops._mp_allreduce(parts_TD, group=self.group)


class SharedHeadLinear(AdaptableLinear):
    """All heads on every rank, of which this one uses a single head that others use too."""

    def __init__(self, in_features, out_features, init_std, num_heads, own_head):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        self.weight.is_partial = True
        width = out_features // num_heads
        self.own = slice(own_head * width, (own_head + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight[:, self.own]), x, self.own)
