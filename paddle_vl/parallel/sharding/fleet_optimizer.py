"""Sharding stage 1: fleet's DygraphShardingOptimizerV2, which shards the state of AdamW.

Fleet places the trained parameters in buffers, each with a buffer of float32 gradients, and divides
each buffer equally over the ranks. The overlap of a rank's range with a parameter is the rank's
slice of the parameter: flat, from empty to the full parameter with its padding. AdamW updates
slices. Per step and buffer, gradients are reduce-scattered over the sharding group, this rank's
part is all-reduced over dp, and updated parameters are all-gathered. Experts have buffers of their
own, over the ranks with the same experts.

Differences from fleet:
- Gradients are sums: fleet's average over ranks is multiplied by their number, in float32.
- Half-precision parameters have float32 copies of their slices, which the optimizer updates.
- `main_grad` is used for float32 parameters too. Without it, clearing gradients detaches them from
  fleet's buffers, and nothing is reduced any more.
- Slices get their gradients before the first step, and the all-reduce over dp takes them in place.
  Fleet does so in `step`, after that all-reduce, which therefore leaves out the first step.
- Collectives of buffers have a fixed order. Fleet reduce-scatters a buffer once it has all of its
  gradients, and all-gathers the next buffer when a layer needs it. Ranks whose micro-batches have
  different optional branches would do so in different orders, and a buffer with a missing gradient
  would never be reduced.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_vl.nn.flat_buckets import FlatBucket
from paddle_vl.nn.master_weights import master_copy
from paddle_vl.nn.parameter_table import ParameterTable, Spread, Tie
from paddle_vl.parallel.collectives import InOrder
from paddle_vl.parallel.sharding.buckets import own_slice
from paddle_vl.parallel.topology import Topology

Key = TypeVar("Key", bound=Hashable)


class FleetSharding:
    """The trained parameters of a model, with the optimizer state sharded by fleet.

    A `paddle_vl.nn.master_weights.ParameterStore`. `shard_of` returns parameters before
    `distribute`, and slices after it.

    A step: forward and backward of each micro-batch; `end_backward`; `step`; `clear`. The last
    three are collective over the sharding and dp groups.

    Args:
        parameters: the model's on this rank, trained and frozen, in the same order on all ranks.
            Parameters with `stop_gradient` are frozen from then on.
        topology: with a sharding group of at least two ranks.
        parameter_table: of the model.
        units: layers whose parameters nothing else uses; with `overlaps_gathers` the forward pass
            of each waits for its own parameters only.
        overlaps_gathers: all-gather updated parameters during the next step's forward pass.
        overlaps_reductions: reduce-scatter gradients during the last backward pass, as fleet's
            option `comm_overlap` does without a pipeline.
    """

    stage = 1

    def __init__(
        self,
        parameters: Iterable[Tensor],
        topology: Topology,
        parameter_table: ParameterTable,
        units: Iterable[nn.Layer] = (),
        overlaps_gathers: bool = False,
        overlaps_reductions: bool = False,
    ):
        self.topology, self.group = topology, topology.sharding_group
        self._table = parameter_table
        # Any: fleet's stubs lack the attributes used here.
        self.optimizer: Any = None
        self._units = list(units) if overlaps_gathers else []
        self._overlaps_gathers, self._overlaps_reductions = overlaps_gathers, overlaps_reductions
        self._trained = {id(p): p for p in parameters if not p.stop_gradient}
        self._updated: dict[int, Tensor | None] = {}
        self._masters: dict[str, Tensor] = {}

    def distribute(self, adamw: Any) -> None:
        """Shard `Optimizer`'s AdamW of the trained parameters, which has no state yet.

        Afterwards the parameters live in fleet's buffers, and the optimizer updates slices.
        """
        parameters: list[Any] = list(adamw._parameter_list or ())
        # A pipeline stage may have no trained parameters.
        if not parameters:
            return
        for parameter in parameters:
            # Fleet puts each color in buffers of its own.
            if self._table[parameter].tie is not Tie.NONE:
                # Sliced alike on the first and the last pipeline stage.
                parameter.color = "tied"
            elif (group := self._group_of(parameter)) is not self.group:
                kind = "expert" if self._table[parameter].is_expert else "table"
                parameter.color = {"color": kind, "group": group}
        MixPrecisionLayer(nn.ParameterList(parameters), dtype="bfloat16")
        hybrid: Any = fleet.distributed_optimizer(adamw)
        self.optimizer = hybrid._inner_opt
        assert isinstance(self.optimizer, DygraphShardingOptimizerV2), "by `fleet_strategy`"
        self.optimizer._collect_comm_buffers()
        self.optimizer._assign_slice_grad()
        self._buffers = list(self.optimizer._comm_buffer_list)
        for buffer in self._buffers:
            if self._group_of(buffer.params[0]).nranks == 1:
                buffer._comm_grads = lambda: None
        self._views = {
            name: view
            for buffer in self._buffers
            for name, view in buffer._sharding_param_grad_view.items()
        }
        for parameter in parameters:
            self._updated[id(parameter)] = self._make_updated(parameter)
        adamw.use_masters(self._masters)
        if self._overlaps_reductions and not self.optimizer.comm_overlap:
            # Fleet refuses it under a pipeline, which would make buffers of its own. The hooks of
            # V2 count the micro-batches of these, whatever runs them.
            self.optimizer.comm_overlap = True
            self.optimizer.register_reduce_overlap_hook(use_comm=True)
        dp_groups = [self._dp_group_of(buffer.params[0]) for buffer in self._buffers]
        self._reductions = OrderedReductions(self._buffers, dp_groups)
        if self._overlaps_gathers:
            hybrid._set_all_gather_overlap_forward(True, None)
            self._gathers = OrderedGathers(self.optimizer, self._units)

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        """`[n]`, this rank's slice or its float32 copy; None if this rank's slice is empty.

        Raises:
            ValueError: the parameter is not trained.
        """
        if id(parameter) not in self._trained:
            raise ValueError(f"{parameter.name} is not sharded: frozen, or not of this model")
        return self._updated.get(id(parameter), parameter)

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        """Never called: fleet's buffers are flat, and AdamW updates slices of them."""
        raise RuntimeError("fleet's sharding optimizer has buffers of its own")

    def begin_step(self, num_micro_batches: int) -> None:
        """Before the first micro-batch: set the number of backward passes."""
        if self.optimizer is not None and self.optimizer.comm_overlap:
            self.optimizer._reset_comm_buffers_acc_steps(num_micro_batches)

    def end_micro_batch(self) -> None:
        """Nothing to do: fleet's hooks accumulate the gradients."""

    @paddle.no_grad()
    def end_backward(self) -> None:
        """After the last micro-batch: reduce-scatter over the sharding group and all-reduce over dp
        what the backward pass has left."""
        if self.optimizer is None:
            return
        self._reductions.finish()
        for buffer in self._buffers:
            buffer.scale_grads()
            own_part(buffer).scale_(float(buffer._comm_group.nranks))

    def step(self) -> None:
        """Update the slices, and all-gather the parameters."""
        if self.optimizer is None:
            return
        # For layers that did not run.
        self.finish_gathers()
        self.optimizer.step()
        if self._overlaps_gathers:
            self._gathers.start()

    @paddle.no_grad()
    def clear(self) -> None:
        """Set the gradients in fleet's buffers to zero."""
        for buffer in self._buffers if self.optimizer else ():
            buffer.grad_storage.zero_()

    def finish_gathers(self) -> None:
        """Wait for all-gathers of the last step, which read the slices."""
        if self._overlaps_gathers and self.optimizer is not None:
            self._gathers.finish()

    @paddle.no_grad()
    def all_gather_parameters(self) -> None:
        """All-gather parameters after writing to slices or copies; `step` includes it."""
        if self.optimizer is None:
            return
        self.finish_gathers()
        for name, master in self._masters.items():
            part = self.optimizer._slice_params[name]
            paddle.assign(master.astype(part.dtype), part)
        for buffer in self._buffers:
            buffer.sync_params()

    def gathered_value(self, parameter: Tensor) -> Tensor:
        """The parameter, which every rank has all of."""
        self.finish_gathers()
        return parameter.detach()

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        """The full parameter is on every rank, of a `value` the slices."""
        if value is None:
            return Spread(None, partial(self.gathered_value, parameter))
        group, size = self._group_of(parameter), parameter.size
        spans = [self._span(parameter, rank) for rank in range(group.nranks)]
        spans = [(begin, min(end, size)) for begin, end in spans]
        return Spread(spans, lambda: value, group.rank)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        """`[n]`, this rank's slice of an array in the parameter's shape, padded with zeros.

        Raises:
            ValueError: the shapes differ.
        """
        rank = self._group_of(parameter).rank
        return own_slice(full, parameter, *self._span(parameter, rank))

    @paddle.no_grad()
    def numbers_of_all(self, own: Mapping[Key, Tensor | None]) -> dict[Key, Tensor]:
        """Non-negative scalars, each of which some ranks of its group have, with equal values, on
        all of them. Collective: one all-reduce (max) per group.

        Args:
            own: float32 `[1]` by key, at least one; None if this rank does not have it.
        """
        # Collected on the group's device: Paddle keeps some of them on the host.
        values = [0.0 if number is None else number.item() for number in own.values()]
        numbers = paddle.to_tensor(values, dtype="float32")
        # A number of experts is the same on all ranks of both groups.
        for group in dict.fromkeys((self.group, self.topology.expert_sharding_group)):
            if group.nranks > 1:
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(own, numbers.split(len(values)), strict=True))

    def _make_updated(self, parameter: Tensor) -> Tensor | None:
        begin, end = self._span(parameter, self._group_of(parameter).rank)
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

    def _group_of(self, parameter: Tensor) -> Any:
        """The ranks that shard its state."""
        return self.topology.sharding_group_of(self._table[parameter])

    def _dp_group_of(self, parameter: Tensor) -> Any:
        """The ranks that have the same shard of it."""
        return self.topology.dp_group_of(self._table[parameter])

    def _span(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Begin and end of a rank's slice in the flat parameter, padding included."""
        view = self._views[parameter.name]
        length = view._param_buffer.size // self._group_of(parameter).nranks
        begin = max(view._index, rank * length)
        end = min(view._index + view._padded_size, (rank + 1) * length)
        return begin - view._index, end - view._index


class OrderedReductions:
    """Reductions of fleet's buffers, from the last buffer on: in the backward pass where fleet's
    hooks are registered, else at its end.

    A buffer's all-reduce over dp follows its reduce-scatter, and begins with the next buffer's, so
    that the backward pass waits for neither.

    Args:
        buffers: in the order of the forward pass; fleet calls `comm_grads` of each when it has all
            gradients of a step.
        dp_groups: of each buffer.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer], dp_groups: Sequence[Any]):
        last_first = list(zip(buffers, dp_groups, strict=True))[::-1]
        self._order = InOrder([partial(self._start, *entry) for entry in last_first])
        self._not_summed: list[tuple[FusedCommBuffer, Any]] = []
        for number, (buffer, _) in enumerate(last_first):
            buffer.comm_grads = partial(self._order.complete, number)

    def finish(self) -> None:
        """After the last backward pass: start the reductions of the other buffers, in which a
        gradient is missing."""
        self._order.finish()
        while self._not_summed:
            sum_over_dp(*self._not_summed.pop(0))

    def _start(self, buffer: FusedCommBuffer, dp_group: Any) -> None:
        buffer._comm_grads()
        self._not_summed.append((buffer, dp_group))
        if len(self._not_summed) > 1:
            sum_over_dp(*self._not_summed.pop(0))


def sum_over_dp(buffer: FusedCommBuffer, group: Any) -> None:
    """Start the all-reduce of this rank's part of a buffer, once it is reduce-scattered."""
    if group.nranks == 1 or not buffer.need_reduce_scale_sync():
        return
    # None where one rank has all of the buffer.
    if buffer._task is not None:
        buffer._task.wait()
    buffer._task = dist.all_reduce(own_part(buffer), group=group, sync_op=False)


def own_part(buffer: FusedCommBuffer) -> Tensor:
    """The gradients that this rank has after the reduce-scatter, a view."""
    # Any: fleet's stub allows more than tensors.
    group, full = buffer._comm_group, cast(Any, buffer.grad_storage)
    length = full.size // group.nranks
    return full._slice(group.rank * length, (group.rank + 1) * length)


class OrderedGathers:
    """All-gathers of updated parameters that are waited for when their layers run.

    Args:
        units: layers whose parameters nothing else uses; all-gathers of the rest of the model are
            finished when `start` returns.
    """

    def __init__(self, optimizer: DygraphShardingOptimizerV2, units: Iterable[nn.Layer]):
        self._optimizer, self._buffers = optimizer, list(optimizer._comm_buffer_list)
        # Replaces fleet's hooks, which fail for frozen layers and leaf layers that are not called.
        optimizer.has_register_forward_hook = True
        units = list(units)
        in_units = {p.name for unit in units for p in unit.parameters()}
        self._root = [b for b in self._buffers if any(p.name not in in_units for p in b.params)]
        for unit in units:
            names = {p.name for p in unit.parameters()}
            needed = [b for b in self._buffers if any(p.name in names for p in b.params)]
            wait: Any = partial(self._wait, needed)
            unit.register_forward_pre_hook(wait)

    def start(self) -> None:
        """Start all of them, after fleet's step has started the first one."""
        for buffer in self._buffers:
            if buffer.status == FusedCommBuffer.Status.SHARDED:
                self._optimizer._try_start_bucket_param_sync([buffer])
        self._wait(self._root)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(self._buffers)

    def _wait(self, buffers: Iterable[Any], *arguments_of_a_hook: Any) -> None:
        for buffer in buffers:
            if buffer.status == FusedCommBuffer.Status.SYNCING:
                # None for a buffer that one rank has all of.
                if buffer.sync_param_task is not None:
                    buffer.sync_param_task.wait()
                buffer.status = FusedCommBuffer.Status.READY
