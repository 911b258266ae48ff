"""A streaming client of any OpenAI-compatible server: completions, chat and the model list.

It knows the wire format and nothing of measuring: every event is handed on as it arrives, with the token counts the
server stated. It never infers a token count from the number of events.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from vkit.errors import RequestFailed, UsageError

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""Longest wait for the next byte of an answer. A long prefill on a slow machine is silent for minutes."""

MAX_ERROR_CHARS = 300
DONE = "[DONE]"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_API_ROOT = re.compile(r"/v\d+\w*$")


class ServerError(RequestFailed):
    """The server refused a request or broke its stream off. `status` is the HTTP status, None within a stream."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of an event stream. `event` is "message" unless the server named another."""

    data: str
    event: str = "message"


class SseParser:
    """Event-stream bytes in, events out, however the bytes are cut.

    Source: WHATWG HTML, 9.2.6 "Interpreting an event stream".
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._event = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events completed by `chunk`."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF cut in two
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._buffer = _LINE_END.split(self._buffer + chunk)
        if self._at_start and lines:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        return [event for line in lines if (event := self._take(line)) is not None]

    def finish(self) -> list[ServerSentEvent]:
        """The event left without its closing blank line, if any: some servers end `data: [DONE]` that way."""
        events = [self._take(self._buffer), self._take(b"")]
        self._buffer = b""
        return [event for event in events if event is not None]

    def _take(self, raw: bytes) -> ServerSentEvent | None:
        if not raw:
            return self._dispatch()
        name, _, value = raw.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None  # comments, id and retry carry nothing for us

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return ServerSentEvent("\n".join(data), event or "message") if data else None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server states them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of an answer. `text` joins everything the model wrote: content, reasoning, tool calls.

    `has_choices` is False for the last event, which holds the usage alone. `token_ids` is None unless the server sent
    ids.
    """

    text: str
    has_choices: bool
    token_ids: tuple[int, ...] | None = None
    usage: Usage | None = None
    finish_reason: str | None = None


class OpenAIClient:
    """Talks to the server at `url` (its root, or its `/v1`). An asynchronous context manager.

    Raises:
        UsageError: `url` is not an http or https address of a server's root.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_connections: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.api_root = api_root(url)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
        )

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def model_names(self) -> list[str]:
        """The names the server serves under, first one first.

        Raises:
            ServerError: the server is not there or has no such route.
        """
        address = f"{self.api_root}/models"
        try:
            response = await self._http.get(address)
        except httpx.HTTPError as error:
            raise ServerError(f"GET {address}: {_reason(error)}") from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(f"GET {address}", response.status_code, response.content)
        try:
            return [model.id for model in msgspec.json.decode(response.content, type=_ModelList).data]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"GET {address}: not a model list: {error}") from error

    def stream_completion(self, body: Mapping[str, object]) -> AsyncIterator[StreamEvent]:
        """The events of `POST /v1/completions` with `body`; `stream` is added. Raises as `stream`."""
        return self.stream("completions", body)

    def stream_chat(self, body: Mapping[str, object]) -> AsyncIterator[StreamEvent]:
        """The events of `POST /v1/chat/completions` with `body`; `stream` is added. Raises as `stream`."""
        return self.stream("chat/completions", body)

    async def stream(self, route: str, body: Mapping[str, object]) -> AsyncIterator[StreamEvent]:
        """The events of a streamed answer, as they arrive.

        Raises:
            ServerError: no connection, an HTTP error, an error event, or a stream that ends before its end.
        """
        request = {**body, "stream": True}
        try:
            async with self._http.stream("POST", f"{self.api_root}/{route}", json=request) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(f"POST /{route}", response.status_code, await response.aread())
                async for event in _events(response):
                    yield event
        except httpx.HTTPError as error:
            raise ServerError(f"POST /{route}: {_reason(error)}") from error


async def _events(response: httpx.Response) -> AsyncIterator[StreamEvent]:
    parser = SseParser()
    is_complete = False
    chunks = response.aiter_bytes()
    async for chunk in chunks:
        for sse in parser.feed(chunk):
            if sse.data == DONE:
                await _drain(chunks)
                return
            event = parse_event(sse)
            # Not every server says [DONE]; usage after the choices are over says as much.
            is_complete = is_complete or (event.usage is not None and not event.has_choices)
            yield event
    for sse in parser.finish():
        if sse.data == DONE:
            return
        yield parse_event(sse)
    if not is_complete:
        raise ServerError("the stream ended without [DONE]")


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read to the end of the body: a connection closed with bytes unread may look like an abort to the server."""
    with suppress(httpx.HTTPError):
        async for _ in chunks:
            pass


def parse_event(sse: ServerSentEvent) -> StreamEvent:
    """What one event of an answer says.

    Raises:
        ServerError: it is an error event, or not what the OpenAI format allows.
    """
    try:
        chunk = msgspec.json.decode(sse.data, type=_Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerError(f"the stream holds an event that is no answer ({error}): {_short(sse.data)}") from error
    if chunk.error is not None or sse.event == "error":
        raise ServerError(f"error in the stream: {_error_text(sse.data.encode())}")
    choices = chunk.choices or []
    ids = [choice.token_ids for choice in choices if choice.token_ids is not None]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    return StreamEvent(
        text="".join(_choice_text(choice) for choice in choices),
        has_choices=bool(choices),
        token_ids=tuple(token_id for part in ids for token_id in part) if ids else None,
        usage=chunk.usage,
        finish_reason=reasons[0] if reasons else None,
    )


def _choice_text(choice: _Choice) -> str:
    text = choice.text or ""
    if choice.delta is None:
        return text
    # Some servers send reasoning under both names; it is one text.
    parts = [text, choice.delta.reasoning or choice.delta.reasoning_content or "", choice.delta.content or ""]
    for call in choice.delta.tool_calls or []:
        if call.function is not None:
            parts += [call.function.name or "", call.function.arguments or ""]
    return "".join(parts)


def api_root(url: str) -> str:
    """`url` with its `/v1`: `http://host:1` and `http://host:1/v1/` both give `http://host:1/v1`.

    Raises:
        UsageError: not an http or https address, or the address of a single route.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket left open
        is_address = False
    if not is_address:
        raise UsageError(f"--url: {url!r} is not the address of a server", remedy="for example http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    if parts.query or parts.fragment or path.endswith(("/completions", "/models", "/responses")):
        raise UsageError(f"--url: {url!r} is one route of a server", remedy="give the server's root, without the route")
    root = f"{parts.scheme}://{parts.netloc}{path}"
    return root if _API_ROOT.search(path) else f"{root}/v1"


def _refusal(what: str, status: int, body: bytes) -> ServerError:
    return ServerError(f"{what}: HTTP {status}: {_error_text(body)}", status=status)


def _error_text(body: bytes) -> str:
    """The message inside an error body of any common shape, else its beginning."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _short(body.decode("utf-8", errors="replace"))
    for key in ("error", "message", "detail"):
        if isinstance(decoded, dict) and decoded.get(key) is not None:
            decoded = decoded[key]
    return _short(decoded if isinstance(decoded, str) else msgspec.json.encode(decoded).decode())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return (line[:MAX_ERROR_CHARS] + " …") if len(line) > MAX_ERROR_CHARS else (line or "no message")


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"no answer for {SILENCE_TIMEOUT_S:g} s"
    return _short(str(error)) if str(error) else type(error).__name__
