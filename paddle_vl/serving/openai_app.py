"""An HTTP server with OpenAI's interface over one engine: access, limits, streams and their end.

The event loop never computes: requests are read and checked in threads, the engine has its own.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paddle_vl.serving.access import is_allowed
from paddle_vl.serving.engine import EngineFull, Event, Handle
from paddle_vl.serving.metrics import CONTENT_TYPE, Metrics
from paddle_vl.serving.openai_calls import (
    Call,
    Choice,
    ServedModel,
    chat_call,
    completion_call,
    json_bytes,
)
from paddle_vl.serving.openai_protocol import ApiError

logger = logging.getLogger(__name__)
_REQUESTS, _SECONDS = "paddle_vl_requests_total", "paddle_vl_request_seconds"
_FIRST, _NEXT = "paddle_vl_time_to_first_token_seconds", "paddle_vl_time_per_output_token_seconds"
_OUTCOMES = {429: "rejected", 499: "dropped", 504: "late"}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Threads that read requests; each may decode one large image.
_NUM_READERS = 2
# Seconds for what a slow client may take beside the answer.
_SLOW_S = 30.0
# Bodies of the greatest size that are held at once.
_MOST_BODIES = 8
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
        self._num_calls, self._num_body_bytes, self._began = 0, 0, int(time.time())
        self.metrics = Metrics(
            {
                _REQUESTS: "Requests by their outcome.",
                _SECONDS: "From a request to the end of its answer.",
                _FIRST: "From a request to the first token of its answer.",
                _NEXT: "Of an answer, from its first token on, divided by their number.",
            },
            dict.fromkeys((_SECONDS, _FIRST, _NEXT), _BUCKETS),
        )
        self._starlette = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/v1/chat/completions", self._answering(chat_call), methods=["POST"]),
                Route("/v1/completions", self._answering(completion_call), methods=["POST"]),
            ],
            exception_handlers={
                ApiError: lambda _, error: _refusal(error),
                ClientDisconnect: lambda _, error: Response(status_code=499),
                HTTPException: lambda _, error: _refusal(ApiError(error.status_code, error.detail)),
                Exception: lambda _, error: _refusal(_as_api_error(error)),
            },
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, and note it without its content."""
        begin, status = time.monotonic(), 499

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused = self._refused(scope)
            await (self._starlette if refused is None else refused)(scope, receive, noted)
        except Exception:
            # Starlette has answered; the log has already what it is.
            status = 500
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
        if scope["path"] == "/health":
            return None
        headers = Headers(scope=scope)
        if _is_foreign_page(headers, self.settings.token is not None):
            return _refusal(ApiError(403, "pages of other servers may not ask this one"))
        if not is_allowed(headers.get("authorization"), self.settings.token):
            reason = "Incorrect API key provided: send the server's as a bearer token"
            return _refusal(ApiError(401, reason, code="invalid_api_key"))
        return None

    async def _health(self, request: HttpRequest) -> Response:
        text = "stopping" if self.is_stopping else "ok"
        return JSONResponse({"status": text}, 503 if self.is_stopping else 200)

    async def _metrics(self, request: HttpRequest) -> Response:
        stats = self.served.engine.stats().items()
        gauges = {f"paddle_vl_engine_{name}": value for name, value in stats}
        text = self.metrics.text({**gauges, "paddle_vl_open_requests": self._num_calls})
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

    def _answering(
        self, read: Callable[[ServedModel, bytes], Call]
    ) -> Callable[[HttpRequest], Coroutine[Any, Any, "_Answer"]]:
        """The endpoint of a kind of calls."""

        async def endpoint(request: HttpRequest) -> _Answer:
            begin = time.monotonic()
            if self.is_stopping:
                raise ApiError(503, "the server is stopping", retry_after=10)
            if self._num_calls >= self.settings.max_requests:
                raise ApiError(429, f"{self._num_calls} requests are open already", retry_after=1)
            self._num_calls += 1
            try:
                return _Answer(self, *await self._submitted(request, read), begin)
            except BaseException:
                self._num_calls -= 1
                raise

        return endpoint

    async def _submitted(
        self, request: HttpRequest, read: Callable[[ServedModel, bytes], Call]
    ) -> tuple[Call, list[Handle]]:
        """The call of a request, and its requests to the engine."""
        most, body = self.settings.max_body_bytes, bytearray()

        async def collect() -> None:
            async for block in request.stream():
                body.extend(block)
                self._num_body_bytes += len(block)
                if len(body) > most:
                    raise ApiError(413, f"the body has more than {most} bytes, the limit")
                if self._num_body_bytes > _MOST_BODIES * most:
                    raise ApiError(429, "other requests are being read", retry_after=1)

        try:
            await asyncio.wait_for(collect(), _SLOW_S)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, _submit, self.served, read, body)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body took more than {_SLOW_S:g} s") from None
        finally:
            self._num_body_bytes -= len(body)

    def done(self) -> None:
        """A call has ended."""
        self._num_calls -= 1


class _Answer:
    """The answer to a call, whole or as a stream; its requests to the engine end with it."""

    def __init__(self, app: OpenAIApp, call: Call, handles: list[Handle], begin: float):
        self._app, self._call, self._handles, self._begin = app, call, handles, begin
        self._end = begin + app.settings.deadline_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if not self._call.request.stream:
                response = await _while_connected(receive, self._whole())
                await response(scope, receive, send)
                return
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            async with aclosing(self._stream(scope)) as events:
                stream = StreamingResponse(events, 200, headers, "text/event-stream")
                # Who does not read must not hold the server.
                most = self._end + _SLOW_S - self._begin
                await asyncio.wait_for(stream(scope, receive, send), most)
            if any(choice.finish_reason is None for choice in self._call.choices):
                scope.setdefault("ended_as", 499)
        finally:
            _cancel(self._handles)
            self._app.done()
            usage = self._call.usage
            scope["tokens"] = f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
            self._app.metrics.observe(_SECONDS, time.monotonic() - self._begin)

    async def _whole(self) -> Response:
        try:
            async for _ in self._pieces():
                pass
        except ApiError as error:
            return _refusal(error)
        return Response(json_bytes(self._call.whole()), media_type="application/json")

    async def _stream(self, scope: Any) -> AsyncIterator[bytes]:
        """Server-sent events; what fails within is one of them, before the end."""
        try:
            for chunk in self._call.first_chunks():
                yield _event(chunk)
            async with aclosing(self._pieces()) as pieces:
                async for chunk in pieces:
                    if chunk is not None:
                        yield _event(chunk)
            if self._call.request.stream_options.include_usage:
                yield _event(self._call.usage_chunk())
        except ApiError as error:
            scope["ended_as"] = error.status
            yield _event(error.content())
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[dict[str, Any] | None]:
        """The chunks of what comes for any choice, until all have ended.

        Raises:
            ApiError: the time is over, the server ends, or the model failed.
        """
        came: asyncio.Queue[tuple[Choice, Event | Exception]] = asyncio.Queue()

        async def pump(choice: Choice, handle: Handle) -> None:
            try:
                async for event in handle:
                    came.put_nowait((choice, event))
            except Exception as error:
                came.put_nowait((choice, error))

        pairs = [*zip(self._call.choices, self._handles, strict=True)]
        pumps = [asyncio.ensure_future(pump(choice, handle)) for choice, handle in pairs]
        first = None
        try:
            while any(choice.finish_reason is None for choice in self._call.choices):
                left = self._end - time.monotonic()
                choice, event = await asyncio.wait_for(came.get(), left)
                if choice.finish_reason is not None:
                    continue  # It has ended by a text of `stop`.
                if isinstance(event, Exception):
                    raise event
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server is stopping", retry_after=10)
                if first is None:
                    first = time.monotonic()
                    self._app.metrics.observe(_FIRST, first - self._begin)
                chunk = self._call.take(choice, event)
                if choice.finish_reason is not None:
                    self._handles[choice.index].cancel()
                yield chunk
        except Exception as error:
            if isinstance(error, asyncio.TimeoutError):
                seconds = self._app.settings.deadline_s
                raise ApiError(504, f"no complete answer within {seconds:g} s") from None
            raise _as_api_error(error) from error
        finally:
            for each in pumps:
                each.cancel()
        num_more = self._call.usage["completion_tokens"] - 1
        if first is not None and num_more:
            self._app.metrics.observe(_NEXT, (time.monotonic() - first) / num_more)


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
                timeout_graceful_shutdown=int(app.settings.grace_s + _SLOW_S),
            )
        )
        self._app = app

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


def _submit(
    served: ServedModel, read: Callable[[ServedModel, bytes], Call], body: bytearray
) -> tuple[Call, list[Handle]]:
    """Read a body and give the engine its requests, all or none; in a thread."""
    call, handles = read(served, bytes(body)), []
    try:
        for choice in call.choices:
            handles.append(served.engine.submit(choice.request))
    except Exception as error:
        _cancel(handles)
        raise _as_api_error(error) from error
    return call, handles


def _cancel(handles: list[Handle]) -> None:
    for handle in handles:
        handle.cancel()


async def _while_connected(receive: Any, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of some work.

    Raises:
        ClientDisconnect: the client has left before.
    """

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        for each in (running, leaving):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


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


def _as_api_error(error: Exception) -> ApiError:
    """What a client is told; of a defect nothing, since its text may show folders."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(429, str(error), retry_after=error.retry_after)
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the model failed; the server's log says where")


def _refusal(error: ApiError) -> Response:
    headers = {"connection": "close"} if error.status in (408, 413) else {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(error.content(), error.status, headers)


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
