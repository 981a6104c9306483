"""Collectives that run beside the computation, and are waited for where their result is needed."""

from collections.abc import Hashable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

# Reductions on their way while a backward pass goes on. One of them hides behind the next unit's
# computation; more would only hold more packed gradients, as a group runs one at a time.
MAX_REDUCTIONS = 1


class Pending:
    """A collective on its way.

    Args:
        kind: its name.
        task: Paddle's; waiting for it makes the compute stream wait, not the host.
        received: where the result arrives.
        sent: kept until then.
    """

    def __init__(self, kind: str, task: Any, received: Tensor, sent: Tensor):
        self.kind, self._task = kind, task
        self._received, self._sent = received, sent

    def result(self) -> Tensor:
        """What was received; whatever is computed from now on sees it."""
        self._task.wait()
        self._sent = None
        return self._received


def gather_later(own_N: Tensor, group) -> Pending:
    """All ranks' `own_N`, rank by rank, as one flat tensor."""
    all_SN = paddle.empty([own_N.shape[0] * group.nranks], dtype=own_N.dtype)
    task = dist.stream.all_gather(all_SN, own_N, group=group, sync_op=False)
    return Pending("all_gather", task, all_SN, own_N)


def sum_scatter_later(packed_SN: Tensor, group) -> Pending:
    """This rank's part of the sum of a flat tensor."""
    own_N = paddle.empty([packed_SN.shape[0] // group.nranks], dtype=packed_SN.dtype)
    task = dist.stream.reduce_scatter(own_N, packed_SN, group=group, sync_op=False)
    return Pending("reduce_scatter", task, own_N, packed_SN)


class Reductions:
    """Sums over the group that are on their way, `MAX_REDUCTIONS` at most.

    Attributes:
        dtype: what travels.
    """

    def __init__(self, group, dtype: str):
        self.group, self.dtype = group, dtype
        self._running: dict[Hashable, Pending] = {}
        self._done: dict[Hashable, Tensor] = {}

    def make_room(self) -> None:
        """Wait until another one may start, so that what it packs has the memory of an old one."""
        while len(self._running) >= MAX_REDUCTIONS:
            self._finish(next(iter(self._running)))

    def start(self, owner: Hashable, packed_SN: Tensor) -> None:
        """Begin to sum a flat tensor of this dtype, behind `make_room`."""
        self._finish(owner)
        self._running[owner] = sum_scatter_later(packed_SN, self.group)

    def total(self, owner: Hashable) -> Tensor | None:
        """`[N]` float32, all of an owner's sums so far; they are forgotten here. None if none."""
        self._finish(owner)
        return self._done.pop(owner, None)

    def held(self) -> list[Tensor]:
        """Sums that have arrived."""
        return list(self._done.values())

    @paddle.no_grad()
    def _finish(self, owner: Hashable) -> None:
        pending = self._running.pop(owner, None)
        if pending is None:
            return
        own_N, total_N = pending.result().astype("float32"), self._done.get(owner)
        self._done[owner] = own_N if total_N is None else total_N.add_(own_N)
