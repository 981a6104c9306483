"""Rendezvous of the ranks of a run, before Paddle creates any process group.

Rank 0 starts the store, all ranks connect to it, and Paddle uses it as its own store on every rank,
for groups of gloo and of NCCL alike. If all ranks are on this machine everything listens on
loopback, whatever address the launcher gives.
"""

import fcntl
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple
from unittest import mock

from paddle.base import core

from paddle_vl.parallel.store import server
from paddle_vl.parallel.store.membership import Membership, of_this_process

# Seconds that a rank waits for others by default.
DEFAULT_TIMEOUT_S = 1800.0
LOOPBACK = "127.0.0.1"
ENDPOINTS, CURRENT = "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"
MASTER = "PADDLE_MASTER"
_RANK, _NUM_RANKS = "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"
_NOT_THE_FIRST = "1"
# Gloo takes the name of an interface, NCCL a prefix of it unless `=` asks for an exact match.
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
# From linux/sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# struct ifreq: name, family and port (both skipped), address; then padding.
_IFREQ = "16s4x4s16x"


class Addresses(NamedTuple):
    """IPv4 addresses of a run; Paddle's store knows no others.

    Attributes:
        host, port: where the store listens.
        own: where this rank listens.
    """

    host: str
    port: int
    own: str


# The addresses of the run, once all ranks have met.
_met: list[Addresses] = []
# On rank 0 the process of the store, which ends when its standard input is closed.
_store_process: list[subprocess.Popen] = []
_timeout_s: list[float] = [DEFAULT_TIMEOUT_S]


def set_timeout(seconds: float) -> None:
    """Set how long this rank waits for others, in every operation; the same on every rank, and
    before the first group is made."""
    _timeout_s[:] = [seconds]


def timeout_s() -> float:
    """Seconds that this rank waits for others."""
    return _timeout_s[0]


def meet() -> Addresses:
    """Connect this rank to the store, and wait for all ranks; later calls return at once.

    Raises:
        RuntimeError: the launcher's variables are wrong, the store's port is taken, or a rank does
            not join or has ended: names it.
    """
    if _met:
        return _met[0]
    rank, num_ranks = (int(_read_variable(os.environ, name)) for name in (_RANK, _NUM_RANKS))
    addresses = find_addresses()
    choose_interfaces(addresses)
    if rank == 0:
        _store_process.append(_start_store(addresses, num_ranks))
    membership = Membership(rank, num_ranks, addresses.host, addresses.port, timeout_s())
    membership.join()
    of_this_process.append(membership)
    # Paddle makes its store as a client on every rank, not as a server on rank 0.
    as_client = {MASTER: f"{addresses.host}:{addresses.port}", _RANK: _NOT_THE_FIRST}
    with mock.patch.dict(os.environ, as_client):
        core.create_or_get_global_tcp_store()
    _met.append(addresses)
    return addresses


def store_of(name: str) -> Any:
    """A client of the store whose keys are shared by clients of the same name only."""
    addresses = meet()
    store = core.TCPStore(addresses.host, addresses.port, False, 1, math.ceil(timeout_s()))
    store.set(server.NAMESPACE.removeprefix("/"), name)
    return store


def find_addresses(environment: Mapping[str, str] = os.environ) -> Addresses:
    """The addresses of the run, from the launcher's variables.

    Raises:
        RuntimeError: a variable is missing, is not HOST:PORT, or its host does not resolve.
    """
    texts = _read_variable(environment, ENDPOINTS).split(",")
    endpoints = [_host_and_port(ENDPOINTS, text) for text in texts]
    master = endpoints[0]
    if environment.get(MASTER):
        master = _host_and_port(MASTER, environment[MASTER])
    if all(is_of_this_machine(host) for host, _ in [*endpoints, master]):
        return Addresses(LOOPBACK, master[1], LOOPBACK)
    own, _ = _host_and_port(CURRENT, _read_variable(environment, CURRENT))
    return Addresses(*master, own)


def choose_interfaces(
    addresses: Addresses, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables by which gloo and NCCL listen on the interface of this rank's address.

    Variables that the user has set stay. Without an interface of that address none is set.
    """
    name = interface_of(addresses.own)
    if name is not None:
        for variable, form in _INTERFACE_VARIABLES.items():
            environment.setdefault(variable, form.format(name))


def is_of_this_machine(address: str) -> bool:
    """Whether an IPv4 address belongs to this machine (or container with a network of its own)."""
    if ip_address(address).is_loopback:
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing. The kernel routes to a local address from that address itself.
            probe.connect((address, 9))
        except OSError:
            return False
        return probe.getsockname()[0] == address


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address this is."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(_IFREQ, name.encode(), b"")
            with suppress(OSError):  # An interface without an address.
                _, found = struct.unpack(_IFREQ, fcntl.ioctl(probe, _SIOCGIFADDR, request))
                if found == wanted:
                    return name
    return None


def _read_variable(environment: Mapping[str, str], variable: str) -> str:
    if not environment.get(variable):
        raise RuntimeError(
            f"{variable} is not set in this rank of several: start them with fleetrun, "
            "`python -m paddle.distributed.launch` or `paddle-vl --nproc`"
        )
    return environment[variable]


def _host_and_port(variable: str, text: str) -> tuple[str, int]:
    """The IPv4 address and the port of an endpoint."""
    host, _, port = text.strip().rpartition(":")
    try:
        number = int(port)
        if not host or not 0 < number < 1 << 16:
            raise ValueError("no HOST:PORT")
        return socket.gethostbyname(host), number
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{variable} holds {text!r}, which is not the HOST:PORT of an IPv4 address ({error}): "
            "give the launcher addresses, or add the host's name to /etc/hosts"
        ) from None


def _start_store(addresses: Addresses, num_ranks: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", server.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C must not reach the store, which has to outlive the ranks.
        start_new_session=True,
    )
    print(addresses.host, addresses.port, num_ranks, timeout_s(), file=process.stdin, flush=True)
    said = process.stdout.readline().strip() if process.stdout else ""
    if said != "ready":
        place = f"{addresses.host}:{addresses.port}"
        raise RuntimeError(
            f"rank 0 cannot listen at {place}, where the ranks of this run are to meet "
            f"({said or 'its store did not start'}). If another program has the port, start the "
            "run again or give the launcher another with --start_port; if the address is not this "
            "machine's, give it with --host"
        )
    return process
