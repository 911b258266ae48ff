"""One response from request to final object: a task of its own whose events are kept, followed and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from vkit.errors import RequestFailed
from vkit.server.call import Call
from vkit.server.inference import Choice, Run
from vkit.server.openai.chat.reply import ReplyWriter
from vkit.server.openai.chat.request import Prepared
from vkit.server.openai.completions import log_outputs
from vkit.server.openai.responses.events import OutputBuilder, replayed
from vkit.server.openai.responses.schemas import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from vkit.server.openai.shared import now
from vkit.server.parsing import ContentDelta, ReasoningDelta, ReplyEvent, ReplyParser, ToolCallDelta
from vkit.server.problems import problem_from
from vkit.server.schema import Json
from vkit.server.stream import event_frame
from vkit.types import FinishReason, PositionLogprobs

CANCEL_GRACE_S = 5.0
"""How long a cancelled request may take to give its last output."""

TERMINAL = ("completed", "incomplete", "failed", "cancelled")


class ResponseJob:
    """A response being made, or made."""

    def __init__(
        self,
        call: Call,
        response: ResponseObject,
        prepared: Prepared,
        input_items: list[Json],
        *,
        streams: bool,
        custom_names: frozenset[str],
        namespaces: Mapping[str, tuple[str, str]],
        with_messages: bool,
    ) -> None:
        self.call = call
        self.response = response
        self.prepared = prepared
        self.input_items = input_items
        """The whole input, that of earlier responses included; instructions are not part of it."""
        self.streams = streams
        self.is_cancelled = False
        self.failure: BaseException | None = None
        self.task: asyncio.Task[None] | None = None
        self._with_messages = with_messages
        self._events: list[bytes] | None = [] if streams else None
        self._news = asyncio.Event()
        self._builder = OutputBuilder(response.output, self._emit, custom_names=custom_names, namespaces=namespaces)
        self._writer = ReplyWriter(call, prepared)
        self.run = Run(
            call.state,
            response.id,
            [prepared.prompt],
            priority=prepared.priority,
            cache_salt=prepared.body.cache_salt,
        )

    @property
    def is_done(self) -> bool:
        """Whether the response has reached its final state."""
        return self.response.status in TERMINAL

    def start(self) -> None:
        """Begin; the work outlives the request that asked for it."""
        self.task = self.call.state.spawn(self._work())

    async def _work(self) -> None:
        response = self.response
        if self.streams:
            self._emit_response("response.created")
            if response.background:
                self._emit_response("response.queued")
        response.status = "in_progress"
        if self.streams:
            self._emit_response("response.in_progress")
        try:
            choice, num_reasoning = await (self._streamed() if self.streams else self._whole())
        except asyncio.CancelledError:
            self._builder.close("incomplete")
            self._end("cancelled", None)
            raise
        except Exception as exc:  # kept for whoever waits; a stream and the store carry it as a failed response
            self.failure = None if isinstance(exc, RequestFailed) else exc
            self._builder.close("incomplete")
            response.error = ResponseError("server_error", problem_from(exc).message)
            self._end("failed", None)
            return
        log_outputs(self.call, [choice.text])
        self._conclude(choice, num_reasoning)

    def _conclude(self, choice: Choice, num_reasoning: int) -> None:
        response = self.response
        status = "completed"
        if choice.finish_reason is FinishReason.LENGTH:
            status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        elif choice.finish_reason is FinishReason.ABORT:
            status = "cancelled" if self.is_cancelled else "failed"
        elif choice.finish_reason is FinishReason.ERROR:
            status = "failed"
        if status == "failed":
            response.error = ResponseError("server_error", f"generation ended with {choice.finish_reason}")
        self._builder.finish("completed" if status == "completed" else "incomplete")
        if self._with_messages:
            response.output_messages = [
                {"type": "raw_message_tokens", "message": choice.text, "tokens": choice.token_ids}
            ]
        self._end(status, self._usage(num_reasoning))

    def _end(self, status: str, usage: ResponseUsage | None) -> None:
        response = self.response
        response.status = status
        response.usage = usage
        if status == "completed":
            response.completed_at = now()
        if self.streams:
            event = {"completed": "completed", "failed": "failed"}.get(status, "incomplete")
            self._emit_response(f"response.{event}")
        self._announce()

    def forget_events(self) -> None:
        """Free the events of a response that nobody may replay."""
        self._events = None

    async def _whole(self) -> tuple[Choice, int]:
        choice = (await self.run.whole())[0][0]
        parser = self._parser()
        was_cut = choice.finish_reason is FinishReason.LENGTH
        parsed = parser.parse(choice.text, choice.token_ids, was_cut=was_cut)
        if parsed.reasoning and self._writer.shows_reasoning:
            self._builder.add(ReasoningDelta(parsed.reasoning), [])
        if parsed.content:
            logprobs = self._logprobs((choice.logprobs or [])[parsed.num_reasoning_tokens :])
            self._builder.add(ContentDelta(parsed.content), logprobs)
        calls = parsed.tool_calls if self.prepared.tool_use.parallel else parsed.tool_calls[:1]
        for index, item in enumerate(calls):
            self._builder.add(ToolCallDelta(index, item.arguments, item.id, item.name), [])
        return choice, parsed.num_reasoning_tokens

    async def _streamed(self) -> tuple[Choice, int]:
        parser = self._parser()
        choice = Choice()
        pending: list[PositionLogprobs] = []
        num_hidden = 0
        deltas = self.run.deltas(self.prepared.body.stream_interval or 1)
        try:
            async for delta in deltas:
                choice.text += delta.text
                choice.token_ids += delta.token_ids
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                pending += delta.logprobs or []
                events = parser.push(delta.text, delta.token_ids)
                if delta.finish_reason is not None:
                    was_cut = delta.finish_reason is FinishReason.LENGTH
                    events = [*events, *parser.finish(was_cut=was_cut)]
                del pending[: parser.num_reasoning_tokens - num_hidden]
                num_hidden = parser.num_reasoning_tokens
                for event in events:
                    self._take(event, pending)
        finally:
            await deltas.aclose()
        return choice, parser.num_reasoning_tokens

    def _take(self, event: ReplyEvent, pending: list[PositionLogprobs]) -> None:
        if isinstance(event, ReasoningDelta) and not self._writer.shows_reasoning:
            return
        if isinstance(event, ToolCallDelta) and event.index > 0 and not self.prepared.tool_use.parallel:
            return
        logprobs: list[Any] = []
        if isinstance(event, ContentDelta):
            logprobs = self._logprobs(pending)
            pending.clear()
        self._builder.add(event, logprobs)

    def _parser(self) -> ReplyParser:
        return self.call.state.parsers.open(self.prepared.context)

    def _logprobs(self, positions: list[PositionLogprobs]) -> list[Any]:
        found = self._writer.logprobs(positions)
        return [] if found is None else list(msgspec.to_builtins(found.content or []))

    def _usage(self, num_reasoning: int) -> ResponseUsage:
        run = self.run
        return ResponseUsage(
            run.num_prompt_tokens,
            InputTokensDetails(run.num_cached_tokens),
            run.num_completion_tokens,
            OutputTokensDetails(num_reasoning),
            run.num_prompt_tokens + run.num_completion_tokens,
        )

    # Events

    def _emit_response(self, name: str) -> None:
        self._emit(name, {"response": self.response})

    def _emit(self, name: str, payload: Json) -> None:
        if self._events is None:
            return
        self._events.append(event_frame(name, {"type": name, "sequence_number": len(self._events), **payload}))
        self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events after number `after`, then those to come, until the last."""
        position = after + 1
        while True:
            events = self._events if self._events is not None else self._synthesized()
            while position < len(events):
                yield events[position]
                position += 1
            if self.is_done:
                return
            await self._news.wait()

    def _synthesized(self) -> list[bytes]:
        """A complete sequence for a response that recorded none."""
        frames: list[bytes] = []

        def emit(name: str, payload: Json) -> None:
            frames.append(event_frame(name, {"type": name, "sequence_number": len(frames), **payload}))

        fresh = msgspec.structs.replace(
            self.response, status="in_progress", output=[], usage=None, completed_at=None, error=None
        )
        emit("response.created", {"response": fresh})
        emit("response.in_progress", {"response": fresh})
        if self.is_done:
            replayed(self.response.output, emit)
            event = {"completed": "completed", "failed": "failed"}.get(self.response.status, "incomplete")
            emit(f"response.{event}", {"response": self.response})
        return frames

    async def wait(self) -> None:
        """Returns when the response is final."""
        assert self.task is not None
        await asyncio.shield(self.task)

    async def cancel(self) -> None:
        """Stop the work; what was made so far is kept."""
        if self.is_done or self.task is None:
            return
        self.is_cancelled = True
        engine_ids = list(self.call.state.running.get(self.response.id, ()))
        for engine_id in engine_ids:
            await self.call.state.cancel_in_engine(engine_id)
        done, _ = await asyncio.wait({self.task}, timeout=CANCEL_GRACE_S if engine_ids else 0)
        if not done:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
