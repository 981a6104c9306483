"""The store of a run, in its own process, and who waits there for whom."""

import contextlib
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
from paddle.base import core

from paddle_vl.parallel.store import membership, rendezvous, server
from paddle_vl.parallel.store.membership import Membership, PeerWatch
from paddle_vl.parallel.store.rendezvous import Addresses

HOST = "127.0.0.1"
# Far longer than any operation here.
LONG = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_store(num_ranks: int, port: int | None = None):
    """Yields the port and the process."""
    port = port or free_port()
    process = rendezvous._start_store(Addresses(HOST, port, HOST), num_ranks)
    try:
        yield port, process
    finally:
        process.stdin.close()
        process.wait(LONG)
        process.stdout.close()


def members(port: int, num_ranks: int) -> list[Membership]:
    return [Membership(rank, num_ranks, HOST, port, LONG) for rank in range(num_ranks)]


def all_join(present: list[Membership]) -> list:
    """What each join raises, or None."""
    with ThreadPoolExecutor(len(present)) as pool:
        return [done.exception(LONG) for done in [pool.submit(one.join) for one in present]]


def close(*present: Membership) -> None:
    for one in present:
        with contextlib.suppress(OSError):
            one._socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def joined(num_ranks: int):
    """Yields the port, the process and all ranks, which have joined."""
    with running_store(num_ranks) as (port, process):
        present = members(port, num_ranks)
        assert all_join(present) == [None] * num_ranks
        yield port, process, present
        close(*present)


def test_paddle_s_client_has_its_store():
    with running_store(1) as (port, _):
        first, second = (core.TCPStore(HOST, port, False, 1, 10) for _ in range(2))
        first.set("key", "value")
        assert bytes(second.get("key")) == b"value"
        assert [first.add("count", 2), second.add("count", -5)] == [2, -3]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.wait, "later")
            time.sleep(0.1)
            assert not waiting.done()
            first.set("later", "x" * 100_000)
            waiting.result(LONG)
        assert len(second.get("later")) == 100_000


def test_additions_whose_numbers_arrive_late_lose_none():
    """A client sends a command, the key and the number apart."""
    with running_store(1) as (port, _):
        store = core.TCPStore(HOST, port, False, 1, 10)
        assert store.add("count", 1) == 1
        with socket.create_connection((HOST, port), LONG) as slow:
            key = b"/count"
            slow.sendall(struct.pack("<IQ", server.ADD, len(key)) + key)
            time.sleep(0.1)
            assert store.add("count", 1) == 2
            slow.sendall(struct.pack("<q", 1))
            assert struct.unpack("<q", slow.recv(8)) == (3,)
        assert store.add("count", 0) == 3


def test_names_keep_keys_apart(monkeypatch):
    with running_store(1) as (port, _):
        addresses = Addresses(HOST, port, HOST)
        monkeypatch.setattr(rendezvous, "_met", [addresses])
        stores = [rendezvous.store_of(name) for name in ("a", "b", "a")]
        for number, store in enumerate(stores[:2]):
            store.set("key", str(number))
        assert [bytes(store.get("key")) for store in stores] == [b"0", b"1", b"0"]


def test_ranks_that_do_not_come_are_named():
    with running_store(4) as (port, _):
        present = [Membership(rank, 4, HOST, port, 0.3) for rank in (0, 2)]
        begin = time.monotonic()
        for rank, error in zip((0, 2), all_join(present), strict=True):
            assert str(error).startswith(
                f"rank {rank} has waited 0.3 s at {HOST}:{port} for ranks 1, 3: "
                "see the log of ranks 1, 3"
            )
            assert "train.resume_from_checkpoint=auto" in str(error)
        assert time.monotonic() - begin < 5
        close(*present)


def test_a_rank_that_ends_before_all_have_come_is_named_at_once():
    with running_store(3) as (port, _), ThreadPoolExecutor(2) as pool:
        present = members(port, 3)
        waiting = [pool.submit(one.join) for one in present[:2]]
        time.sleep(0.2)
        # The state after a kill; the killed rank's own wait does not matter.
        present[1]._socket.shutdown(socket.SHUT_RDWR)
        error = waiting[0].exception(5)
        assert str(error).startswith(
            "rank 0 waits for rank 2, and rank 1 ended meanwhile: see the log of "
        )
        waiting[1].exception(5)
        close(*present)


def test_nobody_waits_for_a_key_when_a_rank_has_ended():
    with joined(2) as (port, _, present), ThreadPoolExecutor(1) as pool:
        store = core.TCPStore(HOST, port, False, 1, 10)
        store.set("there", "1")
        waiting = pool.submit(store.wait, "never")
        time.sleep(0.1)
        close(present[1])
        assert waiting.exception(5) is not None
        assert present[0].state()["ended"] == [1]
        # Existing keys can still be read.
        other = core.TCPStore(HOST, port, False, 1, 10)
        other.wait("there")
        assert bytes(other.get("there")) == b"1"


def test_the_time_for_a_key_is_limited(monkeypatch):
    monkeypatch.setattr(rendezvous, "_timeout_s", [0.3])
    with running_store(1) as (port, _):
        store = core.TCPStore(HOST, port, False, 1, 10)
        begin = time.monotonic()
        with pytest.raises(ValueError, match="reset by peer"):
            store.wait("never")
        assert 0.3 <= time.monotonic() - begin < 5


def test_two_processes_of_one_rank_are_refused():
    with running_store(2) as (port, _):
        twice = [Membership(1, 2, HOST, port, 0.2) for _ in range(2)]
        errors = sorted(str(error) for error in all_join(twice))
        assert any(
            "is refused" in e and "another process has joined as rank 1" in e for e in errors
        )
        with pytest.raises(RuntimeError, match="this run has ranks 0 to 1, and no rank 5"):
            Membership(5, 6, HOST, port, 0.2).join()
        close(*twice)


def test_a_taken_port_is_named():
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"listen at {HOST}:{port}, .*in use.*--start_port"):
            rendezvous._start_store(Addresses(HOST, port, HOST), 2)


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b" " * 100,
        # A length beyond that of any key or value.
        struct.pack("<IQ", server.GET, 1 << 40),
        struct.pack("<IQ", server.SET, 1) + b"k" + struct.pack("<Q", 1 << 40),
        # A key that is not text; an unknown command.
        struct.pack("<IQ", server.GET, 2) + b"\xff\xff",
        struct.pack("<IQ", 9, 1) + b"k",
    ],
)
def test_what_is_no_message_ends_its_connection_alone(message):
    with running_store(1) as (port, _):
        store = core.TCPStore(HOST, port, False, 1, 10)
        with socket.create_connection((HOST, port), LONG) as stranger:
            stranger.sendall(message)
            assert stranger.recv(1) == b""
        store.set("key", "value")
        assert bytes(store.get("key")) == b"value"


def test_ranks_exchange_values_and_the_store_keeps_none():
    with joined(2) as (_, _, (first, second)), ThreadPoolExecutor(1) as pool:
        for value in ("b", "c"):
            waiting = pool.submit(first.meet, "here", [0, 1], "a")
            answer = second.meet("here", [0, 1], value)
            assert sorted(answer["values"]) == [[0, "a"], [1, value]]
            assert waiting.result(LONG)["values"] == answer["values"]
        late = first.meet("here", [0, 1], "a", 0.1)
        assert (late["values"], late["missing"], late["last"]) == (
            [[0, "a"]], [1], [[0, "a"], [1, "c"]]
        )  # fmt: skip
        waiting = pool.submit(first.meet, "there", [0, 1])
        close(second)
        assert waiting.result(LONG / 2)["ended"] == [1]


@pytest.mark.parametrize("how", ["ends", "fails", "is late"])
def test_a_rank_that_does_not_come_to_all_others_is_named(how):
    with joined(3) as (_, _, present), ThreadPoolExecutor(2) as pool:
        arrived = [pool.submit(one.wait_for_all) for one in present[:2]]
        present[2].wait_for_all()
        assert [done.result(LONG) for done in arrived] == [None, None]
        for one in present[:2]:
            one.seconds = 0.3 if how == "is late" else LONG
        arrived = [pool.submit(one.wait_for_all) for one in present[:2]]
        if how == "ends":
            close(present[2])
        elif how == "fails":
            present[2].report_end("failed with ValueError")
        said = {
            "ends": "rank 2 ended",
            "fails": "rank 2 failed with ValueError",
            "is late": "got no answer from rank 2",
        }[how]
        for rank, done in enumerate(arrived):
            told = f"rank {rank}: a collective failed: {said}; see the log of rank 2 for the cause"
            assert str(done.exception(5)).startswith(told)


def test_it_ends_with_the_process_that_started_it():
    with joined(2) as (_, process, present):
        # The state after rank 0 is killed.
        process.stdin.close()
        close(present[0])
        assert present[1].state()["ended"] == [0]
        close(present[1])
        process.wait(2)
        assert present[1].state()["ended"] == [0]


def test_a_watch_outlives_the_import_of_the_rendezvous(monkeypatch):
    """A thread finds a module in sys.modules while another thread imports it, half filled."""
    monkeypatch.setattr(membership, "_POLL_S", 0.01)
    monkeypatch.setitem(sys.modules, rendezvous.__name__, ModuleType(rendezvous.__name__))
    with PeerWatch() as watch:
        time.sleep(0.1)
        assert watch._thread.is_alive()
