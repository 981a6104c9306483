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
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
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
    group = initialize(ParallelDegrees(dp_degree=num_ranks), timeout_s=timeout_s).dp_group
    n, rank, stream = num_ranks, group.rank, dist.stream
    own, small = (paddle.full([size], float(rank + 1)) for size in (elements, elements // n))
    sums, by_rank = [float(n * (n + 1) // 2)], [float(i + 1) for i in range(n)]
    reduced, whole, piece = paddle.empty_like(own), paddle.empty_like(own), paddle.empty_like(small)

    def all_reduce() -> None:
        paddle.assign(own, reduced)
        dist.all_reduce(reduced, group=group)

    def send(buffer: Tensor, sender: int, receiver: int) -> None:
        if rank == sender:
            dist.send(buffer, dst=receiver, group=group)
        elif rank == receiver:
            dist.recv(buffer, src=sender, group=group)

    def measured(
        name: str, ranks: Sequence[int], run: Callable[[], Any], out: Tensor, wanted: list[float],
        factor: float,
    ) -> Measure:  # fmt: skip
        run()
        synchronize()
        is_wrong = rank in ranks and not _is(out, wanted)
        seconds = []
        for _ in range(_TIMES):
            dist.barrier(group=group)
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            seconds.append(time.perf_counter() - begin)
        # The slowest rank, and whether any received something else.
        worst = paddle.to_tensor([min(seconds), float(is_wrong)], dtype="float64")
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        slowest, any_wrong = (float(value) for value in worst.numpy())
        size = 4 * elements
        speed = factor * size / slowest / 1e9
        return Measure(name, tuple(ranks), size / 1e6, 1e3 * slowest, speed, not any_wrong)

    link = (n - 1) / n
    found = [
        measured(name, range(n), *of_name)
        for name, of_name in {
            "all_reduce": (all_reduce, reduced, sums, 2 * link),
            "all_gather": (
                lambda: stream.all_gather(whole, small, group=group), whole, by_rank, link
            ),
            "reduce_scatter": (
                lambda: stream.reduce_scatter(piece, own, group=group), piece, sums, link
            ),
            "all_to_all": (
                lambda: dist.alltoall_single(whole, own, group=group), whole, by_rank, link
            ),
        }.items()
    ]  # fmt: skip
    for pair in permutations(range(n), 2):
        buffer = paddle.full([elements], float(rank + 1))
        run = partial(send, buffer, *pair)
        found.append(measured("message", pair, run, buffer, [float(pair[0] + 1)], 1.0))
    return found


def _is(x: Tensor, values: list[float]) -> bool:
    """Whether equal parts of a tensor have these values throughout."""
    parts = x.reshape([len(values), -1])
    wanted = paddle.to_tensor(values).unsqueeze(1)
    return bool((parts == wanted).all())


def synchronize() -> None:
    """Wait for this rank's device."""
    if not paddle.get_device().startswith("cpu"):
        paddle.device.synchronize()
