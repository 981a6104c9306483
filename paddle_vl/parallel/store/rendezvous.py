"""How the processes of a run find each other, before Paddle makes any group.

Rank 0 starts the store, all processes come to it, and Paddle gets it as its own store on every
rank. Works the same for groups of gloo and of NCCL.
"""

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paddle.base import core

from paddle_vl.parallel.store import server
from paddle_vl.parallel.store.address import (
    MASTER,
    Addresses,
    choose_interfaces,
    find_addresses,
    read_variable,
)
from paddle_vl.parallel.store.membership import Membership

# Seconds that a process waits for others, unless `limit_waits` was given another number.
DEFAULT_TIMEOUT_S = 1800.0
_RANK, _NUM_RANKS = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"
_NOT_THE_FIRST = "1"


@dataclass(frozen=True)
class Rendezvous:
    """This process among all, once they have met."""

    rank: int
    num_ranks: int
    addresses: Addresses
    membership: Membership
    # Of rank 0: the store ends when its standard input does.
    store_process: subprocess.Popen | None
    paddle_store: Any

    def gone(self) -> list[int]:
        """Ranks that have ended, in that order."""
        return self.membership.gone()


_met: list[Rendezvous] = []
_timeout_s: list[float] = [DEFAULT_TIMEOUT_S]


def limit_waits(seconds: float) -> None:
    """How long this process waits for others, wherever it does; the same on every rank.

    Raises:
        RuntimeError: the processes have met already, with another limit.
    """
    if _met and seconds != timeout_s():
        raise RuntimeError(
            f"the processes have met with a limit of {timeout_s():g} s to their waits, which "
            f"cannot become {seconds:g} s: give parallel.timeout_s before the first group is made"
        )
    _timeout_s[:] = [seconds]


def timeout_s() -> float:
    """Seconds that this process waits for others."""
    return _timeout_s[0]


def meet() -> Rendezvous:
    """Meet all processes of the run; every rank calls this, and once they have met it is at once.

    Raises:
        RuntimeError: the launcher's variables are wrong, the store's port is taken, or a process
            does not come or has ended: names it.
    """
    if _met:
        return _met[0]
    rank, num_ranks = (int(read_variable(os.environ, name)) for name in (_RANK, _NUM_RANKS))
    addresses = find_addresses()
    choose_interfaces(addresses)
    process = _start_store(addresses, num_ranks) if rank == 0 else None
    membership = Membership(rank, num_ranks, addresses.host, addresses.port, timeout_s())
    membership.come()
    with _paddle_as_client_of(addresses):
        core.create_or_get_global_tcp_store()
    # Paddle's own has a limit of 900 s. It asks by this name for the store of its groups.
    store = _client_of(addresses)
    core.create_or_get_global_tcp_store = lambda: store
    _met.append(Rendezvous(rank, num_ranks, addresses, membership, process, store))
    return _met[0]


def gone_ranks() -> list[int]:
    """Ranks that have ended, in that order; none before the processes have met."""
    return _met[0].gone() if _met else []


def membership() -> Membership | None:
    """This process among the others; None before they have met."""
    return _met[0].membership if _met else None


def store_of(name: str) -> Any:
    """The run's store, with keys of their own for those that give the same name."""
    store = _client_of(meet().addresses)
    store.set(server.NAMESPACE.removeprefix("/"), name)
    return store


def _client_of(addresses: Addresses) -> Any:
    return core.TCPStore(addresses.host, addresses.port, False, 1, math.ceil(timeout_s()))


def _start_store(addresses: Addresses, num_ranks: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", server.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # What interrupts a run is for its ranks; the store ends after them.
        start_new_session=True,
    )
    print(addresses.host, addresses.port, num_ranks, timeout_s(), file=process.stdin, flush=True)
    said = process.stdout.readline().strip()
    if said != "ready":
        place = f"{addresses.host}:{addresses.port}"
        raise RuntimeError(
            f"rank 0 cannot listen at {place}, where the processes of this run are to meet "
            f"({said or 'its store did not start'}). If another program has the port, start the "
            "run again or give the launcher another with --start_port; if the address is not this "
            "machine's, give it with --host"
        )
    return process


@contextmanager
def _paddle_as_client_of(addresses: Addresses):
    """Paddle makes one store in a process, a server on rank 0: here it takes none for rank 0."""
    given = {MASTER: f"{addresses.host}:{addresses.port}", _RANK: _NOT_THE_FIRST}
    kept = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
