"""Collectives of fleet's sharding buffers in a fixed order.

Fleet reduce-scatters a buffer once it has all of its gradients, and all-gathers the next buffer
when a layer needs it. Ranks whose micro-batches have different optional branches would do so in
different orders, and a buffer with a missing gradient would never be reduced.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer


class OrderedReductions:
    """Reduce-scatters of fleet's buffers during the backward pass, from the last buffer on.

    Args:
        buffers: in the order of the forward pass; fleet calls `comm_grads` of each when it has all
            gradients of a step.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer]):
        self._order = list(reversed(buffers))
        self._complete: set[int] = set()
        self._num_started = 0
        for buffer in buffers:
            buffer.comm_grads = partial(self._start, buffer)

    def finish(self) -> None:
        """After the last backward pass: reduce the buffers in which a gradient is missing."""
        for buffer in self._order:
            for parameter in buffer.params:
                while parameter.name in buffer._params_step_dict:
                    buffer.add_grad(parameter)
        self._complete, self._num_started = set(), 0

    def _start(self, buffer: FusedCommBuffer) -> None:
        self._complete.add(id(buffer))
        while self._num_started < len(self._order):
            following = self._order[self._num_started]
            if id(following) not in self._complete:
                return
            following._comm_grads()
            self._num_started += 1


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
            before_forward: Any = partial(self._before_forward, needed)
            unit.register_forward_pre_hook(before_forward)

    def start(self) -> None:
        """Start all of them, after fleet's step has started the first one."""
        for buffer in self._buffers:
            if buffer.status == FusedCommBuffer.Status.SHARDED:
                self._optimizer._try_start_bucket_param_sync([buffer])
        self._wait(self._root)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(self._buffers)

    def _before_forward(self, needed: Sequence[Any], layer: nn.Layer, inputs: Any) -> None:
        self._wait(needed)

    def _wait(self, buffers: Iterable[Any]) -> None:
        for buffer in buffers:
            if buffer.status == FusedCommBuffer.Status.SYNCING:
                buffer.sync_param_task.wait()
                buffer.status = FusedCommBuffer.Status.READY
