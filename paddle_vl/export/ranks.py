"""The ranks of an export of several: which one this process is, and the ring of its programs.

Ranks are started as for a training, by `fleetrun` or Paddle's launcher, whose variables say who is
who. Programs issue their collectives on the ring `RING`: over gloo on CPUs, NCCL on GPUs.
"""

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paddle.base import core

from paddle_vl.export.program import DEVICE_VARIABLE, device_number, has_gpu

# Not a number that fleet gives to one of its groups.
RING = 8190
_connected: tuple[int, int] | None = None
_CHECK = """
import os, sys
from pathlib import Path
from paddle_vl.export.folder import ExportFolder
folder = ExportFolder.open(Path(sys.argv[1]))
for name in sys.argv[2:]:
    folder.program(name)
# Not the teardown of communication threads, while other ranks may still talk.
sys.stdout.flush()
os._exit(0)
"""


def own_rank(folder: Path, size: int) -> int:
    """The rank of this process.

    Raises:
        ValueError: this is not one of `size` processes.
    """
    found = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if found != size:
        raise ValueError(
            f"{folder} is an export of {size} tensor-parallel ranks, but {found} process(es) run: "
            f"start {size} (fleetrun --nproc_per_node {size} SCRIPT)"
        )
    return int(os.environ["PADDLE_TRAINER_ID"])


def connect(rank: int, size: int) -> None:
    """Connect the ring of the ranks' programs, once in a process; collective.

    Raises:
        ValueError: the ring has other ranks already.
    """
    global _connected
    if _connected is not None:
        if _connected != (rank, size):
            raise ValueError(
                f"this process is rank {_connected[0]} of {_connected[1]} already: load an export "
                f"for {size} ranks in processes of its own"
            )
        return
    store = core.create_or_get_global_tcp_store()
    manager: Any = core.CommContextManager
    if has_gpu():
        manager.set_device_id(device_number())
        name = hashlib.md5(f"{os.environ['PADDLE_TRAINER_ENDPOINTS']} {RING}".encode())
        manager.create_nccl_comm_context(store, str(RING), rank, size, name.hexdigest())
    else:
        manager.create_gloo_comm_context(store, str(RING), rank, size)
    _connected = rank, size


def check_ranks(folder: Path, size: int, programs: list[str]) -> None:
    """Start all ranks on this machine; each compares its programs' answers with the stored ones.

    Raises:
        RuntimeError: a rank failed; has its message.
    """
    with ExitStack() as stack:
        # Rank 0 listens on the first port.
        endpoints = [f"127.0.0.1:{_free_port(stack)}" for _ in range(size)]
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = []
        for rank in range(size):
            variables = {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(size),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                DEVICE_VARIABLE: str(rank),
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, "-c", _CHECK, str(folder), *programs],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((work / str(rank)).open("wb")),
            )
            stack.callback(_end, process)
            running.append(process)
        codes = [process.wait() for process in running]
        for rank, code in enumerate(codes):
            if code:
                text = (work / str(rank)).read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"rank {rank} of {size} failed:\n{text[-2000:]}")


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_port(stack: ExitStack) -> int:
    """A port that stays reserved for a socket that reuses addresses, as the store does."""
    placeholder = stack.enter_context(socket.socket())
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    placeholder.bind(("127.0.0.1", 0))
    return placeholder.getsockname()[1]
