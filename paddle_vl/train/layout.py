"""How a model lies over the processes of a run: what each of them holds, and what runs it."""

from collections.abc import Callable, Sequence
from typing import Any

from paddle import nn

from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.placement import HeldLayers, SingleDevicePlacement
from paddle_vl.parallel.degrees import ModelShape, ParallelDegrees, Plan, plan_problems
from paddle_vl.parallel.expert_parallel import ExpertPlacement, FleetExpertPlacement
from paddle_vl.parallel.pipeline.runner import Part, PipelineRunner
from paddle_vl.parallel.pipeline.split import split_layers
from paddle_vl.parallel.sharding import Sharding, ShardingOptions
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology
from paddle_vl.parallel.writers import FleetWriters
from paddle_vl.train.objective import Objective
from paddle_vl.train.processes import SingleProcess
from paddle_vl.train.step import WholeModel

_NOT_DEGREES = {
    "vision",
    "pp_split",
    "branch_sync",
    "fleet",
    "reshard_after_forward",
    "reduce_dtype",
    "reduce_once_per_step",
}


def parallel_degrees(config: RunConfig) -> ParallelDegrees:
    """The `parallel` section as the parallel code has it."""
    settings = config.parallel.model_dump(exclude=_NOT_DEGREES)
    return ParallelDegrees(**settings, num_micro_batches=config.train.gradient_accumulation_steps)


class Layout:
    """This process's part of a model.

    Args:
        shape: the decoder's sizes.
        costs: of every decoder layer, and of what comes before and after them.
        pad_to_multiple_of: padded length of every batch is a multiple of it; None where this does
            not matter.

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
    ):
        self.config, self.topology = config, topology
        degrees = topology.degrees
        plan = Plan(degrees, topology.world_size, shape, pad_to_multiple_of)
        raise_problems(plan_problems(plan))
        layers, before, after = costs
        if config.parallel.pp_split == "count":
            layers, before, after = [1] * len(layers), 0, 0
        self.num_layers = len(layers)
        parts = split_layers(layers, degrees.pp_degree * degrees.num_virtual_stages, before, after)
        # One range of layers for each virtual stage.
        self.parts = parts[topology.pp_rank :: degrees.pp_degree]

    def placement(self) -> SingleDevicePlacement:
        """What this process holds of the model."""
        topology, parallel = self.topology, self.config.parallel
        held, writers = None, FleetWriters.of(topology)
        if topology.degrees.pp_degree > 1:
            held = HeldLayers(
                embedding=self.parts[0].start == 0,
                layers=frozenset(layer for part in self.parts for layer in part),
                head=self.parts[-1].stop == self.num_layers,
            )
        splits_matrices = topology.mp_group.nranks > 1
        arguments = [held, writers]
        if splits_matrices:
            arguments = [topology.mp_group, parallel.sequence_parallel, parallel.vision, *arguments]
        if topology.ep_group.nranks > 1:
            placement = FleetExpertPlacement if splits_matrices else ExpertPlacement
            return placement(topology.ep_group, *arguments)
        return (FleetPlacement if splits_matrices else SingleDevicePlacement)(*arguments)

    def prepare_training(self, model: nn.Layer) -> None:
        """Give the parameters their values, and the optimizer what it works on.

        Each is divided or copied before the next one is filled, see `Fillable.fill`. What is frozen
        is known. Units of sharding are what recomputation works on, and recomputed already.
        """
        group, stage = self.topology.sharding_group, self.topology.degrees.sharding_stage
        if group.nranks == 1:
            model.placement.trained = MasterWeights(model.fill())
        else:
            parallel = self.config.parallel
            options = ShardingOptions(
                parallel.reshard_after_forward,
                parallel.reduce_dtype,
                parallel.reduce_once_per_step,
            )
            chains = [model.vision_blocks, model.decoder_layers]
            model.placement.trained = Sharding(
                model.fill(), group, stage, chains, model.tables, options
            )

    def runner(
        self,
        model: nn.Layer,
        make_part: Callable[[Any, range], Part],
        processes: SingleProcess,
        objective: Objective,
    ) -> WholeModel | PipelineRunner:
        """What computes losses and gradients: the model, or this process's parts of it."""
        if self.topology.degrees.pp_degree == 1:
            return WholeModel(model, processes, objective)
        parts = [make_part(model, layers) for layers in self.parts]
        group, dtype = self.topology.pp_group, self.config.model.compute_dtype
        return PipelineRunner(model, parts, group, dtype, objective, processes.data_size)
