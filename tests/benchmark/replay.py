"""A server that replays scripted answers: the judge of the load generator, since every time and count in it is known.

Plain sockets on the running event loop, so that a loop with a virtual clock moves server and client together. An answer
is a list of steps; a script chooses the answer to each request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Wait:
    """Seconds until the next step."""

    seconds: float


@dataclass(frozen=True)
class Raw:
    """Bytes of the body, as they are."""

    data: bytes


@dataclass(frozen=True)
class Hang:
    """Close the connection in the middle of the answer."""


Step = Wait | Raw | Hang


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. `delay_s` passes before the status line."""

    steps: Sequence[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    delay_s: float = 0.0


def event(payload: Body | str) -> Raw:
    """One server-sent event."""
    return Raw(f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode())


def text_chunk(text: str, **extra: Any) -> Raw:
    """A completion chunk with text."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **extra.pop("choice", {})}
    return event({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], **extra})


def chat_chunk(delta: Body, **extra: Any) -> Raw:
    """A chat chunk with a delta."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **extra})


def usage(prompt_tokens: int, completion_tokens: int) -> Body:
    """A usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def last_chunk(prompt_tokens: int, completion_tokens: int) -> Raw:
    """The chunk without choices that holds the usage."""
    return event(
        {"id": "1", "object": "text_completion", "choices": [], "usage": usage(prompt_tokens, completion_tokens)}
    )


DONE = event("[DONE]")


def answer(
    pieces: Iterable[tuple[float, str]], prompt_tokens: int, completion_tokens: int, *, delay_s: float = 0.0
) -> Answer:
    """A completion: for each piece a wait and a text, then usage and the end."""
    steps: list[Step] = []
    for seconds, text in pieces:
        steps += [Wait(seconds), text_chunk(text)]
    return Answer([*steps, last_chunk(prompt_tokens, completion_tokens), DONE], delay_s=delay_s)


def error_answer(status: int, message: str) -> Answer:
    """An error in the OpenAI shape."""
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})
    return Answer([Raw(body.encode())], status=status, content_type="application/json")


@dataclass
class Seen:
    """A request as the server got it. `time_s` is on the loop's clock."""

    method: str
    path: str
    headers: dict[str, str]
    body: Body
    time_s: float


Script = Callable[[Seen], Answer]


@dataclass
class ReplayServer:
    """Answers by `script`; an asynchronous context manager. Keeps what it saw in `seen`, generation requests only."""

    script: Script
    models: Sequence[str] = ("replay",)
    seen: list[Seen] = field(default_factory=list)
    num_connections: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> ReplayServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        port: int = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while request := await self._read(reader):
                await self._reply(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError, _Closed):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        return Seen(method, path, headers, json.loads(raw) if raw else {}, asyncio.get_running_loop().time())

    async def _reply(self, request: Seen, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            listing = json.dumps({"object": "list", "data": [{"id": name} for name in self.models]})
            reply = Answer([Raw(listing.encode())], content_type="application/json")
        else:
            self.seen.append(request)
            reply = self.script(request)
        await asyncio.sleep(reply.delay_s)
        writer.write(
            f"HTTP/1.1 {reply.status} X\r\ncontent-type: {reply.content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        for step in reply.steps:
            match step:
                case Wait(seconds):
                    await writer.drain()
                    await asyncio.sleep(seconds)
                case Raw(data):
                    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                case Hang():
                    await writer.drain()
                    raise _Closed
        writer.write(b"0\r\n\r\n")
        await writer.drain()


class _Closed(Exception):
    """The script asked to close."""


def counting(make: Callable[[Seen, int], Answer]) -> Script:
    """Answers by `make(request, tokens of its prompt)`: a token for each word and one for the beginning."""

    def script(request: Seen) -> Answer:
        prompt = request.body.get("prompt")
        if prompt is None:
            prompt = request.body["messages"][0]["content"]
        return make(request, len(prompt) if isinstance(prompt, list) else len(prompt.split()) + 1)

    return script
