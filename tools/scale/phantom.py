"""A process that is one rank of a large run alone: its groups answer at once.

The other ranks of a group are taken to do what this one does, so they send what it sends. Row
counts of experts are the exception: peers get them turned, so that this rank receives as many rows
as it sends.
"""

import os
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet import install
from paddle_vl.parallel.gloo_fleet.patch import Patch
from paddle_vl.parallel.gloo_fleet.process_group import DONE, DoneTask
from paddle_vl.parallel.recorder import Collective, described_call
from paddle_vl.parallel.simulated.group import SimulatedProcessGroup
from paddle_vl.parallel.store import rendezvous

# Called with each collective and message, and its group.
Observe = Callable[[Collective, "PhantomGroup"], object]


class PhantomGroup(SimulatedProcessGroup):
    """A process group of this rank and peers that are not there."""

    def __init__(self, rank: int, size: int, group_id: int, observe: Observe):
        self._rank, self._size, self._id, self._observe = rank, size, group_id, observe

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(collective._get_group_map()[self._id].ranks)

    @paddle.no_grad()
    def all_to_all_single(
        self, out: Tensor, in_: Tensor, out_sizes: Any, in_sizes: Any, sync_op: bool = True
    ) -> DoneTask:
        self._everyones("alltoall_single", in_)
        out.zero_()
        return DONE

    def send(self, tensor: Tensor, dst: int, sync_op: bool = True) -> DoneTask:
        self._observe(described_call("send", (self._own_rank, self.ranks[dst]), tensor), self)
        return DONE

    def recv(self, tensor: Tensor, src: int, sync_op: bool = True) -> DoneTask:
        self._observe(described_call("recv", (self.ranks[src], self._own_rank), tensor), self)
        with paddle.no_grad():
            tensor.zero_()
        return DONE

    @property
    def _own_rank(self) -> int:
        return self.ranks[self._rank]

    def _everyones(self, kind: str, tensor: Tensor | None, detail: str = "") -> list[Tensor]:
        self._observe(described_call(kind, self.ranks, tensor), self)
        if tensor is None:
            return []
        if kind == "all_gather" and tensor.dtype == paddle.int64 and tensor.ndim == 2:
            step = tensor.shape[1] // self._size
            turned = (tensor.roll((i - self._rank) * step, 1) for i in range(self._size))
            return list(turned)
        # The sum is as good as a copy.
        return [tensor] * (1 if kind in ("all_reduce", "reduce_scatter") else self._size)


def become_rank(rank: int, num_ranks: int, observe: Observe) -> list[int]:
    """Make this process that rank, for good.

    Returns:
        A list to which the size of each group that this rank gets is added.
    """
    sizes: list[int] = []

    def make(*_: Any) -> Callable:
        def made(backend, store, rank, world_size, *options, group_id=0, **others):
            sizes.append(world_size)
            return PhantomGroup(rank, world_size, group_id, observe)

        return made

    os.environ |= {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{rank + 1}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{n + 1}" for n in range(num_ranks)),
    }
    # There is no store to meet at.
    rendezvous._met.append(rendezvous.Addresses(rendezvous.LOOPBACK, 1, rendezvous.LOOPBACK))
    core.create_or_get_global_tcp_store = lambda: None
    install()
    groups = "paddle.distributed.collective"
    Patch(groups, "_new_process_group_impl", "the peers are not there", make).apply()
    return sizes
