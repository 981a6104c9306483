"""Collectives of fleet's sharding buffers in a fixed order, and checks of fleet's private names.

Fleet reduce-scatters a buffer once it has all of its gradients, and all-gathers the next buffer
when a layer needs it. Ranks whose micro-batches have different optional branches would do so in
different orders, and a buffer with a missing gradient would never be reduced.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import (
    HybridParallelOptimizer,
)
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer, ShardingGradView

# Private functions of fleet, and their parameters without self.
_FUNCTIONS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (HybridParallelOptimizer, "_hybrid_sync_grad", ("parameter_list",)),
    (HybridParallelOptimizer, "_set_all_gather_overlap_forward",
     ("all_gather_overlap_forward", "layers")),
    (DygraphShardingOptimizerV2, "_collect_comm_buffers", ()),
    (DygraphShardingOptimizerV2, "_assign_slice_grad", ()),
    (DygraphShardingOptimizerV2, "_sharding_sync_parameters", ()),
    (DygraphShardingOptimizerV2, "_try_start_bucket_param_sync", ("buckets",)),
    (DygraphShardingOptimizerV2, "_reset_comm_buffers_acc_steps", ("acc_steps",)),
    (DygraphShardingOptimizerV2, "step", ()),
    (FusedCommBuffer, "_comm_grads", ()),
    (FusedCommBuffer, "comm_grads", ()),
    (FusedCommBuffer, "add_grad", ("param", "use_comm")),
    (FusedCommBuffer, "sync_params", ("sync", "param2task")),
    (MixPrecisionLayer, "_update_main_grad_hook", ("param",)),
)  # fmt: skip
_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (DygraphShardingOptimizerV2, (
        "_comm_buffer_list", "_slice_params", "comm_overlap", "has_register_forward_hook",
    )),
    (FusedCommBuffer, (
        "grad_storage", "param_storage", "_params_step_dict", "status", "sync_param_task",
        "_sharding_param_grad_view",
    )),
    (ShardingGradView, ("_index", "_padded_size", "_param_buffer")),
)  # fmt: skip


def check_functions() -> None:
    """Raise RuntimeError unless fleet's functions are those this package was written for."""
    _raise(
        f"{owner.__name__}.{name} does not take ({', '.join(parameters)})"
        for owner, name, parameters in _FUNCTIONS
        if _parameters(getattr(owner, name, None)) != parameters
    )


def check_attributes(optimizer: DygraphShardingOptimizerV2) -> None:
    """The same for attributes of fleet's objects, which exist only after construction."""
    buffers = getattr(optimizer, "_comm_buffer_list", [])
    views = [v for b in buffers for v in getattr(b, "_sharding_param_grad_view", {}).values()]
    found = {DygraphShardingOptimizerV2: [optimizer], FusedCommBuffer: buffers}
    found[ShardingGradView] = views[:1]
    _raise(
        f"{owner.__name__} has no {name}"
        for owner, names in _ATTRIBUTES
        for name in names
        if not all(name in vars(each) for each in found[owner]) or not found[owner]
    )


def _parameters(function: Any) -> tuple[str, ...] | None:
    if not inspect.isfunction(function):
        return None
    return tuple(inspect.signature(function).parameters)[1:]


def _raise(problems: Iterator[str]) -> None:
    if found := list(problems):
        raise RuntimeError(
            f"paddlepaddle {paddle.__version__} has another sharding optimizer than this package "
            f"was written for: {'; '.join(found)}. Install paddlepaddle 3.3.1, or use "
            "parallel.sharding_stage 2 or 3, which do not use it"
        )


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
