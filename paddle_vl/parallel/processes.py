"""What the processes of a run do together in training, over fleet's groups.

The same methods as `SingleProcess` of `paddle_vl.train.processes`; every rank calls them in the
same order, whatever its data.
"""

from collections.abc import Sequence

import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_vl.parallel.gradients import sum_gradients, sum_partial_gradients
from paddle_vl.parallel.topology import Topology


class FleetProcesses:
    """One process of a run over data (dp) and model (mp) ranks. Values differ per rank."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.is_main = topology.rank == 0
        self.data_rank, self.data_size = topology.data_rank, topology.data_size
        self.holds_model = self.data_rank == 0

    def totals(self, counts: Sequence[int]) -> list[int]:
        total = paddle.to_tensor(list(counts), dtype="int64")
        return self.sum_over_data(total).tolist()

    @paddle.no_grad()
    def sum_over_data(self, value: Tensor) -> Tensor:
        return _summed(value, self.topology.dp_group)

    @paddle.no_grad()
    def sum_over_parts(self, value: Tensor) -> Tensor:
        return _summed(value, self.topology.mp_group)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.topology.mp_group.nranks > 1:
            sum_partial_gradients(parameters, self.topology.mp_group)
        if self.topology.dp_group.nranks > 1:
            sum_gradients(parameters, self.topology.dp_group)

    def agreed_signal(self, received: int | None) -> int | None:
        largest = paddle.to_tensor([received or 0], dtype="int64")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item() or None

    def wait(self) -> None:
        dist.barrier()


def _summed(value: Tensor, group) -> Tensor:
    if group.nranks == 1:
        return value
    total = value.clone().reshape([-1])
    dist.all_reduce(total, group=group)
    return total.reshape(value.shape)
