"""Addresses of a run, from the launcher's variables and the machine's interfaces."""

import socket

import psutil
import pytest

from paddle_vl.parallel.store.rendezvous import (
    Addresses,
    choose_interfaces,
    find_addresses,
    interface_of,
    is_of_this_machine,
)

# Reserved for documentation; no machine has it.
FAR = "203.0.113.7"
# (interface, address) pairs of this machine.
OWN = [
    (name, address.address)
    for name, addresses in psutil.net_if_addrs().items()
    for address in addresses
    if address.family == socket.AF_INET and psutil.net_if_stats()[name].isup
]
PLACED = [own for own in OWN if not own[1].startswith("127.")]


def variables(*endpoints: str, rank: int = 0, **others: str) -> dict[str, str]:
    return {
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        **others,
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", *(address for _, address in PLACED)])
def test_a_run_on_one_machine_uses_loopback(host):
    found = find_addresses(variables(f"{host}:4000", f"{host}:4001", rank=1))
    assert found == Addresses("127.0.0.1", 4000, "127.0.0.1")


def test_the_launcher_s_master_comes_before_the_first_endpoint():
    given = variables("127.0.0.1:4000", PADDLE_MASTER="localhost:5000")
    assert find_addresses(given).port == 5000


@pytest.mark.skipif(not PLACED, reason="this machine has no address but loopback")
def test_a_run_on_several_machines_uses_the_endpoints_addresses():
    own = PLACED[0][1]
    given = variables(f"{own}:4000", f"{FAR}:4000", PADDLE_MASTER=f"{own}:5000")
    assert find_addresses(given) == Addresses(own, 5000, own)
    # The view of a rank on the other machine, or of this rank if the master is there.
    given = variables(f"{FAR}:4000", f"{own}:4000", rank=1)
    assert find_addresses(given) == Addresses(FAR, 4000, own)


def test_addresses_of_this_machine_and_their_interfaces_are_found():
    assert OWN
    for name, address in [("lo", "127.0.0.1"), *OWN]:
        assert is_of_this_machine(address)
        assert interface_of(address) == name
    assert is_of_this_machine("127.0.1.1")
    assert not is_of_this_machine(FAR)
    assert interface_of(FAR) is None


@pytest.mark.parametrize(
    ("address", "chosen", "wanted"),
    [
        ("127.0.0.1", {}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        (
            "127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"},
            {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"},
        ),
        (FAR, {}, {}),
    ],
)  # fmt: skip
def test_gloo_and_nccl_get_the_interface_unless_one_is_chosen(address, chosen, wanted):
    choose_interfaces(Addresses(address, 1, address), environment := dict(chosen))
    assert environment == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "PADDLE_TRAINER_ENDPOINTS is not set .*fleetrun"),
        (variables("127.0.0.1"), "PADDLE_TRAINER_ENDPOINTS holds '127.0.0.1', .*HOST:PORT"),
        (variables("a:99999"), "PADDLE_TRAINER_ENDPOINTS holds 'a:99999'"),
        (variables("127.0.0.1:1", PADDLE_MASTER="x"), "PADDLE_MASTER holds 'x'"),
        (variables("no-such-host.invalid:1"), r"'no-such-host.invalid:1', .*\(\[Errno"),
    ],
)
def test_wrong_variables_are_refused_by_name(given, message):
    with pytest.raises(RuntimeError, match=message):
        find_addresses(given)
