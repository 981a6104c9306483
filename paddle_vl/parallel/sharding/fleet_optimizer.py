"""Sharding stage 1: fleet's DygraphShardingOptimizerV2, which divides AdamW over a group.

Fleet lays the trained parameters out behind each other in buffers, each with a buffer of float32
gradients. Of a buffer every rank owns one part of equal length; where a parameter and that part
meet is the rank's slice of the parameter, flat, of any length from nothing to all of it and the
zeros behind it. AdamW updates slices. Gradients of a buffer are reduced in one collective, and its
parameters come back in another.

What is not fleet's here, and why:
- Gradients are sums: fleet's average over ranks is multiplied by their number, in float32.
- Half-precision parameters have float32 copies of their slices, see `paddle_vl.nn.adamw`.
- `main_grad` is used for float32 parameters too. Without it, clearing gradients detaches them from
  fleet's buffers, and nothing is reduced any more.
- Slices get their gradients before the first step. Fleet does it in `step`, behind the sum over dp,
  which therefore leaves out the first step.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed import fleet

from paddle_vl.nn.adamw import AdamW
from paddle_vl.nn.master_weights import master_copy
from paddle_vl.nn.parameter_table import ParameterTable, Tie
from paddle_vl.parallel.sharding import fleet_names
from paddle_vl.parallel.sharding.buckets import check_whole
from paddle_vl.parallel.sharding.fleet_overlap import FinishedGathers, OrderedReductions
from paddle_vl.parallel.topology import Topology


class FleetSharding:
    """Trained parameters of one model whose optimizer is divided over the sharding group.

    The interface of `paddle_vl.nn.master_weights.MasterWeights`. What the optimizer updates is
    known after `distribute`; until then `shard_of` gives the parameters themselves.

    A step: for each micro-batch forward and backward; `end_backward`; `step` on what `shard_of`
    gives, or none; `clear`. All but forward and backward are collective.

    Args:
        parameters: the model's on this rank, trained and frozen, in the same order on the group's
            ranks. Those that are `stop_gradient` now count as frozen.
        topology: of the run, with a sharding group of at least two ranks.
        parameter_table: of the model.
        units: layers whose parameters are used by them alone; with `overlaps_gathers` the forward
            pass of each waits for its own parameters only.
        overlaps_gathers: updated parameters come back while the next step's forward pass runs.

    Raises:
        RuntimeError: another version of Paddle's sharding optimizer.
    """

    stage = 1

    def __init__(
        self,
        parameters: Iterable[Tensor],
        topology: Topology,
        parameter_table: ParameterTable,
        units: Iterable[nn.Layer] = (),
        overlaps_gathers: bool = False,
    ):
        fleet_names.check_functions()
        self.topology, self.group = topology, topology.sharding_group
        self._table = parameter_table
        self.optimizer: fleet_names.DygraphShardingOptimizerV2 | None = None
        self._units = list(units) if overlaps_gathers else []
        self._overlaps_gathers = overlaps_gathers
        self._trained = {id(p): p for p in parameters if not p.stop_gradient}
        self._updated: dict[int, Tensor | None] = {}
        self._masters: dict[str, Tensor] = {}

    def distribute(self, adamw: AdamW) -> None:
        """Divide an optimizer of whole trained parameters, which has no state yet.

        Afterwards the parameters have fleet's storage, and the optimizer works on what `shard_of`
        gives.

        Raises:
            ValueError: it has parameters that are not the trained ones.
        """
        parameters = list(adamw._parameter_list)
        if {id(p) for p in parameters} != set(self._trained):
            raise ValueError(
                f"the optimizer has {len(parameters)} parameters, and {len(self._trained)} are "
                "trained: they must be the same ones"
            )
        # A stage of a pipeline may have nothing to train.
        if not parameters:
            return
        for parameter in parameters:
            # Fleet gives each color buffers of its own.
            if self._table[parameter].tie is not Tie.NONE:
                # So it is cut alike on both ends of a pipeline.
                parameter.color = "tied"
            elif self._table[parameter].is_expert:
                parameter.color = "expert"
        fleet_names.MixPrecisionLayer(nn.ParameterList(parameters), dtype="bfloat16")
        self._hybrid = fleet.distributed_optimizer(adamw)
        self.optimizer = self._hybrid._inner_opt
        if not isinstance(self.optimizer, fleet_names.DygraphShardingOptimizerV2):
            raise RuntimeError(
                f"fleet divides the optimizer with {type(self.optimizer).__name__}: start fleet "
                "through paddle_vl.parallel.topology.initialize with a sharding_degree above 1"
            )
        fleet_names.check_attributes(self.optimizer)
        self.optimizer._collect_comm_buffers()
        self.optimizer._assign_slice_grad()
        self._buffers = list(self.optimizer._comm_buffer_list)
        self._views = {
            name: view
            for buffer in self._buffers
            for name, view in buffer._sharding_param_grad_view.items()
        }
        for parameter in parameters:
            self._updated[id(parameter)] = self._make_updated(parameter)
        adamw.use_masters(self._masters)
        if self.optimizer.comm_overlap:
            self._reductions = OrderedReductions(self._buffers)
        if self._overlaps_gathers:
            self._hybrid._set_all_gather_overlap_forward(True, None)
            self._gathers = FinishedGathers(self.optimizer, self._units)

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        """`[n]`, this rank's slice or its float32 copy; None where this rank has nothing of it.

        Raises:
            ValueError: the parameter is not trained.
        """
        if id(parameter) not in self._trained:
            raise ValueError(f"{parameter.name} is not divided: frozen, or not of this model")
        return self._updated.get(id(parameter), parameter)

    def copies(self) -> list[Tensor]:
        """Float32 copies of slices; slices of float32 parameters are parts of these."""
        return list(self._masters.values())

    def gradient_sums(self) -> list[Tensor]:
        """Fleet's buffers, float32, of all trained parameters at any time."""
        return [buffer.grad_storage for buffer in self._buffers] if self.optimizer else []

    def begin_step(self, num_micro_batches: int) -> None:
        """In front of the first micro-batch: how many backward passes there will be."""
        if self.optimizer is not None and self.optimizer.comm_overlap:
            self.optimizer._reset_comm_buffers_acc_steps(num_micro_batches)

    def end_micro_batch(self) -> None:
        """Nothing is left to do: fleet's hooks have added the gradients up."""

    @paddle.no_grad()
    def end_backward(self) -> None:
        """Behind the last micro-batch: slices get sums over the sharding group and over dp.

        Experts, of which dp processes hold different ones, are summed over the former alone.
        """
        if self.optimizer is None:
            return
        if self.optimizer.comm_overlap:
            self._reductions.finish()
        shared = [p for p in self._trained.values() if not self._table[p].is_expert]
        self._hybrid._hybrid_sync_grad(shared)
        for buffer in self._buffers:
            is_expert = self._table[buffer.params[0]].is_expert
            parts = 1 if is_expert else self.topology.degrees.dp_degree
            length = buffer.grad_storage.size // self.group.nranks
            begin = self.group.rank * length
            own = buffer.grad_storage._slice(begin, begin + length)
            own.scale_(float(self.group.nranks * parts))

    def step(self) -> None:
        """Update the slices, and have whole parameters from them on all ranks."""
        if self.optimizer is None:
            return
        if self._overlaps_gathers:
            # Those of layers that have not run.
            self._gathers.finish()
        self.optimizer.step()
        if self._overlaps_gathers:
            self._gathers.start()

    @paddle.no_grad()
    def clear(self) -> None:
        """Gradients are zeros, in fleet's buffers."""
        for buffer in self._buffers if self.optimizer else ():
            buffer.grad_storage.zero_()

    @paddle.no_grad()
    def all_gather_parameters(self) -> None:
        """What was written to slices or copies reaches the whole parameters; `step` does it."""
        if self.optimizer is None:
            return
        if self._overlaps_gathers:
            self._gathers.finish()
        for name, master in self._masters.items():
            part = self.optimizer._slice_params[name]
            paddle.assign(master.astype(part.dtype), part)
        for buffer in self._buffers:
            buffer.sync_params()

    @paddle.no_grad()
    def gathered_value(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """The parameter's whole value, or that of a `value` cut like its slice, such as a moment.

        Every rank calls it.

        Args:
            value: `[n]`; anything where this rank has nothing of the parameter.
        """
        if value is None:
            if self._overlaps_gathers and self.optimizer is not None:
                self._gathers.finish()
            return parameter.detach()
        flat = paddle.empty([parameter.size], dtype=value.dtype)
        for rank, begin, end in self._owners(parameter):
            part = flat._slice(begin, end)
            if rank == self.group.rank:
                paddle.assign(value.detach().reshape([-1])[: end - begin], part)
            dist.broadcast(part, src=self.group.ranks[rank], group=self.group)
        return flat.reshape(parameter.shape)

    def own_shard(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """`[n]`, this rank's slice of an array in the parameter's shape, zeros where it ends.

        Raises:
            ValueError: the shapes differ.
        """
        check_whole(whole, parameter)
        begin, end = self._span(parameter, self.group.rank)
        own = np.zeros([max(end - begin, 0)], whole.dtype)
        values = whole.reshape(-1)[begin : max(end, begin)]
        own[: values.size] = values
        return own

    def numbers_of_all(self, own: Mapping[str, Tensor | None]) -> Callable[[str], Tensor]:
        """Single numbers, none below zero, of which every rank has some, and ranks the same ones.

        Args:
            own: by name `[1]`, float32; None for those that this rank does not have.

        Returns:
            Gives each by its name; every rank calls it.
        """
        found: dict[str, Tensor] = {}

        def find(name: str) -> Tensor:
            if not found:
                found.update(zip(own, self._gathered_numbers(own.values()), strict=True))
            return found[name]

        return find

    @paddle.no_grad()
    def _gathered_numbers(self, own: Iterable[Tensor | None]) -> list[Tensor]:
        # On the device that this group reaches: Paddle keeps some on the host.
        values = [0.0 if number is None else number.item() for number in own]
        numbers = paddle.to_tensor(values, dtype="float32")
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return numbers.split(len(values))

    def _make_updated(self, parameter: Tensor) -> Tensor | None:
        begin, end = self._span(parameter, self.group.rank)
        if end <= begin:
            return None
        part = self.optimizer._slice_params[parameter.name]
        # Fleet reads it.
        part.is_distributed = parameter.is_distributed
        if part.dtype == paddle.float32:
            return part
        with paddle.no_grad():
            master = master_copy(parameter, part.detach())
        master.optimize_attr = parameter.optimize_attr
        master.main_grad = part.main_grad
        self._masters[part.name] = master
        return master

    def _span(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Where in the flat parameter a rank's slice begins and ends, zeros behind it included."""
        view = self._views[parameter.name]
        length = view._param_buffer.size // self.group.nranks
        begin = max(view._index, rank * length)
        end = min(view._index + view._padded_size, (rank + 1) * length)
        return begin - view._index, end - view._index

    def _owners(self, parameter: Tensor) -> list[tuple[int, int, int]]:
        """Ranks of the group that have values of the parameter, and from where to where."""
        spans = [(r, *self._span(parameter, r)) for r in range(self.group.nranks)]
        cut = [(rank, begin, min(end, parameter.size)) for rank, begin, end in spans]
        return [(rank, begin, end) for rank, begin, end in cut if end > begin]
