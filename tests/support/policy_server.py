"""Servers in a thread of a test, and the recorded sessions of other servers."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from paddle_vl.serving.batching import ActorRequest, BatchSettings
from paddle_vl.serving.transport import Server, ServerSettings, WireProtocol
from tests.support.tiny import GOLDEN

SESSIONS = GOLDEN / "policy_server"
WAIT_S = 30


class Running:
    """A server that listens.

    Attributes:
        ended: the result of its thread.
    """

    def __init__(self, server: Server, port: int, loop: asyncio.AbstractEventLoop, ended: Future):
        self.server, self.port, self.ended, self._loop = server, port, ended, loop
        self.address = f"ws://127.0.0.1:{port}"

    def stop(self) -> None:
        """Ask it to end, from any thread."""
        if not self.ended.done():
            self._loop.call_soon_threadsafe(self.server.stop)

    def http(self, method: str, path: str, **headers: str) -> tuple[HTTPResponse, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()


@contextmanager
def serving(
    load: Callable[[], WireProtocol],
    batching: BatchSettings | None = None,
    waits: bool = True,
    **settings: Any,
) -> Iterator[Running]:
    """A server at a free port; it ends with the block.

    Args:
        waits: for the model; False to enter while it loads.
    """
    wanted = replace(ServerSettings(port=0), **settings)
    server = Server(wanted, batching or BatchSettings())
    started: Future = Future()
    ended: Future = Future()
    is_ready = threading.Event()

    def run() -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            await server.run(load, lambda port: started.set_result((port, loop)), is_ready.set)

        try:
            ended.set_result(asyncio.run(main()))
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    running = Running(server, *started.result(WAIT_S), ended)
    if waits:
        assert is_ready.wait(WAIT_S)
    try:
        yield running
    finally:
        running.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Scripted:
    """An actor that gives these answers in turn; an exception is raised."""

    def __init__(self, *answers: Any):
        self.answers, self.observations = list(answers), []

    def new_history(self) -> None:
        return None

    def request(self, observation: dict, number: int, history: None = None) -> ActorRequest:
        self.observations.append(observation)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ActorRequest(lambda items: items, answer)


class Session:
    """A recorded session.

    Attributes:
        events: in wire order, without the HTTP heads; frames have their `payload`.
        heads: of the upgrade, the client's and the server's.
    """

    def __init__(self, name: str):
        recorded = json.loads((SESSIONS / f"{name}.json").read_text(encoding="utf-8"))
        payloads = (SESSIONS / f"{name}.bin").read_bytes()
        self.heads = [event["head"] for event in recorded["events"] if event["kind"] == "http"]
        self.events = [event for event in recorded["events"] if event["kind"] == "frame"]
        for event in self.events:
            begin = event["offset"]
            event["payload"] = payloads[begin : begin + event["length"]]

    def messages(self, direction: str) -> list[bytes]:
        """The binary messages of the client or the server."""
        return [
            event["payload"]
            for event in self.events
            if event["dir"] == direction and event["type"] == "binary"
        ]
