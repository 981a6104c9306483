"""How a model is distributed over the ranks of a run: its placement, store and runner."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from paddle import Tensor, nn

from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.nn.master_weights import MasterWeights, ParameterStore
from paddle_vl.nn.objective import BatchAdapter, Loss
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.nn.placement import Placement, SingleDevicePlacement, StageLayers
from paddle_vl.parallel.collectives import gathered_rows
from paddle_vl.parallel.colocated.encoder import ItemEncoder
from paddle_vl.parallel.colocated.encoder_layers import add_encoder
from paddle_vl.parallel.colocated.runner import ColocatedRunner, PartsStore, encoder_store
from paddle_vl.parallel.context_parallel import ContextGroup
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems
from paddle_vl.parallel.fleet_strategy import overlaps
from paddle_vl.parallel.pipeline.runner import ModelChunk, PipelineRunner, split_backward
from paddle_vl.parallel.pipeline.schedule import chunks_of_stage, num_chunks, split_layers
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.sharding import FleetSharding, Sharding, ShardingOptions
from paddle_vl.parallel.summed_weights import SummedWeights
from paddle_vl.parallel.tensor import FleetCheckpointRanks, FleetPlacement
from paddle_vl.parallel.topology import Topology
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.step import ModelRunner, Runner


def parallel_degrees(config: RunConfig) -> ParallelDegrees:
    """The degrees of a run's `parallel` section."""
    settings = config.parallel.model_dump(include=set(ParallelDegrees.model_fields))
    return ParallelDegrees(**settings, num_micro_batches=config.train.gradient_accumulation_steps)


class Layout:
    """This rank's shards and pipeline stage of a model.

    Args:
        shape: the decoder's sizes.
        costs: of every decoder layer, and of what precedes and follows them.
        pad_to_multiple_of: divides the padded length of every batch; None for any length.
        encoder_shape: the encoder's sizes; None for a family without the colocated schedule.

    Raises:
        ValueError: every rule that model, degrees and padding break.
    """

    def __init__(
        self,
        config: RunConfig,
        topology: Topology,
        shape: ModelShape,
        costs: tuple[Sequence[float], float, float],
        pad_to_multiple_of: int | None = None,
        encoder_shape: EncoderShape | None = None,
    ):
        self.config, self.topology = config, topology
        degrees = topology.degrees
        plan = TopologyPlan(degrees, topology.world_size, shape, pad_to_multiple_of, encoder_shape)
        raise_problems(plan_problems(plan))
        layers, before, after = costs
        if topology.encoder is not None:
            # The first stage has no tower.
            before = 0.0
        if config.parallel.pp_split == "count":
            layers, before, after = [1] * len(layers), 0, 0
        self.num_layers = len(layers)
        # The layers of all model chunks, and those of this stage's chunks.
        self.all_chunks = split_layers(layers, num_chunks(degrees), before, after)
        own = chunks_of_stage(degrees, topology.pp_rank)
        self.chunks = [self.all_chunks[number] for number in own]

    def placement(self) -> Placement:
        """This rank's placement of the model."""
        topology, parallel = self.topology, self.config.parallel
        stage_layers, ranks = None, FleetCheckpointRanks.of(topology)
        if topology.degrees.pp_degree > 1:
            stage_layers = StageLayers(
                embedding=self.chunks[0].start == 0,
                layers=frozenset(layer for chunk in self.chunks for layer in chunk),
                head=self.chunks[-1].stop == self.num_layers,
                encoder_everywhere=topology.encoder is not None,
            )
        shards_layers = topology.sharding_group.nranks > 1 and topology.degrees.sharding_stage > 1
        context = None
        if topology.cp_group is not None:
            hidden = overlaps(topology.degrees, keys=parallel.cp_gather_overlap)
            context = ContextGroup(
                topology.cp_group,
                topology.cp_mp_group,
                topology.degrees.cp_attention == "ulysses",
                hidden["cp_gather_overlap"].is_on,
            )
        groups = (topology.mp_group, topology.ep_group, topology.table_group)
        if {group.nranks for group in groups} == {topology.degrees.cp_degree} == {1}:
            placement = SingleDevicePlacement(stage_layers, ranks, shards_layers)
        else:
            placement = FleetPlacement(
                topology.mp_group,
                parallel.sequence_parallel,
                parallel.vision,
                stage_layers,
                ranks,
                topology.ep_group,
                shards_layers,
                context,
                topology.table_group,
            )
        if topology.encoder is not None:
            add_encoder(placement, topology.encoder)
        table = placement.parameter_table
        table.readers, table.gather_rows = topology.readers, gathered_rows
        return placement

    def parameter_store(self, model: nn.Layer, has_reference: bool = False) -> ParameterStore:
        """Materialize the parameters, and make the store that the optimizer updates.

        Each parameter is sharded or copied before the next one is materialized, see
        `Materializable.materialize`. Frozen parameters are `stop_gradient` already. Sharding works
        on the same layers as recomputation. A colocated encoder has a store of its own. With a
        reference, whose parameters take the model's place within a step, no gather runs beside it.
        """
        self._has_reference = has_reference
        if self.topology.encoder is None:
            units = [*model.vision_blocks, *model.decoder_layers]
            return self._store(model, model.materialize(), units)
        table, parameters = model.placement.parameter_table, list(model.materialize())
        of_encoder = [p for p in parameters if table[p].is_encoder]
        of_language = [p for p in parameters if not table[p].is_encoder]
        return PartsStore(
            self._store(model, of_language, model.decoder_layers),
            encoder_store(of_encoder, self.topology.encoder),
            of_encoder,
        )

    def _store(
        self, model: nn.Layer, parameters: Iterable[Tensor], units: Sequence[nn.Layer]
    ) -> ParameterStore:
        group, stage = self.topology.sharding_group, self.topology.degrees.sharding_stage
        parallel = self.config.parallel
        gathers = False if self._has_reference else parallel.sharding_gather_overlap
        sums = parallel.dp_comm_overlap
        hidden = overlaps(self.topology.degrees, parallel.fleet, gathers, sums)
        if group.nranks == 1:
            if self.topology.dp_group.nranks == 1:
                return MasterWeights(parameters)
            is_hidden = hidden["dp_comm_overlap"].is_on
            return SummedWeights(parameters, model, self.topology, is_hidden)
        if stage == 1:
            return FleetSharding(
                parameters,
                self.topology,
                model.placement.parameter_table,
                units,
                hidden["sharding_gather_overlap"].is_on,
                hidden["sharding_configs.comm_overlap"].is_on,
            )
        options = ShardingOptions(
            parallel.reshard_after_forward, parallel.reduce_dtype, parallel.reduce_once_per_step
        )
        chains = [model.vision_blocks, model.decoder_layers]
        table, topology = model.placement.parameter_table, self.topology
        kinds = (ParamSpec(is_table=True), ParamSpec(is_expert=True), ParamSpec())
        dp_groups = {topology.sharding_group_of(kind): topology.dp_group_of(kind) for kind in kinds}
        dp_groups = {shards: copies for shards, copies in dp_groups.items() if copies.nranks > 1}

        def group_of(parameter: Tensor) -> Any:
            return topology.sharding_group_of(table[parameter])

        return Sharding(
            parameters, group, stage, chains, model.tables, options, group_of, dp_groups
        )

    def runner(
        self,
        model: nn.Layer,
        make_stage: Callable[[Any, range], ModelChunk],
        ranks: SingleRank,
        loss: Loss,
        adapter: BatchAdapter,
        item_encoder: Callable[[Any], ItemEncoder] | None = None,
    ) -> Runner:
        """Computes losses and gradients with the model, or with this stage's layers.

        Args:
            item_encoder: makes the model's encoder under the colocated schedule.
        """
        if self.topology.degrees.pp_degree == 1:
            return ModelRunner(model, loss, adapter, ranks)
        if self.topology.degrees.pp_schedule == "dualpipev":
            split_backward(model.decoder_layers)
        make, settings = PipelineRunner, {}
        if self.topology.encoder is not None:
            assert item_encoder is not None, "the colocated schedule needs the family's encoder"
            make = ColocatedRunner
            encoder = item_encoder(model)
            splits_rows = self.config.parallel.sequence_parallel and encoder.splits_rows
            settings = {
                "encoder": encoder,
                "topology": self.topology,
                "ranks_use_other_rows": splits_rows,
                "offloads_rows": self.config.parallel.encoder.offload_rows,
            }
        return make(
            model,
            [make_stage(model, layers) for layers in self.all_chunks],
            self.topology.degrees,
            self.topology.pp_rank,
            self.config.model.compute_dtype,
            loss,
            adapter,
            ranks.data_size,
            self.config.reserved_rows,
            partial(phase, Phase.FORWARD_BACKWARD),
            **settings,
        )
