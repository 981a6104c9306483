"""Who writes which files of a model that several processes hold together."""

from typing import Any

import paddle.distributed as dist

from paddle_vl.nn.placement import Writers
from paddle_vl.parallel.topology import Topology


class FleetWriters(Writers):
    """The mp and sharding processes of a stage have its layers, and share the writing of them."""

    def __init__(self, topology: Topology):
        degrees = topology.degrees
        self.number = topology.mp_rank * degrees.sharding_degree + topology.sharding_rank
        self.size = degrees.mp_degree * degrees.sharding_degree
        self.stage = topology.pp_rank
        self.is_first = self.number == 0 and self.stage == 0
        self.pp_group = topology.pp_group

    def of_stages(self, value: Any) -> list[Any]:
        if self.pp_group.nranks == 1:
            return [value]
        values: list[Any] = []
        dist.all_gather_object(values, value, self.pp_group)
        return values
