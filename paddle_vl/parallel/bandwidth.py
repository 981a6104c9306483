"""Speed of collectives and messages between the ranks of a machine, with their results checked.

Bus bandwidth as NCCL's tests define it: bytes that a link carries, so that figures of different
numbers of ranks compare. For n ranks and S bytes of the larger buffer in t seconds:

| operation | bus bandwidth |
| --- | --- |
| all-reduce | 2 (n - 1) / n * S / t |
| all-gather, reduce-scatter, all-to-all | (n - 1) / n * S / t |
| message | S / t |

Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
"""

import time
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize

_TIMES = 5


class Measure(NamedTuple):
    """One operation.

    Attributes:
        ranks: of a message the sender and the receiver.
        megabytes: of the larger buffer, 10^6 bytes.
        is_right: whether every rank received what it had to.
    """

    operation: str
    ranks: tuple[int, ...]
    megabytes: float
    milliseconds: float
    gb_per_s: float
    is_right: bool


def measure_bandwidth(num_ranks: int, elements: int, timeout_s: float) -> list[Measure]:
    """Measure all operations over all ranks. Called by every rank.

    Args:
        num_ranks: at least 2.
        elements: float32 values of the larger buffer; `num_ranks` divides it.

    Returns:
        The measures, with the time of the slowest rank; the same on every rank.
    """
    topology = initialize(ParallelDegrees(dp_degree=num_ranks), timeout_s=timeout_s)
    group, rank = topology.dp_group, topology.rank
    n = num_ranks
    part = elements // n
    own = paddle.full([elements], float(rank + 1))
    small = paddle.full([part], float(rank + 1))
    total = float(n * (n + 1) // 2)
    by_rank = [float(i + 1) for i in range(n)]
    reduced, whole, piece = (paddle.empty([size]) for size in (elements, elements, part))

    def all_reduce() -> None:
        paddle.assign(own, reduced)
        dist.all_reduce(reduced, group=group)

    def all_to_all() -> None:
        dist.alltoall_single(whole, own, group=group)

    collectives: dict[str, tuple[Callable[[], Any], Callable[[], bool], float]] = {
        "all_reduce": (all_reduce, lambda: _is(reduced, [total]), 2 * (n - 1) / n),
        "all_gather": (
            lambda: dist.stream.all_gather(whole, small, group=group),
            lambda: _is(whole, by_rank),
            (n - 1) / n,
        ),
        "reduce_scatter": (
            lambda: dist.stream.reduce_scatter(piece, own, group=group),
            lambda: _is(piece, [total]),
            (n - 1) / n,
        ),
        "all_to_all": (all_to_all, lambda: _is(whole, by_rank), (n - 1) / n),
    }
    ranks = tuple(range(n))
    found = [_measured(name, ranks, elements, group, *entry) for name, entry in collectives.items()]
    for low, high in combinations(range(n), 2):
        for sender, receiver in ((low, high), (high, low)):
            found.append(_message(sender, receiver, elements, group, rank))
    return found


def _message(sender: int, receiver: int, elements: int, group: Any, rank: int) -> Measure:
    buffer = paddle.full([elements], float(rank + 1))

    def run() -> None:
        if rank == sender:
            dist.send(buffer, dst=receiver, group=group)
        elif rank == receiver:
            dist.recv(buffer, src=sender, group=group)

    def is_right() -> bool:
        return rank != receiver or _is(buffer, [float(sender + 1)])

    return _measured("message", (sender, receiver), elements, group, run, is_right, 1.0)


def _measured(
    name: str,
    ranks: tuple[int, ...],
    elements: int,
    group: Any,
    run: Callable[[], Any],
    is_right: Callable[[], bool],
    factor: float,
) -> Measure:
    run()
    synchronize()
    right = is_right()
    seconds = []
    for _ in range(_TIMES):
        dist.barrier(group=group)
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    # The slowest rank, and whether any received something else.
    worst = paddle.to_tensor([min(seconds), float(not right)], dtype="float64")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    slowest, any_wrong = (float(value) for value in worst.numpy())
    size = 4 * elements
    return Measure(
        name, ranks, size / 1e6, 1e3 * slowest, factor * size / slowest / 1e9, not any_wrong
    )


def _is(x: Tensor, values: list[float]) -> bool:
    """Whether equal parts of a tensor have these values throughout."""
    parts = x.reshape([len(values), -1])
    wanted = paddle.to_tensor(values).unsqueeze(1)
    return bool((parts == wanted).all())


def synchronize() -> None:
    """Wait for this rank's device."""
    if not paddle.get_device().startswith("cpu"):
        paddle.device.synchronize()
