"""Choices as chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from vkit.server.call import Call
from vkit.server.inference import Delta, Run
from vkit.server.openai.chat.reply import ReplyWriter
from vkit.server.openai.chat.request import Prepared
from vkit.server.openai.completions import log_outputs
from vkit.server.openai.logprobs import prompt_logprobs
from vkit.server.openai.schemas import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
)
from vkit.server.openai.shared import (
    now,
    timings_of,
    usage_of,
    wants_usage,
)
from vkit.server.parsing import ReplyEvent, ReplyParser
from vkit.server.schema import UNSET, Unset, Usage
from vkit.server.stream import data_frame
from vkit.types import FinishReason, PositionLogprobs


@dataclass(slots=True)
class _OpenChoice:
    """A choice while it is streamed."""

    parser: ReplyParser
    token_ids: list[int] = field(default_factory=list)
    """Not yet part of a chunk."""
    positions: list[PositionLogprobs] = field(default_factory=list)
    """Not yet part of a chunk."""
    text: list[str] = field(default_factory=list)
    num_hidden: int = 0

    def drop_hidden(self) -> None:
        """Hidden reasoning takes its tokens and log-probabilities with it."""
        num_new = self.parser.num_reasoning_tokens - self.num_hidden
        del self.token_ids[:num_new]
        del self.positions[:num_new]
        self.num_hidden += num_new


class _ChatStream:
    """One stream: choices opened at their first token, deltas from the parsers, usage at the end."""

    def __init__(self, call: Call, prepared: Prepared, run: Run) -> None:
        self.call = call
        self.prepared = prepared
        self.run = run
        self.writer = ReplyWriter(call, prepared)
        self.created = now()
        self.with_usage, self.always_usage = wants_usage(call, prepared.body)
        self.choices: dict[int, _OpenChoice] = {}

    def usage(self, num_completion: int, parsers: list[ReplyParser]) -> Usage:
        """Token counts so far."""
        parses = self.call.state.parsers.parses_reasoning
        return usage_of(
            self.call,
            self.prepared.body,
            self.run.num_prompt_tokens,
            num_completion,
            self.run.num_cached_tokens,
            sum(parser.num_reasoning_tokens for parser in parsers) if parses else None,
        )

    def chunk(self, choices: list[ChatChunkChoice], *, is_last: bool = False) -> ChatChunk:
        """One frame's payload."""
        chunk = ChatChunk(
            id=f"chatcmpl-{self.call.rid}", created=self.created, model=self.prepared.model, choices=choices
        )
        if is_last:
            chunk.system_fingerprint = self.call.state.system_fingerprint
        if self.always_usage and choices:
            index = choices[0].index
            chunk.usage = self.usage(self.run.num_tokens_of(0, index), [self.choices[index].parser])
        return chunk

    def opening(self, index: int) -> list[ChatChunk]:
        """The first chunks of a choice."""
        body = self.prepared.body
        self.choices[index] = _OpenChoice(self.writer.parser())
        first = self.chunk([ChatChunkChoice(index, ChatDelta(role=self.prepared.role, content=""))])
        if body.return_token_ids:
            first.prompt_token_ids = self.prepared.prompt.token_ids
        if body.return_prompt_text:
            first.prompt_text = self.prepared.prompt.text or ""
        if body.prompt_logprobs is not None:
            values = prompt_logprobs(
                self.run.results[0].logprobs, self.writer.tokenizer, as_token_ids=self.writer.as_token_ids
            )
            first.prompt_logprobs = UNSET if values is None else values
        chunks = [first]
        if self.prepared.echo:
            chunks.append(self.chunk([ChatChunkChoice(index, ChatDelta(content=self.prepared.echo))]))
        return chunks

    def advance(self, delta: Delta) -> list[ChatChunk]:
        """The chunks that a delta of the engine becomes."""
        chunks = self.opening(delta.index) if delta.index not in self.choices else []
        choice = self.choices[delta.index]
        choice.token_ids += delta.token_ids
        choice.positions += delta.logprobs or []
        choice.text.append(delta.text)
        events = choice.parser.push(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            events = [*events, *choice.parser.finish(was_cut=delta.finish_reason is FinishReason.LENGTH)]
        chunks += self._eventchat_chunks(delta.index, events)
        if delta.finish_reason is not None:
            chunks.append(self._closing(delta))
        elif self._shows_every_token() and choice.token_ids and not events and not delta.text:
            chunks.append(self._with_tokens(ChatChunkChoice(delta.index, ChatDelta())))
        return chunks

    def _shows_every_token(self) -> bool:
        return self.always_usage and not self.call.state.parsers.parses_reasoning

    def _eventchat_chunks(self, index: int, events: list[ReplyEvent]) -> list[ChatChunk]:
        shown = [delta for delta in (self.writer.delta(event) for event in events) if delta is not None]
        if not self.writer.shows_reasoning:
            self.choices[index].drop_hidden()
        return [self._with_tokens(ChatChunkChoice(index, delta)) for delta in shown]

    def _closing(self, delta: Delta) -> ChatChunk:
        parser = self.choices[delta.index].parser
        part = ChatChunkChoice(
            delta.index,
            ChatDelta(),
            finish_reason=self.writer.finish_reason(delta.finish_reason, parser.has_only_complete_calls),
            stop_reason=delta.stop_reason,
        )
        chunk = self._with_tokens(part, is_last=True)
        timed = timings_of(self.call, self.run)
        chunk.metrics = UNSET if timed is None else timed
        return chunk

    def _with_tokens(self, part: ChatChunkChoice, *, is_last: bool = False) -> ChatChunk:
        """The chunk, carrying the tokens and log-probabilities that no chunk carried yet."""
        body = self.prepared.body
        choice = self.choices[part.index]
        if body.logprobs and choice.positions:
            part.logprobs = self.writer.logprobs(choice.positions)
        if body.return_token_ids:
            part.token_ids = list(choice.token_ids)
        choice.positions.clear()
        choice.token_ids.clear()
        return self.chunk([part], is_last=is_last)


async def chat_chunks(call: Call, prepared: Prepared, run: Run) -> AsyncGenerator[bytes, None]:
    """The frames of a stream, without its last mark."""
    stream = _ChatStream(call, prepared, run)
    deltas = run.deltas(prepared.body.stream_interval or 1)
    try:
        async for delta in deltas:
            for chunk in stream.advance(delta):
                yield data_frame(chunk)
    finally:
        await deltas.aclose()
        log_outputs(call, ["".join(choice.text) for choice in stream.choices.values()])
    if stream.with_usage:
        parsers = [choice.parser for choice in stream.choices.values()]
        usage: Usage | Unset = stream.usage(run.num_completion_tokens, parsers)
        chunk = stream.chunk([])
        chunk.usage = usage
        yield data_frame(chunk)
