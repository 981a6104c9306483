"""How a model lies over the processes of a run: what each of them holds, and what runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paddle import nn

from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.placement import HeldLayers, SingleDevicePlacement
from paddle_vl.parallel.degrees import ModelShape, ParallelDegrees, Plan, plan_problems
from paddle_vl.parallel.expert_parallel import ExpertPlacement, FleetExpertPlacement
from paddle_vl.parallel.pipeline.runner import ModelChunk, PipelineRunner
from paddle_vl.parallel.pipeline.schedule import chunks_of_stage, num_chunks, split_layers
from paddle_vl.parallel.pipeline.split_backward import split_backward
from paddle_vl.parallel.sharding import FleetSharding, Sharding, ShardingOptions
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology
from paddle_vl.parallel.writers import FleetWriters
from paddle_vl.train.objective import Objective
from paddle_vl.train.processes import SingleProcess
from paddle_vl.train.step import WholeModel


@dataclass(frozen=True)
class ReservedRows:
    """The largest micro-batch that a pipeline's messages are made for, over all mp processes.

    Attributes:
        tokens, visual: its token rows, and those of them that are visual.
    """

    tokens: int
    visual: int

    @classmethod
    def of(cls, config: RunConfig) -> "ReservedRows | None":
        """As `parallel.pp_token_rows` and `pp_visual_rows` say, or the data's bounds in place of
        one of them; None where neither is set."""
        parallel, data = config.parallel, config.data
        tokens, visual = parallel.pp_token_rows, parallel.pp_visual_rows
        if tokens is None and visual is None:
            return None
        size, multiple = config.train.per_device_train_batch_size, data.pad_to_multiple_of
        if tokens is None:
            longest = data.packing_length or data.max_length
            tokens = size * -(-longest // multiple) * multiple
        if visual is None:
            of_row = data.max_vision_tokens_per_row
            visual = tokens if of_row is None else min(tokens, size * of_row)
        return cls(tokens, visual)


def parallel_degrees(config: RunConfig) -> ParallelDegrees:
    """The `parallel` section as the parallel code has it."""
    of_section = {item.name for item in fields(ParallelDegrees)} - {"num_micro_batches"}
    settings = {name: getattr(config.parallel, name) for name in of_section}
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
        self.reserved = ReservedRows.of(config)
        if self.reserved is not None and pad_to_multiple_of is None:
            raise ValueError(
                "parallel.pp_token_rows and parallel.pp_visual_rows are for the messages of a "
                "Qwen3-VL; those of a policy are as large as a step needs: remove the settings"
            )
        layers, before, after = costs
        if config.parallel.pp_split == "count":
            layers, before, after = [1] * len(layers), 0, 0
        self.num_layers = len(layers)
        # The layers of each part of the model, and of those of this stage.
        self.all_parts = split_layers(layers, num_chunks(degrees), before, after)
        own = chunks_of_stage(degrees, topology.pp_rank)
        self.parts = [self.all_parts[number] for number in own]

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
        units = [*model.vision_blocks, *model.decoder_layers]
        if group.nranks == 1:
            model.placement.trained = MasterWeights(model.fill())
        elif stage == 1:
            overlaps = self.config.parallel.sharding_gather_overlap
            model.placement.trained = FleetSharding(model.fill(), self.topology, units, overlaps)
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
        make_part: Callable[[Any, range], ModelChunk],
        processes: SingleProcess,
        objective: Objective,
    ) -> WholeModel | PipelineRunner:
        """What computes losses and gradients: the model, or this process's parts of it."""
        if self.topology.degrees.pp_degree == 1:
            return WholeModel(model, processes, objective)
        if self.topology.degrees.pp_schedule == "dualpipev":
            split_backward(model.decoder_layers)
        return PipelineRunner(
            model,
            [make_part(model, layers) for layers in self.all_parts],
            self.topology.degrees,
            self.topology.pp_rank,
            self.config.model.compute_dtype,
            objective,
            processes.data_size,
            self.reserved,
        )
