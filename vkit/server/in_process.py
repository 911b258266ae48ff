"""Chat without HTTP: the chat route's own code, asked with plain objects inside the caller's process.

Opens no socket and starts no server; a reply is what POST /v1/chat/completions would have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from vkit.errors import EngineDeadError, InvalidRequest, RequestFailed, VkitError
from vkit.server.bodies import decode_body
from vkit.server.call import Body, Call, Exchange, new_id
from vkit.server.engine_protocol import Engine
from vkit.server.openai.chat.routes import chat_completions
from vkit.server.parsing import ReplyParsers
from vkit.server.problems import Problem, bad_request
from vkit.server.settings import ServerSettings
from vkit.server.state import ServerState
from vkit.server.stream import EventStream, Frames

T = TypeVar("T")


class InProcessChat:
    """Answers chat requests that are mappings, over an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        parsers: ReplyParsers,
        *,
        served_model_names: Sequence[str],
        max_logprobs: int,
        scheduling_policy: str,
        enable_lora: bool = False,
    ) -> None:
        settings = ServerSettings(
            served_model_names=tuple(served_model_names),
            model_argument=served_model_names[0],
            max_logprobs=max_logprobs,
            scheduling_policy=scheduling_policy,
            enable_lora=enable_lora,
        )
        self._state = ServerState(settings, max_model_len=engine.max_model_len)
        self._state.parsers = parsers
        self._state.attach(engine)

    async def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The whole reply.

        Raises:
            InvalidRequest: the request cannot be served; names the field.
            RequestFailed: it failed on its own.
            EngineDeadError: the engine stopped.
        """
        _check_mapping(request)
        if request.get("stream"):
            raise InvalidRequest("stream: a whole reply is no stream", param="stream", remedy="use chat_stream")
        call = _InProcessCall(self._state, request)
        try:
            response = await chat_completions(call)
        except Problem as problem:
            raise _error(problem) from None
        return cast("dict[str, Any]", msgspec.json.decode(response.content))

    async def chunks(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The reply's chunks as they come; closing the iterator early aborts the request.

        Raises:
            InvalidRequest: the request cannot be served; names the field.
            RequestFailed: it failed on its own.
            EngineDeadError: the engine stopped.
        """
        _check_mapping(request)
        call = _InProcessCall(self._state, {**request, "stream": True})
        try:
            await chat_completions(call)
            frames = call.frames
            try:
                async for frame in frames:
                    yield msgspec.json.decode(frame.removeprefix(b"data: "))
            finally:
                await frames.aclose()
        except Problem as problem:
            raise _error(problem) from None


class _InProcessCall(Call):
    """A request that came by a function call: no headers, nobody who could hang up."""

    def __init__(self, state: ServerState, request: Mapping[str, Any]) -> None:
        self.state = state
        self.exchange = Exchange(new_id(), has_given_id=False)
        self.ignored = self.exchange.ignored
        self.frames: Frames
        self._asked = request

    def header(self, name: str) -> str | None:
        """There are none."""
        return None

    async def body(self, shape: type[Body], *, reject_unknown: bool = False) -> Body:
        """The request, typed. Unknown fields are refused: nothing else could tell the caller of them.

        Raises:
            Problem: 400.
        """
        try:
            raw = msgspec.json.encode(self._asked)
        except (TypeError, ValueError, UnicodeEncodeError) as error:
            raise bad_request(f"request: not JSON: {error}", "request") from None
        body, unknown = decode_body(raw, shape)
        if unknown:
            raise bad_request(f"{unknown[0]}: unknown field", unknown[0])
        given = getattr(body, "request_id", None)
        if isinstance(given, str) and given:
            self.exchange.request_id = given
        return body

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends with the caller's task."""
        return await work

    async def events(
        self,
        frames: Frames,
        ending: Callable[[Frames], Frames],
        *,
        wait_for_first: bool = True,
        comment: bytes = b"",
    ) -> EventStream:
        """Keeps the bare frames: failures are raised, and the end of the iterator is the end."""
        self.frames = frames
        return EventStream(_none(), {})


async def _none() -> Frames:
    """No frames."""
    await asyncio.sleep(0)
    return
    yield b""


def _check_mapping(request: object) -> None:
    if not isinstance(request, Mapping):
        raise InvalidRequest(f"request: expected a mapping, got {type(request).__name__}", param="request")


def _error(problem: Problem) -> VkitError:
    if problem.status < 500:
        return InvalidRequest(problem.message, param=problem.param)
    return EngineDeadError(problem.message) if problem.status == 503 else RequestFailed(problem.message)
