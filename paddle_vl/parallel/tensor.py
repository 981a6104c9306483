"""Tensor and sequence parallelism: a placement that builds fleet's layers.

A rank has some output features (complete attention heads) of column-parallel layers, and the
matching input features of row-parallel layers (`split_layers`). With sequence parallelism it has
`T / mp` of the token rows between those layers (`region_ops`). Not in fleet, and built here on its
operations: fewer key heads than ranks, experts, adapters, the divided vision tower, and a head
`[vocab, dim]` that may be tied to the embedding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed.fleet.meta_parallel import VocabParallelEmbedding
from paddle.nn.initializer import Normal

from paddle_vl.nn.experts import Experts
from paddle_vl.nn.linear import AdaptableLinear, Columns, VocabHead
from paddle_vl.nn.operations import RowDropout
from paddle_vl.nn.parameter_table import CheckpointRanks, ParameterTable, ParamSpec, Seat
from paddle_vl.nn.placement import (
    Layer,
    LayerFactory,
    Placement,
    RegionOps,
    ShardExperts,
    StageLayers,
)
from paddle_vl.parallel.agree import gather_values
from paddle_vl.parallel.collectives import all_reduced, gathered_arrays
from paddle_vl.parallel.context_parallel import ContextGroup
from paddle_vl.parallel.expert_parallel import shard_experts
from paddle_vl.parallel.mesh import stage_seats
from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.region_ops import FleetRegionOps, SpreadOps
from paddle_vl.parallel.row_table import ShardedTable
from paddle_vl.parallel.split_layers import (
    Column,
    FusedColumns,
    FusedColumnsOfRows,
    Row,
    RowToRows,
    SharedHeadLinear,
    SplitColumns,
    SplitExperts,
)
from paddle_vl.parallel.topology import Topology

_PARTIAL = ParamSpec(has_partial_gradient=True)


class FleetPlacement(Placement):
    """One rank of a tensor-, expert- or context-parallel group, or of several.

    Args:
        mp_group: a `paddle.distributed` group; with one rank only experts are sharded.
        sequence_parallel: keep `T / mp` token rows per rank between the sharded layers.
        vision: `spread` encodes each item on one rank; `replicate` all items on every rank.
        stage_layers: layers of this rank's pipeline stage.
        checkpoint_ranks: the ranks that save the model together; default: the mp group.
        ep_group: group over which experts are sharded; None or one rank for none. With several mp
            ranks it needs sequence parallelism.
        layers_are_collective: see `RegionOps`; always true with sharded experts.
        context: the ranks of a context-parallel group; None without.
        table_group: group over which the rows of tables are sharded, which has the mp group;
            default: the mp group.

    Raises:
        ValueError: another value of `vision`.
    """

    def __init__(
        self,
        mp_group: Any,
        sequence_parallel: bool = False,
        vision: str = "spread",
        stage_layers: StageLayers | None = None,
        checkpoint_ranks: CheckpointRanks | None = None,
        ep_group: Any = None,
        layers_are_collective: bool = False,
        context: ContextGroup | None = None,
        table_group: Any = None,
    ):
        if vision not in ("spread", "replicate"):
            raise ValueError(f"parallel.vision is {vision!r}; use 'spread' or 'replicate'")
        stage_layers = stage_layers or StageLayers()
        if checkpoint_ranks is None:
            seats = [Seat(0, mp=rank) for rank in range(mp_group.nranks)]
            checkpoint_ranks = FleetCheckpointRanks(
                mp_group.rank, mp_group.nranks, seats=seats, group=mp_group
            )
        shards_matrices = mp_group.nranks > 1
        ep_group = ep_group if ep_group is not None and ep_group.nranks > 1 else None
        shard = None
        if ep_group is not None:
            layers_are_collective, shard = True, partial(shard_experts, ep_group)
        table_group = mp_group if table_group is None else table_group
        table_group = table_group if table_group.nranks > 1 else None
        table = ParameterTable(
            mp_group if shards_matrices else None, ep_group, gathered_arrays, table_group
        )
        if shards_matrices:
            ops = FleetRegionOps(
                mp_group,
                sequence_parallel,
                vision == "spread",
                layers_are_collective,
                experts_are_whole=shard is not None,
                context=context,
            )
            layers = FleetLayers(table, ops, stage_layers, shard)
        else:
            ops = RegionOps(layers_are_collective)
            if context is not None:
                group = context.group if vision == "spread" else None
                context.shards_of_slice = int(group is not None)
                ops = SpreadOps(group, context.group, layers_are_collective, context)
            layers = LayerFactory(table, ops, stage_layers, shard)
        if table_group is not None:
            of_mp = mp_group if shards_matrices else None
            layers.make_table = partial(ShardedTable, table_group, of_mp, sequence_parallel)
        super().__init__(layers, ops, stage_layers, checkpoint_ranks)


@dataclass(frozen=True)
class FleetCheckpointRanks(CheckpointRanks):
    """All ranks of a stage share the writing of its layers.

    Attributes:
        group: the ranks that exchange values; None if each rank has all of them, or for all ranks.
    """

    group: Any = field(default=None, repr=False)
    pp_group: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, topology: Topology) -> "FleetCheckpointRanks":
        seats, encoder, of_stages = stage_seats(topology.degrees), topology.encoder, None
        if encoder is not None and encoder.saves_together:
            of_encoder, writers = encoder.seats(), encoder.grid.first_stage()
            group = None if encoder.shards_state else encoder.mp_group
            of_stages = cls(
                topology.rank, len(of_encoder), seats=of_encoder, writers=writers, group=group
            )
        rank = topology.replica_rank * topology.mp_group.nranks + topology.mp_rank
        groups = {"group": topology.saving_group, "pp_group": topology.pp_group}
        return cls(rank, len(seats), topology.pp_rank, seats, of_stages, **groups)

    def exchanged(self, message: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        received = paddle.empty([sum(arriving)], dtype=message.dtype)
        dist.alltoall_single(received, message, leaving, arriving, group=self.group)
        return received

    def wait(self) -> None:
        dist.barrier()

    def gather_stages(self, value: Any) -> list[Any]:
        if self.pp_group is None or self.pp_group.nranks == 1:
            return [value]
        return gather_values(value, self.pp_group)


class FleetLayers(LayerFactory):
    """Layers of one rank of a tensor-parallel group of at least two ranks."""

    ops: FleetRegionOps
    own_random = staticmethod(split_random)

    def __init__(
        self,
        parameter_table: ParameterTable,
        ops: FleetRegionOps,
        stage_layers: StageLayers,
        shard_experts: ShardExperts | None = None,
    ):
        super().__init__(parameter_table, ops, stage_layers, shard_experts)
        self.mp_group, self.sequence_parallel = ops.mp_group, ops.sequence_parallel
        self.separated = partial(SplitColumns, self.mp_group, self.sequence_parallel)

    def projections(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ) -> nn.Layer:
        """As in `LayerFactory`; linears with fewer heads than ranks are never fused.

        Raises:
            ValueError: see `column_linear`.
        """
        size = self.mp_group.nranks
        if any((one.num_heads or one.width) % size for one in columns):
            return self.separate_projections(in_features, columns, init_std)
        make = FusedColumnsOfRows if self.sequence_parallel else FusedColumns
        layer = make(in_features, columns, init_std, self.mp_group, splits)
        blocks = [width for one in columns for width in one.blocks or (one.width,)]
        self._add_sharded(layer.weight, axis=1, blocks=blocks)
        return layer

    def column_linear(
        self,
        in_features: int,
        out_features: int,
        init_std: float = 0.02,
        num_heads: int = 0,
        blocks: Sequence[int] = (),
    ) -> AdaptableLinear:
        """Output features of this rank: an equal share of each block, or, with fewer heads than
        ranks and one block, one head.

        Raises:
            ValueError: neither number divides the other.
        """
        size, units = self.mp_group.nranks, num_heads or out_features
        if units % size == 0:
            settings = self._fleet_settings(init_std)
            layer = Column(in_features, out_features, gather_output=False, **settings)
            self._add_sharded(layer.weight, axis=1, blocks=blocks)
            return layer
        if size % units or blocks:
            raise ValueError(
                f"{units} heads or features over {size} model-parallel ranks: neither divides the "
                "other; choose another parallel.mp_degree"
            )
        own_head = self.mp_group.rank * units // size
        layer = SharedHeadLinear(in_features, out_features, init_std, units, own_head)
        self.parameter_table.add([layer.weight], _PARTIAL)
        return layer

    def channels(self, blocks: Sequence[int], make: Callable[[int], Layer]) -> Layer:
        size = self.mp_group.nranks
        if undivided := [width for width in blocks if width % size]:
            raise ValueError(
                f"{undivided[0]} heads or channels do not divide by the model-parallel degree "
                f"{size}; choose another parallel.mp_degree"
            )
        layer = make(sum(blocks) // size)
        for parameter in layer.parameters():
            self._add_sharded(parameter, axis=0, blocks=blocks)
        return layer

    def row_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02
    ) -> AdaptableLinear:
        make, settings = Row, self._fleet_settings(init_std)
        if self.sequence_parallel:
            make = RowToRows
        layer = make(in_features, out_features, input_is_parallel=True, **settings)
        self._add_sharded(layer.weight, axis=0)
        return layer

    def vocab_embedding(
        self, vocab_size: int, dim: int, init_std: float = 0.02, is_tied: bool = False
    ) -> nn.Layer:
        embedding = VocabParallelEmbedding(
            vocab_size, dim, weight_attr=Normal(std=init_std), mp_group=self.mp_group
        )
        self._add_sharded(embedding.weight, axis=0)
        return self._tied(embedding) if is_tied else embedding

    def vocab_head(
        self,
        dim: int,
        vocab_size: int,
        init_std: float = 0.02,
        tied_weight: Tensor | None = None,
        is_tied: bool = False,
    ) -> AdaptableLinear:
        head = VocabHead(dim, vocab_size // self.mp_group.nranks, init_std, tied_weight)
        if tied_weight is None:
            self._add_sharded(head.weight, axis=0)
        return self._tied(head) if is_tied else head

    def router(self, width: int, num_experts: int, init_std: float = 0.02) -> nn.Layer:
        # Its own rows, or its shard of the experts, give each rank a partial gradient.
        router = super().router(width, num_experts, init_std)
        self.parameter_table.add(router.parameters(), _PARTIAL)
        return router

    def head_wise(self, layer: Layer) -> Layer:
        # Each rank has its own heads but all of the parameters.
        self.parameter_table.add(layer.parameters(), _PARTIAL)
        return layer

    def row_wise(self, layer: Layer) -> Layer:
        spec = ParamSpec(has_partial_gradient=self.sequence_parallel)
        self.parameter_table.add(layer.parameters(), spec)
        return layer

    def tower(self, layer: Layer) -> Layer:
        if self.tower_layers is not None:
            return super().tower(layer)
        spreads = self.ops.spreads_vision
        spec = ParamSpec(has_partial_gradient=spreads, has_own_inputs=spreads)
        self.parameter_table.add(layer.parameters(), spec)
        return layer

    def row_dropout(self, p: float) -> RowDropout:
        dropout = super().row_dropout(p)
        if self.sequence_parallel:
            dropout.random = self.own_random
        return dropout

    def over_ranks(self, x: Tensor) -> Tensor:
        return all_reduced(x, self.mp_group)

    def _make_experts(self, count: int, width: int, inner: int, init_std: float) -> Experts:
        size = self.mp_group.nranks
        if self.ops.expert_part.size > 1:
            return super()._make_experts(count, width, inner, init_std)
        if inner % size:
            raise ValueError(
                f"text_config.moe_intermediate_size {inner} does not divide by the model-parallel "
                f"degree {size}; choose another parallel.mp_degree"
            )
        experts = SplitExperts(
            count, width, inner // size, init_std, self.mp_group, self.sequence_parallel
        )
        self._add_sharded(experts.gate_up_proj, axis=2, blocks=[inner, inner])
        self._add_sharded(experts.down_proj, axis=1)
        return experts

    def _add_sharded(self, parameter: Tensor, axis: int, blocks: Iterable[int] = ()) -> None:
        # Fleet reads this attribute; its own layers set it.
        parameter.is_distributed = True
        self.parameter_table.add([parameter], ParamSpec(axis, tuple(blocks)))

    def _fleet_settings(self, init_std: float) -> dict[str, Any]:
        return {"weight_attr": Normal(std=init_std), "has_bias": False, "mp_group": self.mp_group}
