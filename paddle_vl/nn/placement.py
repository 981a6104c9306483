"""Interface between a model and its parallelism.

A model gets a `Placement`. It builds tensor-parallel layers with `placement.layers`, marks with
`placement.ops` where token rows enter and leave a sequence-parallel region, and reads from
`placement.stage_layers` which layers its pipeline stage has. For several ranks there are
`paddle_vl.parallel.tensor`, and of `RegionOps` and `Vocabulary` `paddle_vl.parallel.region_ops`.

This is the complete parallelism interface for a new model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.batch.rows import IGNORE_INDEX, RowPart
from paddle_vl.nn.attention import PackedSamples, causal_attention
from paddle_vl.nn.attention_masks import SliceMask
from paddle_vl.nn.experts import Experts
from paddle_vl.nn.linear import (
    AdaptableLinear,
    Columns,
    Embedding,
    FusedLinear,
    Linear,
    SeparateLinears,
    VocabHead,
)
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.nn.operations import RowDropout
from paddle_vl.nn.parameter_table import (
    REPLICATED,
    CheckpointRanks,
    ParameterTable,
    ParamSpec,
    Tie,
)

# Patches (pixels first) and grid of items (images, videos) to merged rows `[M, D]` and G levels of
# `[M, D]`.
EncodePatches = Callable[[Sequence[Tensor], np.ndarray], tuple[Tensor, list[Tensor]]]
# Ascending item numbers (None: all items) to their rows `[M, C]`. For no items it returns arbitrary
# rows, which are dropped: a rank without an item may still have to run the layers.
EncodeItems = Callable[[np.ndarray | None], Tensor]
Layer = TypeVar("Layer", bound=nn.Layer)


@dataclass(frozen=True)
class StageLayers:
    """The layers of this rank's pipeline stage; all layers without a pipeline.

    Attributes:
        embedding: whether it has the token embedding, and the vision tower unless every stage
            has it.
        layers: numbers of its decoder layers; None for all.
        head: whether it has final norm and head.
        encoder_everywhere: whether every stage has the vision tower, whose rows come with a batch
            (`schedule: colocated`).
    """

    embedding: bool = True
    layers: frozenset[int] | None = None
    head: bool = True
    encoder_everywhere: bool = False

    @property
    def tower(self) -> bool:
        """Whether this stage has the vision tower."""
        return self.embedding or self.encoder_everywhere

    @property
    def is_full(self) -> bool:
        """Whether these are all layers of the model."""
        return self.embedding and self.head and self.layers is None

    def has_layer(self, number: int) -> bool:
        """Whether this stage has that decoder layer."""
        return self.layers is None or number in self.layers


# Makes this rank's experts of a layer, given a function that makes so many, and their number.
ShardExperts = Callable[[Callable[[int], Experts], int], Experts]


class Context:
    """The ranks that have the rows of the same samples between them (context parallelism): one,
    with all rows. See `paddle_vl.parallel.context_parallel`.

    Attributes:
        rank, size: this rank's number, and that of the ranks.
        shards_of_slice: shards of each rank's rows, of which each is one rank's, to which the
            tower's rows are sent; 0 where all ranks get all of them.
        exchanges_heads: whether a rank attends with all rows, for a part of the heads.
    """

    rank, size, shards_of_slice = 0, 1, 0
    exchanges_heads = False

    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        key_bias_BS: Tensor | None = None,
        packed: PackedSamples | SliceMask | None = None,
    ) -> Tensor:
        """`causal_attention` of this rank's rows, as queries, to the rows of all ranks.

        Args:
            packed: a `SliceMask` if the batch is a slice; other batches every rank has whole.
        """
        assert not isinstance(packed, SliceMask), "one rank has all rows"
        return causal_attention(q_BLNH, k_BLKH, v_BLKH, key_bias_BS, packed)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in forward only: each uses the same total."""
        return x


class Vocabulary:
    """The ranks that have equal shares of a head's vocabulary: one, with all of it. See
    `paddle_vl.nn.head_loss`.

    Attributes:
        rank, size: this rank's number, and that of the ranks.
    """

    rank, size = 0, 1

    def losses(self, logits_RV: Tensor, targets_R1: Tensor) -> Tensor:
        """Cross entropy of each row, `[R, 1]` float32; 0 where the target is `IGNORE_INDEX`.

        Args:
            logits_RV: float32, of this rank's share.
        """
        losses_R1: Any = F.cross_entropy(
            logits_RV, targets_R1, ignore_index=IGNORE_INDEX, reduction="none"
        )
        return losses_R1

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the ranks, without a gradient."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, without a gradient."""
        return x


class RegionOps:
    """Operations around the layers of a `LayerFactory`; the identity on one device.

    Shapes: T token rows, `T / mp` of them per rank inside a sequence-parallel region.

    Attributes:
        layers_are_collective: whether layers issue collectives (sharded parameters, experts), so
            that all ranks must run the same layers, whatever their data.
        context: the ranks that have this rank's samples between them.
        vocabulary: the ranks that have shares of the head's logits.
        spreads_vision: whether ranks encode different items in `encode_visual`.
    """

    spreads_vision = False

    def __init__(self, layers_are_collective: bool = False, context: Context | None = None):
        self.layers_are_collective = layers_are_collective
        self.context, self.vocabulary = context or Context(), Vocabulary()

    @property
    def row_part(self) -> RowPart:
        """This rank's shard of the token rows inside the decoder."""
        return RowPart()

    @property
    def expert_part(self) -> RowPart:
        """The token rows that experts take: all, behind `enter_columns`, or this rank's shard."""
        return RowPart()

    def sum_routing(self, sums: Tensor) -> Tensor:
        """Sums over the rows of `expert_part` to sums over all rows, in forward only."""
        return self.context.total(sums)

    def pad_rows(self, x_TD: Tensor) -> Tensor:
        """Append zero rows until the mp degree divides the number of rows."""
        return x_TD

    def preceding_rows(self, x_TC: Tensor, count: int) -> Tensor:
        """The token rows before this rank's first one, `[count, C]`; zeros before the batch."""
        return paddle.zeros([count, x_TC.shape[1]], x_TC.dtype)

    def in_turn(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same tensors; the backward pass goes on to what made `y` only when the gradient of
        `x` is complete.

        For a branch with collectives that ends in `y`, and another that begins with `x`. Autograd
        takes a graph breadth first, and graphs of ranks differ where one pads and another does
        not: the ranks would issue the collectives of the two branches in different orders, and
        wait for each other for ever.
        """
        return x, y

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        """Enter a sequence-parallel region: keep this rank's rows; backward all-gathers."""
        return x_TD

    def leave_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """Leave a sequence-parallel region: all-gather; backward keeps this rank's rows.

        Every rank must compute the same loss from the rows.

        Args:
            num_rows: T without the rows of `pad_rows`, which are removed.
        """
        return x_TD

    def enter_columns(self, x_TD: Tensor, num_rows: int | None = None) -> Tensor:
        """Prepare the input of column-parallel linears or of the head; backward sums over ranks.

        All-gather and reduce-scatter in a sequence-parallel region, identity and all-reduce
        without.

        Args:
            num_rows: as for `leave_rows`; None keeps the rows of `pad_rows`.
        """
        return x_TD

    def enter_head(self, x_TD: Tensor) -> Tensor:
        """Prepare rows that came through `leave_rows` for a `vocab_head`; backward all-reduces."""
        return x_TD

    def enter_replicated(self, x: Tensor) -> Tensor:
        """Use a replicated tensor; its gradient is scaled by 1/mp before the later all-reduce."""
        return x

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
        """Run the vision tower over all items; the result is the same on every mp rank, unless
        ranks get rows of their own.

        Args:
            patches: pixels `[P, patch_dim]` of all items, then other tensors with a row per patch.
            grid_thw: `[I, 3]` on the host.
            tower: what `encode` runs.
            merge: side of the square of patches that makes one row.
            width, num_levels: D and G of the result, `[M, D]` and G times `[M, D]`.
            rows_of_ranks: numbers of the rows that each rank of `Context` and mp gets; None for
                all.
            has_own_only: whether the patches are those of `own_items` alone; of a black row where
                this rank has no item and its layers are collective.
        """
        return encode(patches, grid_thw)

    def own_items(self, grid_thw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The grid of all items that `encode_visual` divides over ranks, of videos maybe by frames,
        and the numbers of those that this rank encodes, ascending."""
        return grid_thw, np.arange(len(grid_thw))

    def encode_items(
        self,
        encode: EncodeItems,
        costs_I: np.ndarray,
        rows_I: np.ndarray,
        tower: nn.Layer,
        width: int,
    ) -> Tensor:
        """Run a tower over all items: rows `[M, C]` in item order, the same on every mp rank.

        Args:
            costs_I: cost of encoding each item, by which the work is divided.
            rows_I: number of rows of each item.
            tower: what `encode` runs.
            width: C.
        """
        return encode(None)


class LayerFactory:
    """Builds the layers that tensor parallelism shards; here unsharded, for one device.

    Every parameter of these layers gets an entry in `parameter_table`.

    Args:
        stage_layers: layers of the pipeline stage, for weights that two stages share.
        shard_experts: see `paddle_vl.parallel.expert_parallel`; None where every rank has all
            experts.

    Attributes:
        tower_layers: builds towers in a way of its own, see
            `paddle_vl.parallel.colocated.encoder_layers`; None where a tower is like other layers.
    """

    tower_layers: Any = None
    # Makes the context in which a sharded tensor draws random numbers.
    own_random: Callable[[], AbstractContextManager[None]] = nullcontext
    # Makes `separate_projections` from the arguments of `SeparateLinears`.
    separated: Callable[..., SeparateLinears] = SeparateLinears
    # Makes a `row_table` from its arguments; None for one with all rows.
    make_table: Callable[[int, int, float], nn.Layer] | None = None

    def __init__(
        self,
        parameter_table: ParameterTable,
        ops: RegionOps,
        stage_layers: StageLayers,
        shard_experts: ShardExperts | None = None,
    ):
        self.parameter_table, self.ops = parameter_table, ops
        self.stage_layers, self.shard_experts = stage_layers, shard_experts

    def projections(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ) -> nn.Layer:
        """Column-parallel linears of one input, without bias, in one fused weight.

        The layer takes this rank's token rows and the `num_rows` of `RegionOps.enter_columns`, and
        returns the output of each linear for all rows. An attention head stays on one rank.

        Args:
            splits: False returns one tensor of all outputs if the weight is fused.
        """
        return self._recorded(FusedLinear(in_features, columns, init_std, splits))

    def separate_projections(
        self, in_features: int, columns: Sequence[Columns], init_std: float = 0.02
    ) -> SeparateLinears:
        """`projections` with one weight per linear."""
        return self.separated(
            columns,
            self.ops.enter_columns,
            lambda one: self.column_linear(
                in_features, one.width, init_std, one.num_heads, one.blocks
            ),
        )

    def column_linear(
        self,
        in_features: int,
        out_features: int,
        init_std: float = 0.02,
        num_heads: int = 0,
        blocks: Sequence[int] = (),
    ) -> AdaptableLinear:
        """One of `separate_projections`, behind `RegionOps.enter_columns`; see `Columns`."""
        return self._recorded(Linear(in_features, out_features, False, init_std))

    def channels(self, blocks: Sequence[int], make: Callable[[int], Layer]) -> Layer:
        """A layer whose parameters have a value per output feature of column-parallel linears.

        Args:
            blocks: full widths of the parts of the first dim, each divided over ranks by itself.
            make: builds the layer for that many features of this rank.
        """
        return self._recorded(make(sum(blocks)))

    def row_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02
    ) -> AdaptableLinear:
        """A row-parallel linear without bias: sharded input features, summed output."""
        return self._recorded(Linear(in_features, out_features, False, init_std))

    def vocab_embedding(
        self, vocab_size: int, dim: int, init_std: float = 0.02, is_tied: bool = False
    ) -> nn.Layer:
        """The token embedding, `[vocab, dim]`; `is_tied` if the head has the same weight."""
        embedding = self._recorded(Embedding(vocab_size, dim, init_std))
        return self._tied(embedding) if is_tied else embedding

    def vocab_head(
        self,
        dim: int,
        vocab_size: int,
        init_std: float = 0.02,
        tied_weight: Tensor | None = None,
        is_tied: bool = False,
    ) -> AdaptableLinear:
        """The output projection, `[vocab, dim]`.

        Args:
            tied_weight: the embedding's, if this rank has it.
            is_tied: whether the embedding has the same weight, here or on another stage.
        """
        head = VocabHead(dim, vocab_size, init_std, tied_weight)
        if tied_weight is None:
            self._recorded(head)
        return self._tied(head) if is_tied else head

    def router(self, width: int, num_experts: int, init_std: float = 0.02) -> nn.Layer:
        """The router, a linear before `experts`."""
        return self._recorded(Linear(width, num_experts, False, init_std))

    def experts(self, num_experts: int, width: int, inner: int, init_std: float = 0.02) -> Experts:
        """Experts on the rows of `RegionOps.expert_part`; output as of a `row_linear`."""

        def make(count: int) -> Experts:
            return self._make_experts(count, width, inner, init_std)

        if self.shard_experts is None:
            return make(num_experts)
        experts = self.shard_experts(make, num_experts)
        for parameter in experts.parameters():
            spec = replace(self.parameter_table[parameter], is_expert=True)
            self.parameter_table.add([parameter], spec)
        return experts

    def row_table(self, num_rows: int, width: int, init_std: float = 0.02) -> nn.Layer:
        """A table `[num_rows, width]` that may be larger than the memory of a device, drawn from a
        normal of std `init_std`.

        The layer takes what its `plan` makes of the row numbers of all token rows, `[T, Y]` int64,
        and returns the rows of this rank's token rows, `[T, Y, width]`.
        """
        # Few models have such a table.
        from paddle_vl.nn.row_table import RowTable

        table = (self.make_table or RowTable)(num_rows, width, init_std)
        self.parameter_table.add(table.parameters(), ParamSpec(is_table=True))
        return table

    def row_wise(self, layer: Layer) -> Layer:
        """A row-wise layer inside the sequence-parallel region, such as a norm."""
        return self._recorded(layer)

    def head_wise(self, layer: Layer) -> Layer:
        """A layer with the same parameters for every attention head, such as a norm."""
        return self._recorded(layer)

    def tower(self, layer: Layer) -> Layer:
        """A vision tower, which runs through `encode_visual` or `encode_items` of `RegionOps`."""
        return (
            self._recorded(layer) if self.tower_layers is None else self.tower_layers.tower(layer)
        )

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the ranks that features are divided over, without a gradient."""
        return x

    def row_dropout(self, p: float) -> RowDropout:
        """Dropout of token rows inside the sequence-parallel region."""
        return RowDropout(p)

    def add_low_rank(self, layer: AdaptableLinear, settings: LowRankSettings) -> None:
        """Add a low-rank adapter to a linear of this factory or of the tower.

        The factor on the sharded dim of the linear's weight is sharded too.
        """
        layer.add_low_rank(settings)
        lora, table = layer.lora, self.parameter_table
        assert lora is not None
        spec = replace(table[layer.weight], tie=Tie.NONE)
        partial = replace(spec, split_axis=None, blocks=(), has_partial_gradient=True)
        splits_input = spec.split_axis == layer.input_axis
        factory = self.tower_layers if spec.is_encoder else self
        magnitude = [] if lora.magnitude is None else [lora.magnitude]
        split = []
        if spec.split_axis is None:
            table.add([lora.A, lora.B, *magnitude], spec)
        elif splits_input:
            # Each rank's rows of A give a partial x A, so the gradient of B is partial too.
            split = [lora.A]
            table.add(split, replace(spec, split_axis=0, blocks=()))
            table.add([lora.B, *magnitude], partial)
            lora.over_ranks = factory.over_ranks
        else:
            split = [lora.B, *magnitude]
            table.add([lora.B], replace(spec, split_axis=1))
            table.add(magnitude, replace(spec, split_axis=0))
            table.add([lora.A], partial)
        for parameter in split:
            # Fleet reads this attribute; its own layers set it.
            parameter.is_distributed = True
        if splits_input or spec.has_own_inputs:
            lora.random = factory.own_random

    def _make_experts(self, count: int, width: int, inner: int, init_std: float) -> Experts:
        return self._recorded(Experts(count, width, inner, init_std))

    def _recorded(self, layer: Layer) -> Layer:
        self.parameter_table.add(layer.parameters(), REPLICATED)
        return layer

    def _tied(self, layer: Layer) -> Layer:
        has_embedding, has_head = self.stage_layers.embedding, self.stage_layers.head
        if has_embedding != has_head:
            spec = self.parameter_table[layer.weight]
            tie = Tie.OWNER if has_embedding else Tie.COPY
            self.parameter_table.add([layer.weight], replace(spec, tie=tie))
        return layer


@dataclass(frozen=True)
class Placement:
    """Parallelism of a model on this rank; an argument of its constructor.

    Attributes:
        layers: builds layers, and has the table of their parameters.
        ops: collectives around the layers.
        stage_layers: layers of this rank's pipeline stage.
        checkpoint_ranks: the ranks that save the model together.
    """

    layers: LayerFactory
    ops: RegionOps
    stage_layers: StageLayers
    checkpoint_ranks: CheckpointRanks

    @property
    def parameter_table(self) -> ParameterTable:
        return self.layers.parameter_table

    @property
    def splits_parameters(self) -> bool:
        """Whether this rank has less than the full model."""
        return self.parameter_table.is_sharded or not self.stage_layers.is_full


class SingleDevicePlacement(Placement):
    """Unsharded layers: the full model, or those of one pipeline stage."""

    def __init__(
        self,
        stage_layers: StageLayers | None = None,
        checkpoint_ranks: CheckpointRanks | None = None,
        layers_are_collective: bool = False,
    ):
        ops, stage_layers = RegionOps(layers_are_collective), stage_layers or StageLayers()
        layers = LayerFactory(ParameterTable(), ops, stage_layers)
        super().__init__(layers, ops, stage_layers, checkpoint_ranks or CheckpointRanks())
