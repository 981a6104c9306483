"""A websocket server: connections, their limits, plain HTTP beside them, and its end.

It knows no protocol: a `WireProtocol` talks to each `Peer`. The event loop never computes, so pings
are answered while the model does.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from paddle_vl.serving.access import is_allowed
from paddle_vl.serving.batching import BATCH_SIZE, ActorRequest, BatchQueue, BatchSettings
from paddle_vl.serving.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger(__name__)
_GOING_AWAY = 1001
# Messages that a client may send ahead of the one that is answered.
_MOST_AHEAD = 4
_REQUESTS, _REQUEST_SECONDS = "paddle_vl_requests_total", "paddle_vl_request_seconds"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Settings of `/config`, as vla-eval names them, with their types and ranges.
_CONFIG = {"max_batch_size": (int, 1, 64), "max_wait_time": (float, 0, 1)}


class DeadlineError(RuntimeError):
    """The answer is not there in time."""


class PeerLeftError(Exception):
    """The client has closed its connection."""


# Of requests without an answer.
_OUTCOMES: dict[type[Exception], str] = {
    PeerLeftError: "dropped",
    DeadlineError: "late",
    ValueError: "refused",
    Exception: "failed",
}


@dataclass(frozen=True)
class ServerSettings:
    """Attributes:
    port: 0 for any free one.
    token: what clients must send; None for nothing.
    max_clients: most connections at once, each of which has one request at a time.
    max_message_bytes: longest message of a client.
    deadline_s: seconds until a request without an answer is refused.
    keep_alive: whether the server pings its clients, every 20 s.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_clients: int = 64
    max_message_bytes: int = 16 << 20
    deadline_s: float = 25.0
    keep_alive: bool = True


class Peer:
    """One client, as a protocol sees it. Iterating gives its messages, until it leaves or the
    server ends; a message counts as being answered until the next one is asked for."""

    def __init__(self, connection: ServerConnection, server: "Server"):
        self._connection, self._server = connection, server
        self._is_answering = False

    async def __aiter__(self) -> AsyncIterator[bytes | str]:
        while not self._server.is_stopping:
            try:
                message = await self._connection.recv()
            except ConnectionClosed:
                return
            self._is_answering = True
            yield message
            self._is_answering = False
        await self._connection.close(_GOING_AWAY)

    async def send(self, message: bytes | str) -> None:
        await self._connection.send(message)

    async def close(self, code: int, reason: str = "") -> None:
        await self._connection.close(code, reason)

    async def close_if_idle(self) -> None:
        if not self._is_answering:
            await self._connection.close(_GOING_AWAY)

    async def answer(self, prepare: Callable[[], ActorRequest]) -> Any:
        """The model's answer.

        Args:
            prepare: reads and checks the request, in another thread.

        Raises:
            PeerLeftError: the client has left; a request that still waited does not run.
            DeadlineError: the time is over.
            Exception: what `prepare` or the model raised.
        """

        async def run() -> Any:
            return await self._server.queue.answer(await asyncio.to_thread(prepare))

        work = asyncio.ensure_future(run())
        left = asyncio.ensure_future(self._connection.wait_closed())
        limit = self._server.settings.deadline_s
        begin, outcome = time.monotonic(), "answered"
        try:
            await asyncio.wait({work, left}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if left.done():
                raise PeerLeftError
            raise DeadlineError(f"no answer within {limit:g} s (the server's --deadline)")
        except Exception as error:
            kinds = (kind for kind in _OUTCOMES if isinstance(error, kind))
            outcome = _OUTCOMES[next(kinds)]
            raise
        finally:
            work.cancel()
            left.cancel()
            self._server.metrics.count(_REQUESTS, f'outcome="{outcome}"')
            self._server.metrics.observe(_REQUEST_SECONDS, time.monotonic() - begin)


class WireProtocol(Protocol):
    """The messages of a kind of clients."""

    async def talk(self, peer: Peer) -> None:
        """Answer a client until it leaves. The connection is closed afterwards, with code 1000 if
        nothing else was said; an exception is a defect, and closes it with 1011."""
        ...


class Server:
    """Serves one model.

    Attributes:
        is_stopping: whether it takes no more requests.
    """

    def __init__(self, settings: ServerSettings, batching: BatchSettings):
        self.settings, self.is_stopping = settings, False
        self.metrics = Metrics(
            {
                _REQUESTS: "Requests by their outcome.",
                _REQUEST_SECONDS: "From a request to its answer, waiting included.",
                BATCH_SIZE: "Requests that ran together.",
            },
            {_REQUEST_SECONDS: _SECONDS, BATCH_SIZE: (1, 2, 4, 8, 16, 32, 64)},
        )
        self.queue = BatchQueue(batching, self.metrics)
        self._peers: set[Peer] = set()

    async def run(
        self,
        load: Callable[[], WireProtocol],
        started: Callable[[int], None] = lambda port: None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then answer what was asked, and return.

        Clients may connect while the model loads, and are answered afterwards.

        Args:
            load: loads the model and runs it once, in the model's thread.
            started: gets the port when the server listens.
            ready: called when the model is loaded.

        Raises:
            Exception: what `load` raised.
            OSError: the address is not to be had.
        """
        loop = asyncio.get_running_loop()
        self._wire: asyncio.Future[WireProtocol] = loop.create_future()
        self._stopped = asyncio.Event()
        with suppress(ValueError, RuntimeError):  # Not in the main thread.
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.ERROR)
        quiet.addFilter(_is_no_scan)
        settings = self.settings
        serving = serve(
            self._talk,
            settings.host,
            settings.port,
            process_request=self._http,
            # Browsers say where a page comes from; a page must not move the robot.
            origins=[None],
            compression=None,
            max_size=settings.max_message_bytes,
            max_queue=_MOST_AHEAD,
            ping_interval=20 if settings.keep_alive else None,
            logger=quiet,
        )
        try:
            async with serving as listening:
                started(listening.sockets[0].getsockname()[1])
                loading = loop.run_in_executor(self.queue.worker, load)
                stopped = asyncio.ensure_future(self._stopped.wait())
                try:
                    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    if loading.done():
                        self._wire.set_result(loading.result())
                        ready()
                        await stopped
                finally:
                    self._wire.cancel()  # Who still waits for a model that will not come.
                listening.close(close_connections=False)
                await asyncio.gather(*(peer.close_if_idle() for peer in self._peers))
        finally:
            self.queue.worker.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Take no more requests. Only from the event loop."""
        self.is_stopping = True
        self._stopped.set()

    def _on_signal(self, number: int) -> None:
        logger.info("%s: answering what was asked, then ending", signal.Signals(number).name)
        self.stop()
        # Once more ends at once.
        asyncio.get_running_loop().remove_signal_handler(number)

    async def _talk(self, connection: ServerConnection) -> None:
        peer = Peer(connection, self)
        self._peers.add(peer)
        try:
            wire = await asyncio.shield(self._wire)
            await wire.talk(peer)
        except asyncio.CancelledError:
            # The server ends before its model is there.
            await peer.close(_GOING_AWAY)
        except (ConnectionClosed, PeerLeftError):
            pass
        finally:
            self._peers.discard(peer)

    def _is_ready(self) -> bool:
        return self._wire.done() and not self.is_stopping

    def _http(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        """The answer to a plain HTTP request, or a refusal; None for a client."""
        path, _, query = request.path.partition("?")
        status, text = (200, "ok") if self._is_ready() else (503, "loading")
        # openpi's server has the first, with this exact path, vla-eval's the second.
        if request.path == "/healthz":
            return connection.respond(status, "OK\n" if status == 200 else f"{text}\n")
        if path == "/health":
            response = connection.respond(status, json.dumps({"status": text}) + "\n")
            return _as_type(response, "application/json")
        if not is_allowed(request.headers.get("Authorization"), self.settings.token):
            return connection.respond(401, "missing or wrong key\n")
        if request.path == "/metrics":
            gauges = {
                "paddle_vl_connections": len(self._peers),
                "paddle_vl_waiting_requests": len(self.queue),
                "paddle_vl_ready": self._is_ready(),
            }
            return _as_type(connection.respond(200, self.metrics.text(gauges)), CONTENT_TYPE)
        if path == "/config":
            status, found = configured(self.queue.settings, query)
            return connection.respond(status, json.dumps(found) + "\n")
        if "Upgrade" in request.headers and len(self._peers) >= self.settings.max_clients:
            return connection.respond(503, f"{len(self._peers)} clients are connected already\n")
        return None


def configured(settings: BatchSettings, query: str) -> tuple[int, dict[str, Any]]:
    """Change settings by a query such as `max_batch_size=4`; status and content of the answer."""
    applied: dict[str, Any] = {}
    errors = []
    for name, text in parse_qsl(query):
        if name not in _CONFIG:
            errors.append(f"unknown key: {name}")
            continue
        kind, least, most = _CONFIG[name]
        try:
            value = kind(text)
            if not least <= value <= most:
                raise ValueError(f"{text} is not from {least} to {most}")
        except ValueError as error:
            errors.append(f"bad value for {name}: {error}")
            continue
        setattr(settings, name, value)
        applied[name] = value
    if errors and not applied:
        return 422, {"errors": errors}
    found = {"applied": applied, "config": {name: getattr(settings, name) for name in _CONFIG}}
    return 200, found | ({"errors": errors} if errors else {})


def error_text(error: Exception) -> str:
    """What a client is told: the reason of a refusal. Of a defect only its kind, since the text of
    one may show folders of this machine; the log has all."""
    if isinstance(error, ValueError | DeadlineError):
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return f"{kind}: {error}"
    logger.error("the model failed", exc_info=error)
    return f"RuntimeError: the model failed ({type(error).__name__}); the server's log says where"


def _is_no_scan(record: logging.LogRecord) -> bool:
    """Leaves out what websockets 15 and 16 report of everybody who opens the port."""
    return record.msg != "opening handshake failed"


def _as_type(response: Response, content_type: str) -> Response:
    headers: Headers = response.headers
    del headers["Content-Type"]
    headers["Content-Type"] = content_type
    return response
