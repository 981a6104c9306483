"""Addresses on which the ranks of a run on one machine listen.

Guarantees: from start to end of a run on 2 or 3 ranks over gloo, every socket listens on loopback
only: with subgroups, under the check of collectives, through Paddle's launcher, and if the launcher
passes another address of this machine.
"""

import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

import paddle
import paddle.distributed as dist
import psutil
import pytest

from paddle_vl.parallel.collective_check import VARIABLE
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.launch import launch, wait_for_ranks

ROOT = Path(__file__).parents[2]
LOOPBACK = {"127.0.0.1", "::1"}
POLL_SECONDS = 0.05
# Pseudo-rank of the watcher. Ranks wait until it has seen the store.
WATCHER = -1
ADDRESSES = [
    address.address
    for addresses in psutil.net_if_addrs().values()
    for address in addresses
    if address.family == socket.AF_INET and not address.address.startswith("127.")
]


@contextmanager
def watched_listening(folder: Path | None = None):
    """Collects, while the block runs, the addresses on which child processes listen.

    Yields a dict: address -> command lines.

    Args:
        folder: where ranks wait until the watcher has seen the store.
    """
    found, over = defaultdict(set), threading.Event()
    own = psutil.Process()

    def look(child: psutil.Process) -> None:
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip].add(" ".join(child.cmdline())[:200])

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            # Processes may end while they are inspected.
            with suppress(psutil.Error, OSError):
                for child in own.children(recursive=True):
                    with suppress(psutil.Error, OSError):
                        look(child)
            if folder is not None and has_store(found):
                wait_for_ranks(folder, WATCHER, [])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def has_store(found) -> bool:
    return any("parallel.store.server" in who for whos in list(found.values()) for who in [*whos])


def assert_loopback_alone(found) -> None:
    # Without the store nothing was watched.
    assert has_store(found)
    assert set(found) <= LOOPBACK, dict(found)


def use_groups(degrees: dict[str, int], host: str, folder: str) -> float:
    """Collectives and messages in the group of all ranks and in subgroups."""
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"):
        os.environ[name] = os.environ[name].replace("127.0.0.1", host)
    topology = initialize(ParallelDegrees(**degrees))
    x = paddle.ones([4])
    dist.all_reduce(x)
    pair = dist.new_group([0, topology.world_size - 1])
    if pair.is_member():
        dist.all_reduce(x, group=pair)
    if topology.rank == 0:
        dist.send(x, dst=1)
    elif topology.rank == 1:
        dist.recv(x, src=0)
    dist.barrier()
    wait_for_ranks(folder, topology.rank, [WATCHER])
    return x.sum().item()


@pytest.mark.parametrize(
    ("processes", "degrees", "host"),
    [
        (2, {"mp_degree": 2}, "127.0.0.1"),
        (3, {"pp_degree": 3, "num_micro_batches": 3}, [*ADDRESSES, "127.0.0.1"][0]),
    ],
)
def test_groups_listen_on_loopback_alone(processes, degrees, host, tmp_path):
    with watched_listening(tmp_path) as found:
        launch(use_groups, processes, arguments=(degrees, host, str(tmp_path)))
    assert_loopback_alone(found)


@pytest.mark.heavy
def test_a_training_through_the_launcher_listens_on_loopback_alone(tmp_path):
    run_file = write_tiny_run(tmp_path / "run")
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    command += ["--log_dir", str(tmp_path / "log"), str(ROOT / "tools" / "train.py"), str(run_file)]
    command += [f"train.output_dir={tmp_path / 'out'}", "train.max_steps=2", "parallel.mp_degree=2"]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", VARIABLE: "60"}
    with watched_listening() as found:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, (tmp_path / "log" / "workerlog.0").read_text()
    assert_loopback_alone(found)
