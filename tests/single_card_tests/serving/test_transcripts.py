"""Recorded sessions of openpi-client and vla-eval, replayed to this package's server.

Guarantees: with the recorded policy's answers, every message of the server equals the recorded one
byte for byte, save timings and timestamps; so do upgrade, close codes, HTTP answers and refusals.
Written again, a recorded message is the same bytes.
"""

import json

import msgpack
import pytest
import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from paddle_vl.serving.batching import BatchSettings
from paddle_vl.serving.msgpack_numpy import OPENPI, VLA_EVAL
from paddle_vl.serving.openpi import OpenpiProtocol
from paddle_vl.serving.vla_eval import VlaEvalProtocol
from tests.support.policy_server import SESSIONS, WAIT_S, Scripted, Session, serving


def openpi_of(session: Session) -> OpenpiProtocol:
    """openpi's protocol with the recorded policy."""
    metadata, *answers = map(OPENPI.unpack, session.messages("server"))
    for answer in answers:
        del answer["server_timing"]
    failure = ValueError("observation has no 'observation/state'")
    return OpenpiProtocol(Scripted(*answers, failure), metadata)


def vla_eval_of(session: Session, chunk_size: int | None) -> VlaEvalProtocol:
    """vla-eval's protocol with the recorded policy."""
    hello, *messages = map(VLA_EVAL.unpack, session.messages("server"))
    payloads = [message["payload"] for message in messages]
    if chunk_size is not None:
        # One action was sent of a chunk at a time; the last chunks were cut off by the end.
        actions = [p["actions"] for p in payloads if "actions" in p]
        chunks = [actions[i : i + chunk_size] for i in range(0, len(actions), chunk_size)]
        answers = [{"actions": chunk} for chunk in chunks]
    else:
        answers = payloads
    answers = [ValueError("no state") if "error" in a else a for a in answers]
    if any("error" in payload for payload in payloads):
        answers.insert(0, ValueError("no state"))
    versions = ("harness_version", "protocol_version")
    said = {name: value for name, value in hello["payload"].items() if name not in versions}
    return VlaEvalProtocol(Scripted(*answers), said, chunk_size)


def without_times(message: bytes, recorded: bytes) -> tuple[bytes, bytes]:
    """Both messages with the recorded times, after checking that there are the same ones."""
    dialect = VLA_EVAL if b"timestamp" in recorded else OPENPI
    found, wanted = dialect.unpack(message), dialect.unpack(recorded)
    assert dialect.pack(wanted) == recorded
    if "timestamp" in wanted:
        assert abs(found["timestamp"]) > 1e9
        found["timestamp"] = wanted["timestamp"]
    if "server_timing" in wanted:
        assert found["server_timing"].keys() == wanted["server_timing"].keys()
        found["server_timing"] = wanted["server_timing"]
    return dialect.pack(found), recorded


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        ("openpi_infer", None), ("openpi_error", None), ("vla_eval_sync", 4),
        ("vla_eval_error", 4), ("vla_eval_live", None),
    ],
)  # fmt: skip
def test_the_server_says_what_the_recorded_one_said(name, chunk_size):
    session = Session(name)
    is_openpi = name.startswith("openpi")
    wire = openpi_of(session) if is_openpi else vla_eval_of(session, chunk_size)
    path = session.heads[0].split()[1]
    authorization = {"Authorization": "Api-Key secret-1"} if "error" in name and is_openpi else {}
    with (
        serving(lambda: wire, keep_alive=is_openpi) as server,
        connect(server.address + path, compression=None, additional_headers=authorization) as peer,
    ):
        head = {line.split(":")[0] for line in session.heads[1].splitlines()[1:] if line}
        assert {*dict(peer.response.headers.raw_items())} == head
        for event in session.events:
            if event["type"] == "close":
                if event["dir"] == "client":
                    peer.close(event["code"])
                    continue
                with pytest.raises(ConnectionClosed):
                    peer.recv(WAIT_S)
                assert (peer.close_code, peer.close_reason) == (event["code"], event["reason"])
            elif event["dir"] == "client":
                peer.send(event["payload"])
            elif event["type"] == "text":
                # The traceback of the recorded server ends with the reason.
                assert peer.recv(WAIT_S) == event["payload"].decode().splitlines()[-1] + "\n"
            else:
                found, wanted = without_times(peer.recv(WAIT_S), event["payload"])
                assert found == wanted


@pytest.mark.parametrize(
    "message",
    [b"\xc1", "text", msgpack.packb([1]), msgpack.packb({1: 2}), b""],
    ids=["not_msgpack", "text_frame", "list_not_map", "int_map_key", "empty"],
)
def test_bad_messages_of_openpi_end_as_recorded(message, request):
    name = request.node.callspec.id
    recorded = json.loads((SESSIONS / "openpi_edges.json").read_text())["bad_input"][name]
    with (
        serving(lambda: OpenpiProtocol(Scripted(), {})) as server,
        connect(server.address, compression=None) as peer,
    ):
        assert OPENPI.unpack(peer.recv(WAIT_S)) == {}
        peer.send(message)
        assert recorded["answer"] == "text"
        assert peer.recv(WAIT_S).startswith("ValueError: ")
        with pytest.raises(ConnectionClosed):
            peer.recv(WAIT_S)
        assert (
            f"received {peer.close_code} (internal error) {peer.close_reason};" in recorded["then"]
        )


@pytest.mark.parametrize("name", ["openpi_edges", "vla_eval_edges"])
def test_http_answers_are_those_recorded(name):
    recorded = json.loads((SESSIONS / f"{name}.json").read_text())["http"]
    batching = BatchSettings(max_batch_size=8, max_wait_time=0.05)
    with serving(lambda: OpenpiProtocol(Scripted(), {}), batching) as server:
        for request, wanted in recorded.items():
            method, _, path = request.rpartition(" ")
            if method == "POST" and int(websockets.__version__.split(".")[0]) < 17:
                continue  # It only reads GET.
            response, body = server.http(method or "GET", path)
            assert (response.status, body) == (wanted["status"], wanted["body"]), request
            headers = dict(wanted.get("headers", [("Content-Type", wanted.get("content_type"))]))
            for header, value in headers.items():
                if header != "Server":
                    assert response.headers[header] == value, request


def test_tokens_are_checked_as_recorded():
    recorded = json.loads((SESSIONS / "openpi_edges.json").read_text())["auth"]
    wire = OpenpiProtocol(Scripted(), {})
    with serving(lambda: wire, token="secret-1") as server:
        for token, wanted in recorded.items():
            headers = {} if token == "None" else {"Authorization": f"Api-Key {token}"}
            if wanted["result"] == "connected":
                with connect(server.address, additional_headers=headers) as peer:
                    assert OPENPI.unpack(peer.recv(WAIT_S)) == wanted["metadata"]
                continue
            with pytest.raises(InvalidStatus) as refused:
                connect(server.address, additional_headers=headers)
            assert str(refused.value) in wanted["result"]
            length = refused.value.response.headers["Content-Length"]
            assert f"Content-Length: {length}\r\n" in wanted["response_head"]
        bearer = {"Authorization": "Bearer secret-1"}
        with connect(server.address, additional_headers=bearer) as peer:
            assert OPENPI.unpack(peer.recv(WAIT_S)) == {}
        assert server.http("GET", "/healthz")[0].status == 200
        assert server.http("GET", "/config")[0].status == 401
