"""Who writes which files of a model that several processes hold together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_vl.nn.placement import Writers
from paddle_vl.parallel.agree import gather_arrays, gather_values
from paddle_vl.parallel.topology import Topology


@dataclass(frozen=True)
class FleetWriters(Writers):
    """The mp, sharding and expert processes of a stage have its layers, and share writing them."""

    pp_group: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, topology: Topology) -> "FleetWriters":
        degrees = topology.degrees
        number = topology.mp_rank * degrees.sharding_degree + topology.sharding_rank
        size = degrees.mp_degree * degrees.sharding_degree
        # Of processes that share experts the first ones have a whole model between them.
        number += topology.ep_group.rank * size
        size *= degrees.ep_degree
        return cls(number, size, topology.pp_rank, topology.pp_group)

    def of_stages(self, value: Any) -> list[Any]:
        if self.pp_group.nranks == 1:
            return [value]
        return gather_values(value, self.pp_group)

    def arrays_of_stages(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        if self.pp_group.nranks == 1:
            return [dict(arrays)]
        return gather_arrays(arrays, self.pp_group)
