"""One HTTP request as a route sees it: typed body, identity, ignored fields, and replies."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
from litestar import Request
from litestar.response.base import Response

from vkit.server.bodies import check_content_type, decode_body
from vkit.server.forms import Form, decode_form
from vkit.server.problems import Problem, bad_request, clip
from vkit.server.settings import ServerSettings
from vkit.server.state import ServerState
from vkit.server.stream import KEEP_ALIVE, EventStream, Frames, disconnected, kept_alive

if TYPE_CHECKING:
    from vkit.server.routes import Route

logger = logging.getLogger("vkit.server")

IGNORED_HEADER = "x-vkit-ignored-fields"
MAX_IGNORED_HEADER_LEN = 4096
MAX_LABEL_LEN = 128
NO_EFFECT_HEADERS = ("x-data-parallel-rank",)

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(slots=True)
class Exchange:
    """What the envelope around the routes and the route itself tell each other about one request."""

    request_id: str
    """Echoed in the X-Request-Id header."""
    has_given_id: bool
    """Whether the client chose it in a header."""
    route: Route | None = None
    body_bytes: int = 0
    is_counted: bool = False
    """Whether it adds to the server's load."""
    ignored: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    """Who the client says it is, for the log: user, session, trace."""


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


class Call:
    """One request to one route."""

    def __init__(self, request: Request[Any, Any, Any], state: ServerState, exchange: Exchange) -> None:
        self.request = request
        self.state = state
        self.exchange = exchange
        self.ignored = exchange.ignored
        for name in NO_EFFECT_HEADERS:
            if name in request.headers:
                self.ignored.append(f"header:{name}")

    @property
    def settings(self) -> ServerSettings:
        """The server's settings."""
        return self.state.settings

    @property
    def rid(self) -> str:
        """The identity of this request, without an endpoint's prefix."""
        return self.exchange.request_id

    def header(self, name: str) -> str | None:
        """A request header."""
        return self.request.headers.get(name)

    def query(self, name: str) -> str | None:
        """A query parameter; the last one if repeated."""
        values = self.request.query_params.getall(name, [])
        return values[-1] if values else None

    def query_bool(self, name: str) -> bool:
        """A query parameter that is true or false; absent is false.

        Raises:
            Problem: 400 for anything else.
        """
        value = (self.query(name) or "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise bad_request(f"{name}: expected true or false, got {value[:50]!r}", name)
        return value in ("true", "1")

    async def body(self, shape: type[Body], *, reject_unknown: bool = False) -> Body:
        """The JSON body, typed; notes unknown fields.

        Raises:
            Problem: 400 or 413.
        """
        check_content_type(self.header("content-type"))
        raw = await self._read_body()
        body, unknown = decode_body(raw, shape)
        if unknown and (reject_unknown or self.settings.reject_unknown_fields):
            raise bad_request(f"{unknown[0]}: unknown field", unknown[0])
        for name in unknown:
            if self.state.first_sighting(name):
                logger.info("unknown request field %r is ignored", name[:100])
        self.ignored.extend(unknown)
        given = getattr(body, "request_id", None)
        if isinstance(given, str) and given and not self.exchange.has_given_id:
            self.exchange.request_id = given
        self._note_labels(body)
        return body

    async def form(self, *, known: Sequence[str], without_effect: Sequence[str] = ()) -> Form:
        """The multipart body; notes unknown fields, and known ones `without_effect` here.

        Raises:
            Problem: 400 or 413.
        """
        form = decode_form(self.header("content-type"), await self._read_body())
        names = [name.removesuffix("[]") for name in dict.fromkeys(form.names())]
        unknown = [name for name in names if name not in known]
        if unknown and self.settings.reject_unknown_fields:
            raise bad_request(f"{clip(unknown[0])}: unknown field", clip(unknown[0]))
        for name in unknown:
            if self.state.first_sighting(name):
                logger.info("unknown request field %r is ignored", name[:100])
        self.ignored.extend(name for name in names if name in without_effect or name in unknown)
        return form

    def _note_labels(self, body: msgspec.Struct) -> None:
        session = getattr(body, "session_id", None) or self.header("x-session-id")
        for name, value in (
            ("user", getattr(body, "user", None)),
            ("session", session),
            ("traceparent", self.header("traceparent")),
        ):
            if value:
                self.exchange.labels[name] = value[:MAX_LABEL_LEN]

    async def _read_body(self) -> bytes:
        limit = self.settings.max_request_body_size
        too_large = Problem(413, f"The request body is above {limit} bytes.", headers={"connection": "close"})
        declared = self.header("content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = bytes(message["body"]) if message["type"] == "http.request" else b""
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
            if message["type"] != "http.request" or not message["more_body"]:
                break
        self.exchange.body_bytes = size
        return b"".join(chunks)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; cancels it when the client goes away.

        The framework runs an ordinary handler to its end whatever the client does, so this watches for it.

        Raises:
            ClientGone: the client closed the connection first.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(disconnected(self.request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        return task.result()

    def headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Reply headers: what was ignored, and `extra`."""
        headers = dict(extra or {})
        ignored = ignored_header(self.ignored)
        if ignored:
            headers[IGNORED_HEADER] = ignored
        return headers

    def json(self, payload: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response[bytes]:
        """A JSON reply."""
        return Response(
            msgspec.json.encode(payload),
            status_code=status,
            media_type="application/json",
            headers=self.headers(headers),
        )

    async def events(
        self,
        frames: Frames,
        ending: Callable[[Frames], Frames],
        *,
        wait_for_first: bool = True,
        comment: bytes = KEEP_ALIVE,
    ) -> EventStream:
        """A stream of events; `ending` adds its last frames and turns failures into frames.

        With `wait_for_first`, a failure before the first frame keeps its own status.
        """
        interval = self.settings.sse_keep_alive_interval
        if not interval:
            if wait_for_first:
                frames = await self.while_connected(_primed(frames))
            return EventStream(ending(frames), self.headers())
        first: asyncio.Future[bytes] | None = None
        if wait_for_first:
            first = asyncio.ensure_future(anext(frames))
            try:
                await self.while_connected(_settled(first, interval))
            except BaseException:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await frames.aclose()
                raise
        return EventStream(kept_alive(ending(_started(first, frames)), interval, comment), self.headers())


async def _settled(first: asyncio.Future[bytes], seconds: float) -> None:
    """Wait for the first frame, but not for ever; raises what it raised."""
    done, _ = await asyncio.wait({first}, timeout=seconds)
    if done and not isinstance(first.exception(), StopAsyncIteration):
        first.result()


async def _started(first: asyncio.Future[bytes] | None, frames: Frames) -> Frames:
    """The frames, the first of which was already asked for."""
    try:
        if first is not None:
            try:
                yield await first
            except StopAsyncIteration:
                return
        async for frame in frames:
            yield frame
    finally:
        if first is not None and not first.done():
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await frames.aclose()


async def _primed(frames: Frames) -> Frames:
    """The same frames, with the first already computed."""
    try:
        first = await anext(frames)
    except StopAsyncIteration:
        return frames
    except BaseException:
        await frames.aclose()
        raise
    return _resumed(first, frames)


async def _resumed(first: bytes, frames: Frames) -> Frames:
    try:
        yield first
        async for frame in frames:
            yield frame
    finally:
        await frames.aclose()


def ignored_header(names: list[str]) -> str:
    """Field names as one header value, each once, made of plain characters."""
    text = ",".join(quote(name, safe=" .:[]") for name in dict.fromkeys(names))
    return text if len(text) <= MAX_IGNORED_HEADER_LEN else text[: MAX_IGNORED_HEADER_LEN - 3] + "..."


def new_id() -> str:
    """32 random hex digits."""
    return uuid.uuid4().hex


Handler = Callable[[Call], Awaitable[Response[Any]]]
