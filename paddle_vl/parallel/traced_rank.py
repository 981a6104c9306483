"""One rank of a tensor-parallel group while its programs are traced: no process and no peers.

Fleet's collectives between layers are `PyLayer`s on a process group. In a program stands the
operation of their forward pass, on a ring by number, which the program's runtime connects:

| fleet's | in a program |
| --- | --- |
| `_mp_allreduce` | `mp_allreduce_sum` |
| `AllGatherOp`, `GatherOp` | `all_gather` |
| `ReduceScatterOp` | `reduce_scatter`; for a CPU, which has none, the sum and the rank's rows |
| `ScatterOp` | this rank's rows |
| `_c_identity` | nothing |
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import paddle
from paddle import Tensor, _C_ops
from paddle.distributed.collective import Group
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.utils import sequence_parallel_utils as fleet_rows

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.parallel import region_ops, split_layers
from paddle_vl.parallel.simulated.current import SimulatedRank, run_as
from paddle_vl.parallel.simulated.fleet_session import Generators, fleet_session, replace_in
from paddle_vl.parallel.tensor import FleetPlacement

Device = Literal["cpu", "gpu"]


class TracedRank:
    """A rank whose model is built and traced inside `entered`.

    Args:
        rank, size: of the tensor-parallel group.
        ring: number of the ring.
    """

    def __init__(self, rank: int, size: int, ring: int):
        self.rank, self.size, self.ring = rank, size, ring
        self.group: Any = Group(rank, ring, list(range(size)))
        self._part = RowPart(rank, size)

    def placement(self, sequence_parallel: bool) -> FleetPlacement:
        """For the model's constructor, inside `entered`."""
        return FleetPlacement(self.group, sequence_parallel, vision="replicate")

    @contextmanager
    def entered(self, device: Device = "cpu") -> Iterator[None]:
        """Build the rank's model, or trace its programs for a device, inside the block."""
        with ExitStack() as stack:
            stack.enter_context(fleet_session(self.size))
            stack.enter_context(run_as(SimulatedRank(self.group)))
            # Fleet draws fresh weights from generators of its own.
            generators = Generators([self.rank])
            generators.switch(None, self.rank)
            stack.callback(generators.switch, self.rank, None)
            gather = _Operation(self._gathered)
            scatter = _Operation(self._scattered if device == "gpu" else self._summed_rows)
            for module, name, stand_in in (
                (region_ops, "AllGatherOp", gather),
                (region_ops, "GatherOp", gather),
                (region_ops, "all_gathered", self._gathered),
                (region_ops, "ScatterOp", _Operation(self._part.of_rows)),
                (split_layers, "ReduceScatterOp", scatter),
                (fleet_rows, "AllGatherOp", gather),
                (fleet_rows, "ReduceScatterOp", scatter),
                (mp_ops, "_c_identity", _same),
                (mp_ops, "_mp_allreduce", self._summed),
                (mp_ops, "_c_lookup_table", _looked_up),
            ):
                replace_in(stack, module, name, stand_in)
            yield

    @paddle.jit.not_to_static
    def _gathered(self, x_TD: Tensor, group: Any = None) -> Tensor:
        return _C_ops.all_gather(x_TD, self.ring, self.size)

    @paddle.jit.not_to_static
    def _scattered(self, x_TD: Tensor) -> Tensor:
        return _C_ops.reduce_scatter(x_TD, self.ring, self.size)

    @paddle.jit.not_to_static
    def _summed(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _C_ops.mp_allreduce_sum(x, self.ring)

    @paddle.jit.not_to_static
    def _summed_rows(self, x_TD: Tensor) -> Tensor:
        return self._part.of_rows(_C_ops.mp_allreduce_sum(x_TD, self.ring))


class _Operation:
    """In place of a `PyLayer`, which Paddle would trace with its process group."""

    def __init__(self, forward: Callable[[Tensor], Tensor]):
        self.apply = forward


@paddle.jit.not_to_static
def _same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


@paddle.jit.not_to_static
def _looked_up(
    table: Tensor, index: Tensor, start_index: int = 0, vocab_size: int = -1, name: Any = None
) -> Tensor:
    return _C_ops.c_embedding(table, index, start_index, vocab_size)
