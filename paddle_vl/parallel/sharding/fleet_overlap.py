"""Fleet's sharding traffic beside computation, in an order that is the same on every rank.

Fleet starts to reduce a buffer when the last of its gradients is there, and to gather the next
buffer when a layer asks for it. Ranks whose micro-batches have different optional parts would do so
in different orders; and a buffer of which a parameter got no gradient would never be reduced.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from paddle import nn

from paddle_vl.parallel.sharding.fleet_names import DygraphShardingOptimizerV2, FusedCommBuffer


class OrderedReductions:
    """Starts the reductions of buffers, during the backward pass, from the last buffer on.

    Args:
        buffers: in the order of the forward pass; each calls its `comm_grads` when all its
            gradients of a step are there.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer]):
        self._order = list(reversed(buffers))
        self._complete: set[int] = set()
        self._num_started = 0
        for buffer in buffers:
            buffer.comm_grads = partial(self._start, buffer)

    def finish(self) -> None:
        """Behind the last backward pass: what got no gradient takes part with what it has."""
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


class FinishedGathers:
    """Gathers of updated parameters that end when the layers they belong to are run.

    Args:
        units: layers whose parameters are used by them alone; those of the rest of the model are
            there when `start` returns.
    """

    def __init__(self, optimizer: DygraphShardingOptimizerV2, units: Iterable[nn.Layer]):
        self._optimizer, self._buffers = optimizer, list(optimizer._comm_buffer_list)
        # In place of fleet's hooks, which know leaf layers that are called and have no frozen ones.
        optimizer.has_register_forward_hook = True
        units = list(units)
        in_units = {p.name for unit in units for p in unit.parameters()}
        self._root = [b for b in self._buffers if any(p.name not in in_units for p in b.params)]
        for unit in units:
            names = {p.name for p in unit.parameters()}
            needed = [b for b in self._buffers if any(p.name in names for p in b.params)]
            unit.register_forward_pre_hook(lambda layer, inputs, needed=needed: self._wait(needed))

    def start(self) -> None:
        """Behind fleet's step, which has started the first one."""
        for buffer in self._buffers:
            if buffer.status == FusedCommBuffer.Status.SHARDED:
                self._optimizer._try_start_bucket_param_sync([buffer])
        self._wait(self._root)

    def finish(self) -> None:
        """All parameters are whole."""
        self._wait(self._buffers)

    def _wait(self, buffers: Iterable[FusedCommBuffer]) -> None:
        for buffer in buffers:
            if buffer.status == FusedCommBuffer.Status.SYNCING:
                buffer.sync_param_task.wait()
                buffer.status = FusedCommBuffer.Status.READY
