"""The seam between a model and its parallelism.

A model builds every layer that a parallel run would cut through a placement, and marks where token
rows enter the region that sequence parallelism cuts and where a product over all features begins.
It knows no rank beyond that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.experts import Experts
from paddle_vl.nn.functional import RowDropout, token_loss
from paddle_vl.nn.linear import (
    AdaptableLinear,
    Columns,
    Embedding,
    FusedLinear,
    Linear,
    SeparateLinears,
    VocabHead,
    whole_slices,
)
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.nn.master_weights import MasterWeights

# Pixels and grid of some items to merged rows `[M, D]` and levels, G times `[M, D]`.
Encoder = Callable[[Tensor, np.ndarray], tuple[Tensor, list[Tensor]]]
# Numbers of items, ascending, to their rows `[M, C]`; None stands for all of them. For no items the
# rows of anything, which are dropped: a rank without an item may have to run its layers.
ItemEncoder = Callable[[np.ndarray | None], Tensor]
Layer = TypeVar("Layer", bound=nn.Layer)


@dataclass(frozen=True)
class HeldLayers:
    """Which of a model's layers a rank has: all of them, or some in a pipeline.

    Attributes:
        embedding: what comes before the decoder's layers, vision tower and token embedding.
        layers: numbers of its decoder layers; None for all.
        head: what comes after them, norm and head.
    """

    embedding: bool = True
    layers: frozenset[int] | None = None
    head: bool = True


@dataclass(frozen=True)
class Writers:
    """The ranks that write one model together, and this one among them; it may be alone.

    Attributes:
        number, size: this rank among those that have its layers, and how many these are.
        stage: its stage of a pipeline.
    """

    number: int = 0
    size: int = 1
    stage: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is to be written once."""
        return self.number == 0 and self.stage == 0

    def of_stages(self, value: Any) -> list[Any]:
        """The `value` of every stage of a pipeline, of JSON's types, in order. Called by all of
        them together."""
        return [value]

    def arrays_of_stages(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """The arrays of every stage, as `of_stages`."""
        return [dict(arrays)]


def host_array(tensor: Tensor, copy: bool = True) -> np.ndarray:
    """A tensor's values on the host; bfloat16 as its bits.

    Args:
        copy: False: of a tensor that lies on the host the array is its own memory, bfloat16 apart.
            Paddle's copy goes to new memory, which costs more than the copying.
    """
    # Of bfloat16 a view as int16 is not to be had without stride kernels.
    is_on_host = tensor.place.is_cpu_place() and tensor.dtype != paddle.bfloat16
    if copy or not is_on_host or not tensor.size:
        return tensor.numpy()
    return np.from_dlpack(tensor.detach())


class SingleDevicePlacement:
    """Everything whole, on one device.

    Attributes:
        mp_group: the model-parallel group whose `rank` and `nranks` cut the token rows under
            sequence parallelism, as fleet has them; None on one device.
        held: the layers that this rank has.
        writers: those that write the model together.
        trained: what the optimizer works on in place of some parameters: float32 masters
            (`paddle_vl.nn.master_weights`), or shards of them (`paddle_vl.parallel.sharding`). Set
            when the model is there; of nothing before.
    """

    mp_group = None

    def __init__(self, held: HeldLayers | None = None, writers: Writers | None = None):
        self.held, self.writers = held or HeldLayers(), writers or Writers()
        self.trained: Any = MasterWeights([])

    @property
    def layers_are_collective(self) -> bool:
        """Whether all ranks must run the same layers, as they share them piecewise."""
        return self.trained.stage > 1

    @property
    def splits_parameters(self) -> bool:
        """Whether this rank has less than all of the model."""
        return self.held != HeldLayers()

    @property
    def row_part(self) -> RowPart:
        """The part of the token rows that this rank's decoder layers hold."""
        if self.mp_group is None:
            return RowPart()
        return RowPart(self.mp_group.rank, self.mp_group.nranks)

    def projections(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ) -> nn.Layer:
        """Linears of one input whose output features may be split over ranks, heads kept whole.

        Takes this rank's token rows, and the `num_rows` of `enter_columns` if there are any; gives
        a list of what each linear makes of all rows.

        Args:
            splits: False where the outputs may stay side by side in one tensor, as they come out of
                a fused weight; the list then has one entry, or one of each linear.
        """
        return FusedLinear(in_features, columns, init_std, splits)

    def separate_projections(
        self, in_features: int, columns: Sequence[Columns], init_std: float = 0.02
    ) -> SeparateLinears:
        """`projections` with a weight each, which may be treated differently in training."""
        return SeparateLinears(
            columns,
            self.enter_columns,
            lambda one: self.column_linear(in_features, one.width, init_std, one.num_heads),
        )

    def column_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02, num_heads: int = 0
    ) -> nn.Layer:
        """One of `separate_projections`, behind `enter_columns`."""
        return Linear(in_features, out_features, False, init_std)

    def row_linear(self, in_features: int, out_features: int, init_std: float = 0.02) -> nn.Layer:
        """A linear whose input features may arrive split; its output is whole again."""
        return Linear(in_features, out_features, False, init_std)

    def vocab_embedding(self, vocab_size: int, dim: int, init_std: float = 0.02) -> nn.Layer:
        """The token embedding, `[vocab, dim]`."""
        return Embedding(vocab_size, dim, init_std)

    def vocab_head(
        self, dim: int, vocab_size: int, init_std: float = 0.02, tied_weight: Tensor | None = None
    ) -> nn.Layer:
        """The output projection, `[vocab, dim]`, its own or the embedding's."""
        return VocabHead(dim, vocab_size, init_std, tied_weight)

    def router(self, width: int, num_experts: int, init_std: float = 0.02) -> nn.Layer:
        """A linear from token rows to experts, behind `enter_columns` and in front of `experts`."""
        return Linear(width, num_experts, False, init_std)

    def experts(self, num_experts: int, width: int, inner: int, init_std: float = 0.02) -> Experts:
        """Experts, of rows that came through `enter_columns`; rows as of a `row_linear` come out.

        Ranks may hold parts of each expert, or some of the experts each.
        """
        return Experts(num_experts, width, inner, init_std)

    def enter_replicated(self, x: Tensor) -> Tensor:
        """A value of which every rank computes the same loss, beside others' parts of its gradient.

        Behind a `router`, whose gradient is summed over ranks: each takes an equal part of it.
        """
        return x

    def row_wise(self, layer: Layer) -> Layer:
        """A layer that treats each token row by itself between the split ones: a norm."""
        return layer

    def head_wise(self, layer: Layer) -> Layer:
        """A layer that treats each query or key head by itself, all with the same parameters."""
        return layer

    def row_dropout(self, p: float) -> RowDropout:
        """Dropout of token rows between the split layers."""
        return RowDropout(p)

    def pad_rows(self, x_TD: Tensor) -> Tensor:
        """Rows with others of zeros behind them, so many that the ranks' parts are equal."""
        return x_TD

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        """All T token rows to this rank's part of them."""
        return x_TD

    def leave_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """This rank's token rows to all of them, of which every rank computes the same loss.

        Args:
            num_rows: T without the rows of `pad_rows`, which are left out.
        """
        return x_TD

    def enter_columns(self, x_TD: Tensor, num_rows: int | None = None) -> Tensor:
        """This rank's token rows to all of them, in front of column linears or the head.

        Args:
            num_rows: as for `leave_rows`; None keeps what `pad_rows` may have added.
        """
        return x_TD

    def enter_head(self, x_TD: Tensor) -> Tensor:
        """Rows that came through `leave_rows`, or some of them, in front of a `vocab_head`."""
        return x_TD

    def encode_visual(
        self, encode: Encoder, pixels: Tensor, grid_thw: np.ndarray, **sizes: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the tower over all items, in order.

        Args:
            sizes: `merge`, `width` and `num_levels` of what comes out.
        """
        return encode(pixels, grid_thw)

    def encode_items(
        self, encode: ItemEncoder, costs_I: np.ndarray, rows_I: np.ndarray, width: int
    ) -> Tensor:
        """Run a tower over all items: their rows `[M, C]`, in order, the same on every rank.

        Args:
            costs_I: of encoding each item, to share the work by.
            rows_I: how many rows each item has.
            width: C.
        """
        return encode(None)

    def holds_layer(self, number: int) -> bool:
        """Whether this rank has that layer of the decoder."""
        return self.held.layers is None or number in self.held.layers

    def mark_tied(self, weight: Tensor) -> None:
        """Told once which weight the embedding and the head share.

        In a pipeline the last stage has a copy: the gradients of both are summed, and what counts
        or saves every parameter once leaves the copy out.
        """
        weight.is_tied = self.held.embedding != self.held.head
        weight.is_tied_copy = not self.held.embedding

    def mark_tower(self, parameters: list[Tensor]) -> None:
        """Told once which parameters are the vision tower's."""

    def add_low_rank(self, layer: AdaptableLinear, settings: LowRankSettings) -> None:
        """Put a low-rank adapter beside a linear of this placement or of the tower.

        Where the linear is split, so is the adapter's factor on that side.
        """
        layer.add_low_rank(settings)

    def token_loss(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy and target count, see `paddle_vl.nn.functional.token_loss`."""
        return token_loss(logits_TV, targets_T)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of a parameter before it was split over ranks."""
        return tuple(parameter.shape)

    def own_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """What this rank holds of a whole value in the parameter's layout."""
        return whole

    def own_columns(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """What this rank holds of the whole value of one of the linears of a fused parameter."""
        return whole

    def column_slices(self, parameter: Tensor) -> list[slice]:
        """Where the linears of a fused parameter lie in what this rank holds of it."""
        return whole_slices(parameter)

    def whole_value(
        self, parameter: Tensor, value: Tensor | None = None, copy: bool = True
    ) -> np.ndarray:
        """The whole of a parameter, or of a `value` in its trained tensor's layout: a moment.

        Where ranks hold parts, all of them call this together.

        Args:
            copy: False where the array is used up before anything changes the tensor: it may then
                be the tensor's own memory.
        """
        return host_array(self._local_value(parameter, value), copy)

    def trained_tensor(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates for a parameter: itself, its master, or a shard of that."""
        return self.trained.shard_of(parameter)

    def trained_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """What this rank's optimizer holds of a whole value in the parameter's layout."""
        return self.trained.own_shard(parameter, self.own_part(parameter, whole))

    def _local_value(self, parameter: Tensor, value: Tensor | None) -> Tensor:
        return self.trained.gathered_value(parameter, value)
