"""The queue and the transport, with a stand-in for the model.

Guarantees: requests that wait run together, one layout at a time; one that fails fails alone; what
nobody waits for any more does not run; pings are answered while the model computes; at the end what
was asked is answered; clients beyond the limit, browsers and long messages are refused; health,
metrics and settings say what is true.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from paddle_vl.files.token_file import read_token
from paddle_vl.serving.access import check_exposure
from paddle_vl.serving.batching import ActorRequest, BatchSettings, answers_of
from paddle_vl.serving.msgpack_numpy import OPENPI, VLA_EVAL
from paddle_vl.serving.openpi import OpenpiProtocol
from paddle_vl.serving.transport import error_text
from paddle_vl.serving.vla_eval import VlaEvalProtocol
from tests.support.policy_server import WAIT_S, Running, serving


class Gate:
    """An actor whose model waits until it is opened, once for each batch.

    Attributes:
        batches: the items of every batch that ran.
        numbers: of the requests on their connections.
        history: what it was told of an episode's observations.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.numbers: list[int] = []
        self.history: list[int] | None = None
        self._opened, self.has_begun = threading.Semaphore(0), threading.Event()

    def open(self, batches: int = 99) -> None:
        self._opened.release(batches)

    def new_history(self) -> list[int] | None:
        return self.history

    def observe(self, observation: dict, history: list[int] | None) -> None:
        if history is not None:
            history.append(observation["n"])

    def request(
        self, observation: dict, number: int, history: list[int] | None = None
    ) -> ActorRequest:
        if "bad" in observation:
            raise ValueError("the observation is bad")
        self.numbers.append(number)
        self.observe(observation, history)
        return ActorRequest(self.run, observation["n"], observation.get("layout"))

    def run(self, items: list[int]) -> list:
        self.batches.append(items)
        self.has_begun.set()
        assert self._opened.acquire(timeout=WAIT_S)
        return [OSError("/a/folder") if n < 0 else {"actions": [n]} for n in items]


def ask(server: Running, **observation) -> str | list:
    """What one client gets for one observation: its actions, or the text of a failure."""
    with connect(server.address, compression=None) as peer:
        peer.recv(WAIT_S)
        peer.send(OPENPI.pack(observation))
        answer = peer.recv(WAIT_S)
        return answer if isinstance(answer, str) else OPENPI.unpack(answer)["actions"]


def waiting(server: Running) -> int:
    return len(server.server.queue)


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def clients():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_what_waits_runs_together_and_a_failure_is_alone(gate, clients):
    batching = BatchSettings(max_batch_size=3)
    with serving(lambda: OpenpiProtocol(gate, {}), batching) as server:
        asked = [clients.submit(ask, server, n=0)]
        assert gate.has_begun.wait(WAIT_S)
        for n, layout in [(1, "a"), (2, "b"), (-3, "a"), (4, "a"), (5, "a")]:
            asked.append(clients.submit(ask, server, n=n, layout=layout))
            until(lambda: waiting(server) == len(asked) - 1)
        assert ask(server, bad=1) == "ValueError: the observation is bad\n"
        gate.open()
        answers = [each.result(WAIT_S) for each in asked]
        assert gate.batches == [[0], [1, -3, 4], [2], [5]]
        assert answers[3].startswith("RuntimeError: the model failed (OSError)")
        assert "folder" not in answers[3]
        assert [*answers[:3], *answers[4:]] == [[0], [1], [2], [4], [5]]
        lines = server.http("GET", "/metrics")[1].splitlines()
        for line in [
            'paddle_vl_requests_total{outcome="answered"} 5',
            'paddle_vl_requests_total{outcome="failed"} 1',
            'paddle_vl_requests_total{outcome="refused"} 1',
            'paddle_vl_batch_size_bucket{le="1"} 3',
            'paddle_vl_batch_size_bucket{le="+Inf"} 4',
            "paddle_vl_request_seconds_count 7",
            "paddle_vl_waiting_requests 0",
            "paddle_vl_ready 1",
        ]:
            assert line in lines


def test_a_batch_that_fails_as_a_whole_runs_one_by_one():
    def run(items):
        if len(items) > 1 or items == [2]:
            raise MemoryError(str(items))
        return np.zeros(items) if items[0] < 0 else items

    one, full, wrong = answers_of(run, [1, 2, -3])
    assert (one, type(full)) == (1, MemoryError)
    # What a model raises is no refusal.
    assert isinstance(wrong.__cause__, ValueError)
    assert error_text(wrong).startswith("RuntimeError: the model failed")


def test_a_batch_waits_for_more_after_the_one_before(gate, clients):
    batching = BatchSettings(max_batch_size=2)
    with serving(lambda: OpenpiProtocol(gate, {}), batching) as server:
        assert server.http("GET", "/config?max_wait_time=1")[1].startswith('{"applied": {"max_w')
        for query in ("max_wait_time=2", "max_batch_size=0", "max_batch_size=x"):
            assert server.http("GET", f"/config?{query}")[0].status == 422
        gate.open()
        first = clients.submit(ask, server, n=0)
        assert first.result(WAIT_S) == [0]
        second = clients.submit(ask, server, n=1)
        until(lambda: waiting(server) == 1)
        assert clients.submit(ask, server, n=2).result(WAIT_S) == [2]
        assert second.result(WAIT_S) == [1]
        assert sorted(map(sorted, gate.batches)) == [[0], [1, 2]]


def test_nothing_runs_for_a_late_answer_or_a_lost_client(gate, clients):
    """One that leaves a batch does not disturb it."""
    with serving(lambda: OpenpiProtocol(gate, {}), deadline_s=1.0) as server:
        running = clients.submit(ask, server, n=0)
        assert gate.has_begun.wait(WAIT_S)
        with connect(server.address, compression=None) as leaving:
            leaving.recv(WAIT_S)
            leaving.send(OPENPI.pack({"n": 1}))
            until(lambda: waiting(server) == 1)
        until(lambda: waiting(server) == 0)
        assert ask(server, n=3).startswith("DeadlineError: no answer within 1 s")
        assert running.result(WAIT_S).startswith("DeadlineError")
        gate.open(2)
        assert ask(server, n=4) == [4]
        assert gate.batches == [[0], [4]]
        counted = server.http("GET", "/metrics")[1]
        assert 'outcome="dropped"} 1\n' in counted
        assert 'outcome="late"} 2\n' in counted
        busy = clients.submit(ask, server, n=5)
        until(lambda: gate.batches[-1] == [5])
        with connect(server.address, compression=None) as leaving:
            leaving.recv(WAIT_S)
            leaving.send(OPENPI.pack({"n": 6}))
            until(lambda: waiting(server) == 1)
            other = clients.submit(ask, server, n=7)
            until(lambda: waiting(server) == 2)
            gate.open(1)
            assert busy.result(WAIT_S) == [5]
            until(lambda: gate.batches[-1] == [6, 7])
        gate.open()
        assert other.result(WAIT_S) == [7]


def test_the_end_answers_what_was_asked_and_closes_who_is_idle(gate, clients):
    with serving(lambda: OpenpiProtocol(gate, {})) as server:
        with (
            connect(server.address, compression=None) as busy,
            connect(server.address, compression=None) as idle,
        ):
            for peer in (busy, idle):
                peer.recv(WAIT_S)
            busy.send(OPENPI.pack({"n": 0}))
            assert gate.has_begun.wait(WAIT_S)
            # Pings are answered while the model computes.
            assert busy.ping().wait(WAIT_S)
            server.stop()
            with pytest.raises(ConnectionClosed):
                idle.recv(WAIT_S)
            assert idle.close_code == 1001
            gate.open()
            assert OPENPI.unpack(busy.recv(WAIT_S))["actions"] == [0]
            with pytest.raises(ConnectionClosed):
                busy.recv(WAIT_S)
            assert busy.close_code == 1001
        server.ended.result(WAIT_S)


def test_clients_may_come_while_the_model_loads(gate, clients):
    gate.open()
    loads = threading.Event()

    def load():
        assert loads.wait(WAIT_S)
        return OpenpiProtocol(gate, {})

    with serving(load, waits=False) as server:
        for path in ("/healthz", "/health"):
            assert server.http("GET", path)[0].status == 503
        early = clients.submit(ask, server, n=0)
        until(lambda: "paddle_vl_connections 1" in server.http("GET", "/metrics")[1])
        loads.set()
        assert early.result(WAIT_S) == [0]
        assert server.http("GET", "/healthz")[0].status == 200


def test_a_defect_is_logged_and_closes_its_connection_or_the_server(caplog):
    def load():
        raise RuntimeError("a damaged file")

    class Broken:
        async def talk(self, peer):
            raise KeyError("a defect")

    with serving(Broken) as server, connect(server.address, compression=None) as peer:
        with pytest.raises(ConnectionClosed):
            peer.recv(WAIT_S)
        assert peer.close_code == 1011
    (failure,) = (record for record in caplog.records if record.exc_info)
    assert isinstance(failure.exc_info[1], KeyError)
    with serving(load, waits=False) as server, pytest.raises(RuntimeError, match="damaged file"):
        server.ended.result(WAIT_S)


def test_limits_of_connections_and_messages(gate):
    limits = {"max_clients": 1, "max_message_bytes": 100}
    with serving(lambda: OpenpiProtocol(gate, {}), **limits) as server:
        with pytest.raises(InvalidStatus, match="403"):
            connect(server.address, origin="http://elsewhere")
        with connect(server.address, compression=None) as peer:
            peer.recv(WAIT_S)
            with pytest.raises(InvalidStatus, match="503"):
                connect(server.address)
            peer.send(bytes(101))
            with pytest.raises(ConnectionClosed):
                peer.recv(WAIT_S)
            assert peer.close_code == 1009


def test_episodes_of_vla_eval_begin_without_actions_and_past(gate):
    gate.open()
    gate.history = []
    gate.run = lambda items: [{"actions": [[n], [n + 1], [n + 2]]} for n in items]
    with (
        serving(lambda: VlaEvalProtocol(gate, {}, chunk_size=2)) as server,
        connect(server.address, compression=None) as peer,
    ):

        def said(kind: str, seq: int, **payload) -> None:
            message = {"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}
            peer.send(VLA_EVAL.pack(message))

        found = []
        for seq, n in enumerate([10, 20, 30, 40]):
            if n == 40:
                assert gate.history == [10, 20, 30]
                said("episode_start", 99, task={})
            said("observation", seq, n=n)
            message = VLA_EVAL.unpack(peer.recv(WAIT_S))
            assert (message["type"], message["seq"]) == ("action", seq)
            actions = message["payload"]["actions"]
            assert actions.dtype == "float32"
            found.append(actions.item())
        assert found == [10, 11, 30, 40]
        assert gate.numbers == [0, 1, 2]
        assert gate.history == [40]


def test_who_may_listen_and_with_which_token(tmp_path, monkeypatch):
    for host in ("localhost", "127.0.0.3", "::1"):
        check_exposure(host, None, False)
    check_exposure("0.0.0.0", "secret", False)
    check_exposure("0.0.0.0", None, True)
    for host in ("0.0.0.0", "::", "robot.example", ""):
        with pytest.raises(ValueError, match="--token-file, or PADDLE_VL_SERVER_TOKEN"):
            check_exposure(host, None, False)
    assert read_token(None) is None
    monkeypatch.setenv("PADDLE_VL_SERVER_TOKEN", "of the variable")
    assert read_token(None) == "of the variable"
    (tmp_path / "token").write_text("of the file\n")
    assert read_token(str(tmp_path / "token")) == "of the file"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="holds no token"):
        read_token(str(tmp_path / "token"))
