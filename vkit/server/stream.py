"""Server-sent events as ready bytes, and the response that sends them until the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
from litestar import Request
from litestar.background_tasks import BackgroundTask, BackgroundTasks
from litestar.datastructures.cookie import Cookie
from litestar.enums import MediaType
from litestar.response.base import ASGIResponse, Response
from litestar.types import Receive, Send

from vkit.server.problems import Problem, openai_error, problem_from

logger = logging.getLogger("vkit.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Frames = AsyncGenerator[bytes, None]

_encode = msgspec.json.encode


def data_frame(payload: Any) -> bytes:
    """A frame without a name, as completions, chat and generate send them."""
    return b"data: " + _encode(payload) + b"\n\n"


def event_frame(name: str, payload: Any) -> bytes:
    """A named frame, as responses and messages send them."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(payload) + b"\n\n"


async def ending_with_done(frames: Frames) -> Frames:
    """The frames, then [DONE]; a failure becomes an error frame before it."""
    try:
        async for frame in frames:
            yield frame
    except Exception as exc:  # the status line is already sent: the stream itself must carry the failure
        yield data_frame(openai_error(problem_from(exc)))
    finally:
        await frames.aclose()
    yield DONE


async def kept_alive(frames: Frames, interval_s: float, comment: bytes) -> Frames:
    """The frames, with `comment` after every `interval_s` seconds of silence."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield comment
                continue
            frame, pending = pending, None
            try:
                yield frame.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await frames.aclose()


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response[bytes]):
    """A reply of server-sent events. Closes the frames' generator when the client goes away."""

    def __init__(self, frames: Frames, headers: dict[str, str] | None = None) -> None:
        super().__init__(
            b"", media_type="text/event-stream", headers={**EVENT_STREAM_HEADERS, **(headers or {})}, status_code=200
        )
        self.frames = frames

    def to_asgi_response(
        self,
        app: Any,
        request: Request[Any, Any, Any],
        *,
        background: BackgroundTask | BackgroundTasks | None = None,
        cookies: Iterable[Cookie] | None = None,
        encoded_headers: Iterable[tuple[bytes, bytes]] | None = None,
        headers: dict[str, str] | None = None,
        is_head_response: bool = False,
        media_type: MediaType | str | None = None,
        status_code: int | None = None,
        type_encoders: Any = None,
    ) -> ASGIResponse:
        """The ASGI application that sends the frames."""
        return _EventStreamResponse(self.frames, {name: str(value) for name, value in self.headers.items()})


class _EventStreamResponse(ASGIResponse):
    _should_set_content_length = False

    def __init__(self, frames: Frames, headers: dict[str, str]) -> None:
        super().__init__(body=b"", media_type="text/event-stream", headers=headers, status_code=200)
        self.frames = frames

    async def send_body(self, send: Send, receive: Receive) -> None:
        # asyncio tasks, not a task group: its cancel scope would cancel again each await of the generator's clean-up.
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not pump.done():
                pump.cancel()
            outcome = (await asyncio.gather(pump, gone, return_exceptions=True))[0]
        if isinstance(outcome, Exception) and not isinstance(outcome, Problem):
            logger.error("stream failed", exc_info=outcome)

    async def _pump(self, send: Send) -> None:
        try:
            async for frame in self.frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.frames.aclose()
