"""An HTTP server with OpenAI's interface over one engine: access, limits, streams and their end.

The event loop never computes: requests are read and checked in threads, the engine has its own.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paddle_vl.serving.access import is_allowed
from paddle_vl.serving.engine import Handle
from paddle_vl.serving.metrics import CONTENT_TYPE, Metrics
from paddle_vl.serving.openai_answer import (
    FIRST_SECONDS,
    NEXT_SECONDS,
    REQUEST_SECONDS,
    SLOW_S,
    AnswerResponse,
    as_api_error,
    cancel,
    refusal,
)
from paddle_vl.serving.openai_calls import Call, ServedModel, chat_call, completion_call
from paddle_vl.serving.openai_protocol import AdapterRequest, ApiError, WeightsRequest, parsed
from paddle_vl.serving.page import page_response

Read = Callable[[ServedModel, bytes], Call]
logger = logging.getLogger(__name__)
_REQUESTS = "paddle_vl_requests_total"
_OUTCOMES = {429: "rejected", 499: "dropped", 504: "late"}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Threads that read requests; each may decode one large image.
_NUM_READERS = 2
# Bodies of the greatest size that are held at once.
_MOST_BODIES = 8
# Bodies of so many times the limit are read to their end, without being kept.
_READ_ON = 4
# Connections, most of them idle.
_MOST_CONNECTIONS = 1024


@dataclass(frozen=True)
class AppSettings:
    """Attributes:
    token: what clients must send; None for nothing.
    max_body_bytes: of a request.
    max_requests: that are read or answered at once; more are told to come back.
    deadline_s: seconds until a request without a complete answer ends.
    grace_s: seconds that answers have to end when the server does.
    """

    token: str | None = None
    max_body_bytes: int = 64 << 20
    max_requests: int = 256
    deadline_s: float = 600.0
    grace_s: float = 30.0


class OpenAIApp:
    """The ASGI application.

    Attributes:
        is_stopping: whether it takes no more requests.
    """

    def __init__(self, served: ServedModel, settings: AppSettings):
        self.served, self.settings, self.is_stopping = served, settings, False
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="reader")
        self._num_open, self._num_body_bytes, self._began = 0, 0, int(time.time())
        self.metrics = Metrics(
            {
                _REQUESTS: "Requests by their outcome.",
                REQUEST_SECONDS: "From a request to the end of its answer.",
                FIRST_SECONDS: "From a request to the first token of its answer.",
                NEXT_SECONDS: "Of an answer, from its first token on, divided by their number.",
            },
            dict.fromkeys((REQUEST_SECONDS, FIRST_SECONDS, NEXT_SECONDS), _BUCKETS),
        )
        self._page_response = page_response()
        self._starlette = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
                Route("/update_weights_from_disk", self._load_weights, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(
                (ApiError, ClientDisconnect, HTTPException, Exception), _explained
            ),
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, and note it without its content."""
        begin, status, is_post = time.monotonic(), 499, scope["method"] == "POST"
        scope["begin"] = begin
        self._num_open += is_post

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused = self._refused(scope)
            await (self._starlette if refused is None else refused)(scope, receive, noted)
        except Exception:
            # What Starlette has answered is in the log already.
            if status == 499:
                logger.exception("a request failed without an answer")
            status = 500
        finally:
            self._num_open -= is_post
        path, seconds = scope["path"], time.monotonic() - begin
        if path in ("/health", "/metrics"):
            return
        status = scope.get("ended_as", status)
        kind = "answered" if status < 400 else "refused" if status < 499 else "failed"
        self.metrics.count(_REQUESTS, f'outcome="{_OUTCOMES.get(status, kind)}"')
        tokens = scope.get("tokens", "")
        address = scope["client"][0] if scope.get("client") else "-"
        logger.info("%s %s %a %d %.3f s%s", address, scope["method"], path, status, seconds, tokens)

    def _refused(self, scope: Any) -> Response | None:
        """The refusal of who may not ask."""
        if scope["path"] in ("/health", "/"):
            return None
        headers = Headers(scope=scope)
        if _is_foreign_page(headers, self.settings.token is not None):
            reason = "pages of other servers may not ask this one; without a token its own is at "
            return refusal(ApiError(403, f"{reason}localhost or the number of its address"))
        if not is_allowed(headers.get("authorization"), self.settings.token):
            reason = "Incorrect API key provided: send the server's as a bearer token"
            return refusal(ApiError(401, reason, code="invalid_api_key"))
        return None

    async def _page(self, request: HttpRequest) -> Response:
        return self._page_response

    async def _health(self, request: HttpRequest) -> Response:
        text = "stopping" if self.is_stopping else "ok"
        return JSONResponse({"status": text}, 503 if self.is_stopping else 200)

    async def _metrics(self, request: HttpRequest) -> Response:
        stats = self.served.engine.stats().items()
        gauges = {f"paddle_vl_engine_{name}": value for name, value in stats}
        text = self.metrics.text({**gauges, "paddle_vl_open_requests": self._num_open})
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _models(self, request: HttpRequest) -> Response:
        served = self.served
        common = {"object": "model", "created": self._began, "owned_by": "paddle-vl"}
        common["max_model_len"] = served.prompts.max_length
        parents = {**dict.fromkeys(served.names), **dict.fromkeys(served.adapters, served.names[0])}
        found = [{"id": name, **common, "parent": parent} for name, parent in parents.items()]
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": found})
        served.adapter_of(name)
        return JSONResponse(next(each for each in found if each["id"] == name))

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat_call)

    async def _completion(self, request: HttpRequest) -> Response:
        return await self._answer(request, completion_call)

    async def _load_adapter(self, request: HttpRequest) -> Response:
        return await self._load(request, AdapterRequest)

    async def _load_weights(self, request: HttpRequest) -> Response:
        return await self._load(request, WeightsRequest)

    async def _load(self, request: HttpRequest, kind: Any) -> Response:
        body = bytearray()
        try:
            await self._collect(request, body)
            asked = parsed(bytes(body), kind)
            await asyncio.to_thread(self.served.load, asked)
        finally:
            self._num_body_bytes -= len(body)
        return JSONResponse({"success": True})

    async def _answer(self, request: HttpRequest, read: Read) -> AnswerResponse:
        body = bytearray()
        try:
            await self._collect(request, body)
            loop = asyncio.get_running_loop()
            submitted = loop.run_in_executor(self._readers, _submit, self.served, read, body)
            call, handles = await submitted
        finally:
            self._num_body_bytes -= len(body)
        deadline, begin = self.settings.deadline_s, request.scope["begin"]
        return AnswerResponse(call, handles, begin, deadline, self.metrics.observe)

    async def _collect(self, request: HttpRequest, body: bytearray) -> None:
        """Read a body, in its time."""
        try:
            await asyncio.wait_for(self._read(request, body), SLOW_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body took more than {SLOW_S:g} s") from None

    async def _read(self, request: HttpRequest, body: bytearray) -> None:
        """Read a body. What is refused is read on, since a client that still sends would see a
        broken connection and not the reason."""
        settings, size, refused = self.settings, 0, None
        if self.is_stopping:
            refused = ApiError(503, "the server is stopping", retry_after=10)
        elif self._num_open > settings.max_requests:
            reason = f"{settings.max_requests} requests are open already"
            refused = ApiError(429, reason, retry_after=1)
        most = settings.max_body_bytes
        async for block in request.stream():
            size += len(block)
            if size > most:
                refused = ApiError(413, f"the body has more than {most} bytes, the limit")
            elif self._num_body_bytes > _MOST_BODIES * most:
                refused = ApiError(429, "other requests are being read", retry_after=1)
            if refused is None:
                body.extend(block)
                self._num_body_bytes += len(block)
            elif size > _READ_ON * most:
                break
        if refused is not None:
            raise refused


class OpenAIServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then lets answers end; once more ends at once."""

    def __init__(self, app: OpenAIApp):
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=int(app.settings.grace_s + SLOW_S),
            )
        )
        self._app = app
        logging.getLogger("uvicorn").setLevel(logging.WARNING)

    def handle_exit(self, sig: int, frame: Any) -> None:
        logger.info("signal %d: answering what was asked, then ending", sig)
        self.force_exit, self.should_exit = self.should_exit, True

    async def shutdown(self, sockets: Any = None) -> None:
        app = self._app
        app.is_stopping = True
        closing = asyncio.ensure_future(
            asyncio.to_thread(app.served.engine.close, app.settings.grace_s)
        )
        await super().shutdown(sockets)
        if not self.force_exit:
            await closing


def _submit(served: ServedModel, read: Read, body: bytearray) -> tuple[Call, list[Handle]]:
    """Read a body and give the engine its requests, all or none; in a thread."""
    call, handles = read(served, bytes(body)), []
    try:
        for choice in call.choices:
            handles.append(served.engine.submit(choice.request))
    except Exception as error:
        cancel(handles)
        if isinstance(error, ValueError):
            raise ApiError(400, str(error)) from error
        raise as_api_error(error) from error
    return call, handles


def _explained(request: HttpRequest, error: Any) -> Response:
    """The answer to what a request raised."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        return refusal(ApiError(error.status_code, error.detail))
    return refusal(as_api_error(error))


def _is_foreign_page(headers: Headers, has_token: bool) -> bool:
    """Whether a page of another server asks, or one under a name that it has given this machine."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is None or has_token:
        return False
    name = urlsplit(f"//{host}").hostname or ""
    try:
        is_own = name == "localhost" or ipaddress.ip_address(name) is not None
    except ValueError:
        is_own = False
    return urlsplit(origin).netloc != host or not is_own
