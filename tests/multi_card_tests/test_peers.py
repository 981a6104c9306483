"""Errors that name ranks that have ended or are late.

Guarantees: every other rank names a rank that ends during a run, in a forward or backward pass and
when a group is made, and says how to continue; an error names a rank that is later than
parallel.timeout_s; an error names ranks that do not come to the start, including rank 0.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import paddle
import paddle.distributed as dist
import pytest
from paddle.autograd import PyLayer

from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.store.membership import PeerWatch
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, wait_for_ranks

# Seconds that ranks wait for each other.
LIMIT = 8
# Far above what a loaded machine takes for three operations, and far below the limit of 1800 s.
SECONDS_TO_NOTICE = 100
CONTINUE = "train.resume_from_checkpoint=auto"


class _SumInBackward(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.clone())
        return grad


def run_backward() -> None:
    x = paddle.ones([3])
    x.stop_gradient = False
    _SumInBackward.apply(x).sum().backward()


def error_of(act) -> str:
    with pytest.raises(RuntimeError) as raised, PeerWatch():
        act()
    return str(raised.value)


def lose_rank_2(folder: str) -> dict:
    """Rank 2 ends while the others wait for it. The others end together, so neither loses more."""
    rank = initialize(ParallelDegrees(dp_degree=3)).rank
    x = paddle.ones([50_000])
    dist.all_reduce(x)
    wait_for_ranks(Path(folder, "reduced"), rank, range(3))
    if rank == 2:
        time.sleep(0.5)
        return {}
    acts = {
        "all_reduce": lambda: dist.all_reduce(x),
        "backward": run_backward,
        "group": lambda: dist.new_group([0, 1, 2]),
    }
    begin = time.monotonic()
    errors = {name: error_of(act) for name, act in acts.items()}
    seconds = time.monotonic() - begin
    wait_for_ranks(Path(folder, "done"), rank, range(2))
    return {"errors": errors, "seconds": seconds}


def test_a_rank_that_ends_is_named_by_all_in_every_operation(tmp_path):
    first, second, _ = launch(lose_rank_2, 3, arguments=(str(tmp_path),))
    for rank, found in enumerate((first, second)):
        assert found["seconds"] < SECONDS_TO_NOTICE
        for message in found["errors"].values():
            assert message.startswith(f"rank {rank}: a collective failed: rank 2 ended; ")
            assert "see the log of rank 2 for the cause" in message
            assert CONTINUE in message


def lose_a_peer(operation: str, folder: str) -> str | None:
    """Rank 1 ends while rank 0 sends to it or receives from it."""
    rank = initialize(ParallelDegrees(dp_degree=2)).rank
    x = paddle.ones([1 << 20])
    for source, target in ((0, 1), (1, 0)):
        act = dist.send if rank == source else dist.recv
        act(x, target if rank == source else source)
    wait_for_ranks(folder, rank, range(2))
    if rank == 1:
        time.sleep(0.5)
        return None
    return error_of(lambda: getattr(dist, operation)(x, 1))


@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_peer_that_ends_is_named(operation, tmp_path):
    message = launch(lose_a_peer, 2, arguments=(operation, str(tmp_path)))[0]
    assert message.startswith("rank 0: a collective failed: rank 1 ended; ")


def wait_for_rank_2(folder: str) -> str:
    """Rank 0 waits for all ranks, rank 1 for rank 2 only, and rank 2 does something else."""
    rank = initialize(ParallelDegrees(dp_degree=3), timeout_s=LIMIT).rank
    pair = dist.new_group([1, 2])
    wait_for_ranks(Path(folder, "ready"), rank, range(3))
    message = ""
    if rank == 0:
        message = error_of(dist.barrier)
    elif rank == 1:
        # Rank 1 still waits when rank 0 gives up.
        time.sleep(LIMIT / 2)
        message = error_of(lambda: dist.all_reduce(paddle.ones([2]), group=pair))
    wait_for_ranks(Path(folder, "done"), rank, range(3))
    return message


@pytest.mark.heavy
def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, second, _ = launch(wait_for_rank_2, 3, arguments=(str(tmp_path),))
    both = "rank 0: a collective failed: got no answer from ranks 1, 2; see the log of ranks 1, 2"
    assert first.startswith(both)
    assert second.startswith("rank 1: a collective failed: got no answer from rank 2; see the log")
    assert CONTINUE in second


def start_late(folder: str) -> str:
    """Rank 1 comes after rank 0 has given up and its store has ended."""
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    if rank == 1:
        wait_for_ranks(folder, rank, [0])
        host, port = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].split(":")
        with suppress(ConnectionRefusedError):
            while True:
                socket.create_connection((host, int(port))).close()
                time.sleep(0.1)
    with pytest.raises(RuntimeError) as raised:
        initialize(ParallelDegrees(dp_degree=2), timeout_s=1.5)
    if rank == 0:
        wait_for_ranks(folder, rank, [])
    return str(raised.value)


def test_a_rank_that_does_not_start_is_named(tmp_path):
    first, second = launch(start_late, 2, arguments=(str(tmp_path),))
    assert first.startswith("rank 0 has waited 1.5 s at 127.0.0.1:")
    assert "for rank 1: see the log of rank 1" in first
    assert second.startswith(
        "rank 1 has waited 1.5 s for rank 0, whose store is to be at 127.0.0.1"
    )
    assert all(CONTINUE in message for message in (first, second))
