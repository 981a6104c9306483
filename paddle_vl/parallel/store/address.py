"""At which addresses the processes of a run listen and meet, from what the launcher says.

A run whose processes are all on this machine uses loopback, whatever address the launcher names.
"""

import array
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from ipaddress import ip_address
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
ENDPOINTS, CURRENT = "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"
MASTER = "PADDLE_MASTER"
# Gloo takes an interface's name, NCCL a prefix of it unless `=` asks for the whole.
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
# From linux/sockios.h: the IPv4 addresses of all interfaces.
_SIOCGIFCONF = 0x8912
# struct ifreq: name, family and port (both passed over), address; and what follows.
_ENTRY, _ENTRY_BYTES = "16s4x4s", 40


class Addresses(NamedTuple):
    """Addresses are IPv4, the only ones that Paddle's store knows.

    Attributes:
        host, port: where the store of the run listens.
        own: where this process listens.
        one_machine: whether all processes are on this machine.
    """

    host: str
    port: int
    own: str
    one_machine: bool


def find_addresses(environment: Mapping[str, str] = os.environ) -> Addresses:
    """Addresses of the run that the launcher's variables describe.

    Raises:
        RuntimeError: a variable is missing, is not HOST:PORT, or names a host that does not
            resolve.
    """
    endpoints = [
        _parts(ENDPOINTS, text) for text in read_variable(environment, ENDPOINTS).split(",")
    ]
    master = endpoints[0]
    if environment.get(MASTER):
        master = _parts(MASTER, environment[MASTER])
    resolved = {host: _resolve(host) for host, _ in [*endpoints, master]}
    if all(map(is_of_this_machine, resolved.values())):
        return Addresses(LOOPBACK, master[1], LOOPBACK, True)
    own, _ = _parts(CURRENT, read_variable(environment, CURRENT))
    return Addresses(resolved[master[0]], master[1], _resolve(own), False)


def choose_interfaces(
    addresses: Addresses, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Have gloo and NCCL listen on the interface of this process's address.

    What the user has set stays, and an address that no interface has chooses none.
    """
    name = interface_of(addresses.own)
    if name is not None:
        for variable, form in _INTERFACE_VARIABLES.items():
            environment.setdefault(variable, form.format(name))


def is_of_this_machine(address: str) -> bool:
    """Whether an IPv4 address is one of this machine, or of this container if that has its own."""
    if ip_address(address).is_loopback:
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing. The way to an own address begins at that address.
            probe.connect((address, 9))
        except OSError:
            return False
        return probe.getsockname()[0] == address


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    wanted, size = socket.inet_aton(address), 64 * _ENTRY_BYTES
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        while True:
            entries = array.array("B", bytes(size))
            # struct ifconf: the size, and a pointer to the place for the entries.
            request = struct.pack("iL", size, entries.buffer_info()[0])
            filled, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
            if filled < size:
                break
            size *= 2
    for start in range(0, filled, _ENTRY_BYTES):
        name, found = struct.unpack_from(_ENTRY, entries, start)
        if found == wanted:
            # An alias `eth0:1` is a second address of `eth0`.
            return name.split(b"\0")[0].decode().partition(":")[0]
    return None


def read_variable(environment: Mapping[str, str], variable: str) -> str:
    if not environment.get(variable):
        raise RuntimeError(
            f"{variable} is not set in this process of several: start them with fleetrun, "
            "`python -m paddle.distributed.launch` or `paddle-vl --nproc`"
        )
    return environment[variable]


def _parts(variable: str, text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise RuntimeError(f"{variable} holds {text!r}; an endpoint is HOST:PORT, over IPv4")
    return host, int(port)


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise RuntimeError(
            f"the host {host!r} of this run's endpoints does not resolve to an IPv4 address "
            f"({error.strerror}): give the launcher addresses, or add the name to /etc/hosts"
        ) from None
