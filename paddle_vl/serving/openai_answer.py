"""The answer to a call on its way to the client: whole, or as a stream of server-sent events."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from paddle_vl.serving.engine import EngineFull, Event, Handle
from paddle_vl.serving.openai_calls import Call, Choice, json_bytes
from paddle_vl.serving.openai_protocol import ApiError

logger = logging.getLogger(__name__)
# Seconds for what a slow client may take beside the answer.
SLOW_S = 30.0
# Seconds after which a stream says that it lives.
_QUIET_S = 10.0
# Names of histograms.
REQUEST_SECONDS = "paddle_vl_request_seconds"
FIRST_SECONDS = "paddle_vl_time_to_first_token_seconds"
NEXT_SECONDS = "paddle_vl_time_per_output_token_seconds"


class AnswerResponse(Response):
    """A response; the requests to the engine end with it.

    Args:
        handles: of the call's choices.
        begin: of the request, in seconds of `time.monotonic`.
        seconds: until it ends without being complete.
        observe: takes the name of a histogram and a value.
    """

    def __init__(
        self,
        call: Call,
        handles: Sequence[Handle],
        begin: float,
        seconds: float,
        observe: Callable[[str, float], None],
    ):
        self._call, self._handles, self._observe = call, handles, observe
        self._begin, self._seconds = begin, seconds

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
                most = self._seconds + SLOW_S
                await asyncio.wait_for(stream(scope, receive, send), most)
            if any(choice.finish_reason is None for choice in self._call.choices):
                scope.setdefault("ended_as", 499)
        finally:
            cancel(self._handles)
            usage = self._call.usage
            scope["tokens"] = f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
            self._observe(REQUEST_SECONDS, time.monotonic() - self._begin)

    async def _whole(self) -> Response:
        try:
            async for _ in self._pieces():
                pass
        except ApiError as error:
            return refusal(error)
        return Response(json_bytes(self._call.whole()), media_type="application/json")

    async def _stream(self, scope: Any) -> AsyncGenerator[bytes, None]:
        """Server-sent events; what fails within is one of them, before the end."""
        try:
            for chunk in self._call.first_chunks():
                yield _event(chunk)
            async with aclosing(self._pieces()) as pieces:
                async for chunk in pieces:
                    # A comment, so that neither the client nor a proxy takes it for dead.
                    yield b": waiting\n\n" if chunk is None else _event(chunk)
            if self._call.request.stream_options.include_usage:
                yield _event(self._call.usage_chunk())
        except ApiError as error:
            scope["ended_as"] = error.status
            yield _event(error.content())
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """The chunks of what comes for any choice, until all have ended; None shows nothing.

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
                left = self._begin + self._seconds - time.monotonic()
                try:
                    choice, event = await asyncio.wait_for(came.get(), min(left, _QUIET_S))
                except asyncio.TimeoutError:
                    if left <= _QUIET_S:
                        raise
                    yield None
                    continue
                if choice.finish_reason is not None:
                    continue  # It has ended by a text of `stop`.
                if isinstance(event, Exception):
                    raise event
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server is stopping", retry_after=10)
                if first is None:
                    first = time.monotonic()
                    self._observe(FIRST_SECONDS, first - self._begin)
                chunk = self._call.take(choice, event)
                if choice.finish_reason is not None:
                    self._handles[choice.index].cancel()
                yield chunk
        except Exception as error:
            if isinstance(error, asyncio.TimeoutError):
                raise ApiError(504, f"no complete answer within {self._seconds:g} s") from None
            raise as_api_error(error) from error
        finally:
            for each in pumps:
                each.cancel()
        num_more = self._call.usage["completion_tokens"] - 1
        if first is not None and num_more:
            self._observe(NEXT_SECONDS, (time.monotonic() - first) / num_more)


def cancel(handles: Sequence[Handle]) -> None:
    """End requests to the engine."""
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


def as_api_error(error: Exception) -> ApiError:
    """What a client is told; of a defect nothing, since its text may show folders."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(429, str(error), retry_after=error.retry_after)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the model failed; the server's log says where")


def refusal(error: ApiError) -> Response:
    headers = {"connection": "close"} if error.status in (408, 413) else {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(error.content(), error.status, headers)


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
