"""Exchange between ranks in training outside the model: counts, losses, gradients, barriers.

`SingleRank` is the interface, implemented for world size 1; `FleetRanks` implements it on fleet's
process groups. Methods "called by all ranks" are collective: every rank calls them in the same
order, whatever its data.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_vl.nn.linear import gradient_of
from paddle_vl.nn.parameter_table import ParamSpec, Tie
from paddle_vl.parallel.agree import gather_values
from paddle_vl.parallel.collectives import all_reduce_gradients, all_reduce_partial_gradients
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.random_state import seed_encoder_random, seed_split_random
from paddle_vl.parallel.store.membership import of_this_process
from paddle_vl.parallel.topology import Topology


class SingleRank:
    """World size 1.

    Attributes:
        rank, world_size: global rank, and number of ranks.
        is_main: whether this rank writes files and logs; True on rank 0.
        random_place: seed entropy besides seed and step; equal on ranks that must draw the same
            numbers.
        counts_data: whether this rank contributes to sums over samples; True on one of the ranks
            that load the same samples.
        counts_losses: whether this rank contributes to sums over losses; True on one of the ranks
            that compute the same loss.
        data_rank, data_size: this rank's shard of every global batch, and number of shards.
    """

    is_main = True
    rank = 0
    world_size = 1
    counts_data = True
    counts_losses = True
    data_rank = 0
    data_size = 1
    random_place: tuple[int, ...] = ()

    def agree(
        self, counts: Sequence[int], signal: int | None = None, largest: Sequence[int] = ()
    ) -> tuple[list[int], int | None]:
        """Sum of each count over data shards, then the largest of each of `largest` over all ranks;
        and a stop signal that any rank received.

        One message between hosts; the device is not synchronized. Called by all ranks.
        """
        return [*counts, *largest], signal

    def totals(self, counts: Sequence[int]) -> list[int]:
        """Sum of each count over data shards. Called by all ranks."""
        return self.agree(counts)[0]

    def sum_losses(self, value: Tensor) -> Tensor:
        """All-reduce of a loss over data shards. Called by all ranks."""
        return self.sum_over_all(value if self.counts_losses else paddle.zeros_like(value))

    def gathered(self, value: Any) -> list[Any]:
        """All-gather of a JSON value, by rank. Called by all ranks."""
        return [value]

    def gathered_values(self, values_K: Tensor) -> Tensor:
        """All-gather of `[K]` values of every rank into `[P, K]`. Called by all ranks."""
        return values_K.unsqueeze(0)

    def sum_over_all(self, value: Tensor) -> Tensor:
        """All-reduce over all ranks. Called by all ranks."""
        return value

    def counts_here(self, spec: ParamSpec) -> bool:
        """Whether this rank contributes a parameter with that spec to `sum_over_all`; True on one
        of its replicas."""
        return True

    def seed_split_random(self, entropy: Sequence[int]) -> None:
        """Seed the generator of sharded tensors, before every step."""

    def sum_gradients(self, tensors: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        """Reduce gradients over ranks, once per step. Called by all ranks.

        Args:
            tensors: tensors that the optimizer updates, with the specs of their parameters.
        """

    def wait(self) -> None:
        """Barrier. Called by all ranks."""


ONE_RANK = SingleRank()


class FleetRanks(SingleRank):
    """One rank of a run. Attributes differ per rank."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.rank, self.world_size = topology.rank, topology.world_size
        self.is_main = topology.rank == 0
        self.data_rank, self.data_size = topology.data_rank, topology.data_size
        self._encoder = topology.encoder
        # Slices of a sample have rows of their own.
        self.random_place = (topology.replica_rank, topology.pp_rank)
        # Only the last stage has losses, the same ones on all its mp and cp ranks.
        self.counts_losses = topology.mp_rank == 0 and topology.cp_rank == 0
        # All mp and cp ranks and all stages of a data shard have the same samples.
        self.counts_data = self.counts_losses and topology.pp_rank == 0
        self._host_group = topology.host_group

    def agree(
        self, counts: Sequence[int], signal: int | None = None, largest: Sequence[int] = ()
    ) -> tuple[list[int], int | None]:
        """All-gather over all ranks, through host memory: sums of the counts over the data shards,
        the largest numbers, and the highest stop signal. Same result on every rank."""
        self._await_all()
        own = [*(count if self.counts_data else 0 for count in counts), *largest, signal or 0]
        message = paddle.to_tensor(own, dtype="int64", place=paddle.CPUPlace())
        # Allocated here: Paddle would use the GPU, but this group communicates host memory.
        everyone = [message.clone() for _ in range(self.topology.world_size)]
        dist.all_gather(everyone, message, group=self._host_group)
        numbers_PK = np.stack([numbers.numpy() for numbers in everyone])
        totals = numbers_PK[:, : len(counts)].sum(axis=0).tolist()
        *largest, signal = numbers_PK[:, len(counts) :].max(axis=0).tolist()
        return [*totals, *largest], signal or None

    def gathered(self, value: Any) -> list[Any]:
        self._await_all()
        return gather_values(value)

    @paddle.no_grad()
    def gathered_values(self, values_K: Tensor) -> Tensor:
        """All-gather of K numbers per rank: `[world size, K]`."""
        everyone: list[Tensor] = []
        dist.all_gather(everyone, values_K)
        return paddle.stack(everyone)

    @paddle.no_grad()
    def sum_over_all(self, value: Tensor) -> Tensor:
        """All-reduce (sum) over all ranks; the argument is not changed."""
        total = value.clone().reshape([-1])
        dist.all_reduce(total)
        return total.reshape(value.shape)

    def counts_here(self, spec: ParamSpec) -> bool:
        """See `SingleRank`."""
        if spec.is_encoder:
            assert self._encoder is not None, "no encoder parameters under the plain schedule"
            return self._encoder.counts_here(spec.split_axis is not None)
        if spec.tie is Tie.COPY:
            return False
        if spec.is_expert or spec.is_table:
            return self.topology.dp_group_of(spec).rank == 0
        is_first_of_its_kind = spec.split_axis is not None or self.topology.mp_rank == 0
        return self.topology.dp_rank == 0 and is_first_of_its_kind

    def seed_split_random(self, entropy: Sequence[int]) -> None:
        seed_split_random(entropy, self.topology.mp_rank)
        if self._encoder is not None:
            role, (seed, step) = self._encoder.role, entropy[:2]
            seed_encoder_random(seed, step, role.encoder_lane, role.encoder_place)

    def sum_gradients(self, tensors: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        """All-reduce gradients, once per step, in this order: partial ones over mp, those of tied
        weights over the first and last pipeline stage, those of all parameters over dp (of experts
        and tables over the ranks with the same shard). Sharding has reduced over its own group and
        over dp before, and `SummedWeights` what it sums by itself. Gradients of a colocated encoder
        are summed over the encoder's own groups.
        """
        topology = self.topology
        tensors = [t for t in tensors if not getattr(t[0], "is_summed", False)]
        if self._encoder is not None:
            self._sum_encoder_gradients([t for t in tensors if t[1].is_encoder], self._encoder)
            tensors = [t for t in tensors if not t[1].is_encoder]
        if topology.mp_group.nranks > 1:
            all_reduce_partial_gradients(tensors, topology.mp_group)
        # On a stage without trained parameters no dp or mp rank communicates.
        if topology.ends_group is not None:
            tied = [tensor for tensor, spec in tensors if spec.tie is not Tie.NONE]
            all_reduce_gradients(tied, topology.ends_group)
        if topology.sharding_group.nranks > 1:
            return
        by_group = dict[Any, list[Tensor]]({topology.dp_group: []})
        for tensor, spec in tensors:
            by_group.setdefault(topology.dp_group_of(spec), []).append(tensor)
        for group, of_group in by_group.items():
            if group.nranks > 1:
                all_reduce_gradients(of_group, group)

    def _sum_encoder_gradients(
        self, tensors: Sequence[tuple[Tensor, ParamSpec]], encoder: EncoderGroups
    ) -> None:
        # The runner gives every rank gradients if the step has items, and none if it has not.
        if all(gradient_of(tensor) is None for tensor, _ in tensors):
            return
        if encoder.mp_group.nranks > 1:
            all_reduce_partial_gradients(tensors, encoder.mp_group)
        if encoder.dp_group.nranks > 1 and not encoder.shards_state:
            all_reduce_gradients([tensor for tensor, _ in tensors], encoder.dp_group)

    def wait(self) -> None:
        self._await_all()
        dist.barrier()

    @staticmethod
    def _await_all() -> None:
        """Wait for all ranks in the store: gloo's own wait ends after 30 s, whatever
        `parallel.timeout_s` is, and Paddle has no option for it."""
        for membership in of_this_process:
            membership.wait_for_all()
