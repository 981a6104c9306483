"""What the processes of a run do together in training, over fleet's groups.

The same methods as `SingleProcess` of `paddle_vl.train.processes`; every rank calls them in the
same order, whatever its data.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_vl.nn.parameter_table import ParamSpec, Tie
from paddle_vl.parallel.collectives import all_reduce_gradients, all_reduce_partial_gradients
from paddle_vl.parallel.objects import gather_values
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.topology import Topology


class FleetProcesses:
    """One process of a run. Values differ per rank."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.rank, self.is_main = topology.rank, topology.rank == 0
        self.data_rank, self.data_size = topology.data_rank, topology.data_size
        # The first copy of everything: of experts, the first processes that share them.
        self.holds_model = topology.dp_rank < topology.degrees.ep_degree
        self.random_place = (topology.data_rank, topology.pp_rank)
        # All stages and all mp processes of a part of the data have the same.
        self.counts_data = topology.mp_rank == 0 and topology.pp_rank == 0
        # The last stage alone has losses, and all its mp processes have the same.
        self.counts_losses = topology.mp_rank == 0
        self._host_group = topology.host_group

    def agree(
        self, counts: Sequence[int], signal: int | None = None
    ) -> tuple[list[int], int | None]:
        own = [count if self.counts_data else 0 for count in counts]
        message = paddle.to_tensor([*own, signal or 0], dtype="int64", place=paddle.CPUPlace())
        # Paddle would make them on the GPU, where this group does not reach.
        everyone = [message.clone() for _ in range(self.topology.world_size)]
        dist.all_gather(everyone, message, group=self._host_group)
        numbers_PK = np.stack([numbers.numpy() for numbers in everyone])
        *totals, _ = numbers_PK.sum(axis=0).tolist()
        return totals, int(numbers_PK[:, -1].max()) or None

    def totals(self, counts: Sequence[int]) -> list[int]:
        return self.agree(counts)[0]

    def sum_losses(self, value: Tensor) -> Tensor:
        return self.sum_over_all(value if self.counts_losses else paddle.zeros_like(value))

    def gathered(self, value: Any) -> list[Any]:
        return gather_values(value)

    @paddle.no_grad()
    def gathered_values(self, values_K: Tensor) -> Tensor:
        everyone: list[Tensor] = []
        dist.all_gather(everyone, values_K)
        return paddle.stack(everyone)

    @paddle.no_grad()
    def sum_over_all(self, value: Tensor) -> Tensor:
        total = value.clone().reshape([-1])
        dist.all_reduce(total)
        return total.reshape(value.shape)

    def counts_here(self, spec: ParamSpec) -> bool:
        is_first_of_its_kind = spec.split_axis is not None or self.topology.mp_rank == 0
        if spec.tie is Tie.COPY:
            return False
        copies = self.topology.degrees.ep_degree if spec.is_expert else 1
        return self.topology.dp_rank < copies and is_first_of_its_kind

    def seed_split_random(self, entropy: Sequence[int]) -> None:
        seed_split_random(entropy, self.topology.mp_rank)

    def sum_gradients(self, tensors: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        topology = self.topology
        if topology.mp_group.nranks > 1:
            all_reduce_partial_gradients(tensors, topology.mp_group)
        # A stage of a pipeline may have nothing to train: then nothing is sent.
        if topology.ends_group is not None:
            tied = [tensor for tensor, spec in tensors if spec.tie is not Tie.NONE]
            all_reduce_gradients(tied, topology.ends_group)
        # Fleet's sharding has done it, see `paddle_vl.parallel.sharding.fleet_optimizer`.
        if topology.dp_group.nranks > 1 and not topology.is_sharded_by_fleet:
            shared = [tensor for tensor, spec in tensors if not spec.is_expert]
            all_reduce_gradients(shared, topology.dp_group)
        experts = topology.expert_dp_group
        if experts is not None and experts.nranks > 1:
            all_reduce_gradients([tensor for tensor, spec in tensors if spec.is_expert], experts)

    def wait(self) -> None:
        dist.barrier()
