"""Tensor and sequence parallelism: a placement whose layers are fleet's.

Column layers hold some output features (whole attention heads), row layers the matching input
features (`split_layers`). With sequence parallelism each rank keeps `T / mp` of the token rows
between those layers. Ours, on fleet's operations: fewer key heads than ranks, experts, adapters'
factors, the spread tower, and the head `[vocab, dim]` that may be the embedding's.

Gradients that come out as one rank's part although the parameter is whole on every rank are marked
`is_partial`, and summed over the group before they are used, see `parallel.gradients`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import ParallelCrossEntropy, VocabParallelEmbedding
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    AllGatherOp,
    GatherOp,
    ScatterOp,
)
from paddle.nn.initializer import Normal

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.experts import Experts
from paddle_vl.nn.functional import IGNORE_INDEX, RowDropout, slice_axis
from paddle_vl.nn.linear import AdaptableLinear, Columns, VocabHead, column_slices, fused_columns
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.nn.placement import (
    Encoder,
    HeldLayers,
    ItemEncoder,
    Layer,
    SingleDevicePlacement,
    Writers,
    host_array,
)
from paddle_vl.parallel.mp_ops import divide_gradient
from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.split_layers import (
    Column,
    FusedColumns,
    FusedColumnsOfRows,
    Row,
    RowToRows,
    SharedHeadLinear,
    SplitExperts,
    mark_split,
    split_axis,
    split_blocks,
)
from paddle_vl.parallel.vision_spread import encode_spread, spread_items


class FleetPlacement(SingleDevicePlacement):
    """One rank of a model-parallel group.

    Args:
        mp_group: a `paddle.distributed` group.
        sequence_parallel: keep `T / mp` token rows per rank between the split layers.
        vision: `spread` encodes each image on one rank; `replicate` all of them on every rank.
        held: the layers of this rank's pipeline stage.
        writers: those that write the model together; the group's ranks when left out.
    """

    splits_parameters = True

    def __init__(
        self,
        mp_group,
        sequence_parallel: bool = False,
        vision: str = "spread",
        held: HeldLayers | None = None,
        writers: Writers | None = None,
    ):
        super().__init__(held, writers or Writers(mp_group.rank, mp_group.nranks))
        if vision not in ("spread", "replicate"):
            raise ValueError(f"parallel.vision is {vision!r}; use 'spread' or 'replicate'")
        self.mp_group, self.sequence_parallel, self.vision = mp_group, sequence_parallel, vision
        self.tower_parameters: list[Tensor] = []
        self._cross_entropy = ParallelCrossEntropy(mp_group, ignore_index=IGNORE_INDEX)
        if sequence_parallel:
            _check_is_fleets(mp_group)

    @property
    def row_part(self) -> RowPart:
        return super().row_part if self.sequence_parallel else RowPart()

    def projections(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ) -> nn.Layer:
        """See `SingleDevicePlacement`; fewer heads than ranks are never in a fused weight.

        Raises:
            ValueError: see `column_linear`.
        """
        size = self.mp_group.nranks
        if any((one.num_heads or one.width) % size for one in columns):
            return self.separate_projections(in_features, columns, init_std)
        layer = FusedColumnsOfRows if self.sequence_parallel else FusedColumns
        return layer(in_features, columns, init_std, self.mp_group, splits)

    def column_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02, num_heads: int = 0
    ) -> nn.Layer:
        """Output features of this rank: an equal part, or, with fewer heads than ranks, one head.

        Raises:
            ValueError: neither divides the other.
        """
        size, units = self.mp_group.nranks, num_heads or out_features
        if units % size == 0:
            return Column(in_features, out_features, init_std, self.mp_group)
        if size % units:
            raise ValueError(
                f"{units} heads or features over {size} model-parallel ranks: neither divides the "
                "other; choose another parallel.mp_degree"
            )
        return SharedHeadLinear(
            in_features, out_features, init_std, units, self.mp_group.rank * units // size
        )

    def row_linear(self, in_features: int, out_features: int, init_std: float = 0.02) -> nn.Layer:
        size = self.mp_group.nranks
        if in_features % size:
            raise ValueError(
                f"{in_features} input features do not divide by the model-parallel degree {size}"
            )
        layer = RowToRows if self.sequence_parallel else Row
        return layer(in_features, out_features, init_std, self.mp_group)

    def vocab_embedding(self, vocab_size: int, dim: int, init_std: float = 0.02) -> nn.Layer:
        self._vocab_part(vocab_size)
        return VocabParallelEmbedding(
            vocab_size, dim, weight_attr=Normal(std=init_std), mp_group=self.mp_group
        )

    def vocab_head(
        self, dim: int, vocab_size: int, init_std: float = 0.02, tied_weight: Tensor | None = None
    ) -> nn.Layer:
        head = VocabHead(dim, self._vocab_part(vocab_size), init_std, tied_weight)
        mark_split(head.weight, axis=0)
        return head

    def router(self, width: int, num_experts: int, init_std: float = 0.02) -> nn.Layer:
        # Each rank routes all rows; its part of the experts gives the weights a part of a gradient.
        router = super().router(width, num_experts, init_std)
        router.weight.is_partial = True
        return router

    def experts(self, num_experts: int, width: int, inner: int, init_std: float = 0.02) -> Experts:
        size = self.mp_group.nranks
        if inner % size:
            raise ValueError(
                f"text_config.moe_intermediate_size {inner} does not divide by the model-parallel "
                f"degree {size}; choose another parallel.mp_degree"
            )
        return SplitExperts(
            num_experts, width, inner // size, init_std, self.mp_group, self.sequence_parallel
        )

    def enter_replicated(self, x: Tensor) -> Tensor:
        return divide_gradient(x, self.mp_group.nranks)

    def head_wise(self, layer: Layer) -> Layer:
        # Each rank has its own heads, and all of the parameters.
        for parameter in layer.parameters():
            parameter.is_partial = True
        return layer

    def row_wise(self, layer: Layer) -> Layer:
        for parameter in layer.parameters():
            parameter.is_partial = self.sequence_parallel
        return layer

    def row_dropout(self, p: float) -> RowDropout:
        dropout = super().row_dropout(p)
        if self.sequence_parallel:
            dropout.random = split_random
        return dropout

    def pad_rows(self, x_TD: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x_TD
        # Of no rows where none are missing: one graph on all ranks, see `paddle_vl.nn.functional`.
        missing = -x_TD.shape[0] % self.mp_group.nranks
        return paddle.concat([x_TD, paddle.zeros([missing, *x_TD.shape[1:]], dtype=x_TD.dtype)])

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        return ScatterOp.apply(x_TD) if self.sequence_parallel else x_TD

    def leave_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        if not self.sequence_parallel:
            return x_TD
        return slice_axis(GatherOp.apply(x_TD), 0, num_rows)

    def enter_columns(self, x_TD: Tensor, num_rows: int | None = None) -> Tensor:
        if not self.sequence_parallel:
            return fleet_ops._c_identity(x_TD, group=self.mp_group)
        x_TD = AllGatherOp.apply(x_TD)
        return x_TD if num_rows is None else slice_axis(x_TD, 0, num_rows)

    def enter_head(self, x_TD: Tensor) -> Tensor:
        return fleet_ops._c_identity(x_TD, group=self.mp_group)

    def encode_visual(
        self, encode: Encoder, pixels: Tensor, grid_thw: np.ndarray, **sizes: int
    ) -> tuple[Tensor, list[Tensor]]:
        if self.vision == "spread":
            return encode_spread(
                encode,
                pixels,
                grid_thw,
                gradients_are_parts=self.sequence_parallel,
                **self._tower_sharing,
                **sizes,
            )
        merged, levels = encode(pixels, grid_thw)
        if not self.sequence_parallel:
            return merged, levels
        # Each rank uses only its own rows; one sum makes the gradient of all levels whole.
        packed_MC = paddle.concat([merged, *levels], axis=1)
        packed_MC = fleet_ops._c_identity(packed_MC, group=self.mp_group)
        merged, *levels = paddle.split(packed_MC, 1 + len(levels), axis=1)
        return merged, levels

    def encode_items(
        self, encode: ItemEncoder, costs_I: np.ndarray, rows_I: np.ndarray, width: int
    ) -> Tensor:
        if self.vision == "replicate":
            return encode(None)
        return spread_items(
            encode,
            costs_I,
            rows_I,
            width=width,
            gradients_are_parts=False,
            **self._tower_sharing,
        )

    @property
    def _tower_sharing(self) -> dict[str, Any]:
        return {
            "group": self.mp_group,
            "dtype": self.tower_parameters[0].dtype,
            "takes_gradient": any(not p.stop_gradient for p in self.tower_parameters),
            "layers_are_collective": self.layers_are_collective,
        }

    def mark_tower(self, parameters: list[Tensor]) -> None:
        self.tower_parameters = parameters
        for parameter in parameters:
            parameter.is_partial = self.vision == "spread"

    def add_low_rank(self, layer: AdaptableLinear, settings: LowRankSettings) -> None:
        super().add_low_rank(layer, settings)
        weight, lora = layer.weight, layer.lora
        axis = split_axis(weight)
        in_tower = any(weight is parameter for parameter in self.tower_parameters)
        if axis is None:
            lora.A.is_partial = lora.B.is_partial = getattr(weight, "is_partial", False)
        elif axis == layer.input_axis:
            # Every rank's rows of A make a part of x A, and so of what B multiplies.
            mark_split(lora.A, axis=0)
            lora.B.is_partial = True
        else:
            mark_split(lora.B, axis=1)
            lora.A.is_partial = True
        if axis == layer.input_axis or (in_tower and self.vision == "spread"):
            lora.random = split_random

    def token_loss(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        loss_T1 = self._cross_entropy(logits_TV.astype("float32"), targets_T.unsqueeze(1))
        return loss_T1.sum(), (targets_T != IGNORE_INDEX).astype("float32").sum()

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        shape = list(parameter.shape)
        if (axis := split_axis(parameter)) is not None:
            shape[axis] *= self.mp_group.nranks
        return tuple(shape)

    def own_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        axis = split_axis(parameter)
        if axis is None:
            return whole
        ranks, rank = self.mp_group.nranks, self.mp_group.rank
        blocks = split_blocks(parameter, whole, of_ranks=1)
        return np.concatenate([np.split(b, ranks, axis=axis)[rank] for b in blocks], axis=axis)

    def own_columns(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        return np.split(whole, self.mp_group.nranks, axis=1)[self.mp_group.rank]

    def column_slices(self, parameter: Tensor) -> list[slice]:
        size = self.mp_group.nranks
        return column_slices([one.width // size for one in fused_columns(parameter)])

    def whole_value(
        self, parameter: Tensor, value: Tensor | None = None, copy: bool = True
    ) -> np.ndarray:
        value, axis = self._local_value(parameter, value), split_axis(parameter)
        if axis is None:
            return host_array(value, copy)
        parts: list[Tensor] = []
        dist.all_gather(parts, value.detach(), group=self.mp_group)
        blocks = [split_blocks(parameter, part.numpy(), of_ranks=len(parts)) for part in parts]
        return np.concatenate([part[b] for b in range(len(blocks[0])) for part in blocks], axis)

    def _vocab_part(self, vocab_size: int) -> int:
        size = self.mp_group.nranks
        if vocab_size % size:
            raise ValueError(
                f"text_config.vocab_size {vocab_size} does not divide by the model-parallel degree "
                f"{size}; pad the vocabulary to {-(-vocab_size // size) * size}"
            )
        return vocab_size // size


def _check_is_fleets(mp_group) -> None:
    """Fleet's operations of sequence parallelism take the group that fleet was started with.

    Raises:
        ValueError: it is another one.
    """
    started = fleet.get_hybrid_communicate_group()
    ranks = None if started is None else started.get_model_parallel_group().ranks
    if ranks != mp_group.ranks:
        raise ValueError(
            f"a sequence-parallel placement over ranks {mp_group.ranks}, but fleet's group is "
            f"{ranks or 'not there'}: take the group of paddle_vl.parallel.topology"
        )
