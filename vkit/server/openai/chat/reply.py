"""Choices as whole chat replies."""

from __future__ import annotations

from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.inference import Choice, Run
from vkit.server.openai.beam import beam_search
from vkit.server.openai.chat.request import Prepared
from vkit.server.openai.completions import log_outputs
from vkit.server.openai.logprobs import LogprobWriter, prompt_logprobs
from vkit.server.openai.schemas import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    FunctionCall,
    FunctionDelta,
    ToolCallChunk,
    ToolCallReply,
)
from vkit.server.openai.shared import (
    now,
    timings_of,
    usage_of,
)
from vkit.server.parsing import ContentDelta, ReasoningDelta, ReplyEvent, ReplyParser, ToolCallDelta
from vkit.server.schema import UNSET, SamplingBody, Usage
from vkit.types import FinishReason, PositionLogprobs


class ReplyWriter:
    """Turns what parsers find into chat messages and deltas, for one request."""

    def __init__(self, call: Call, prepared: Prepared) -> None:
        body = prepared.body
        self.call = call
        self.prepared = prepared
        self.tokenizer = call.state.engine.tokenizer
        self.shows_reasoning = body.include_reasoning is not False
        self.reasoning_field = call.settings.reasoning_field
        self.as_token_ids = wants_token_ids(call, body)

    def parser(self) -> ReplyParser:
        """A parser for one choice."""
        return self.call.state.parsers.open(self.prepared.context)

    def logprobs(self, positions: list[PositionLogprobs] | None) -> ChatLogprobs | None:
        """The logprobs object, when asked for."""
        body = self.prepared.body
        if not body.logprobs or positions is None:
            return None
        writer = LogprobWriter(
            self.tokenizer,
            body.top_logprobs,
            as_token_ids=self.as_token_ids,
            only_listed=body.logprob_token_ids is not None,
        )
        return writer.chat(positions)

    def message(self, choice: Choice) -> tuple[ChatMessage, str | None, int]:
        """(message, finish reason, reasoning tokens) of a whole choice."""
        prepared = self.prepared
        parsed = self.parser().parse(choice.text, choice.token_ids, was_cut=choice.finish_reason is FinishReason.LENGTH)
        calls = parsed.tool_calls if prepared.tool_use.parallel else parsed.tool_calls[:1]
        content = parsed.content
        if prepared.echo:
            content = prepared.echo + (content or "")
        message = ChatMessage(role=prepared.role, content=content)
        reasoning = parsed.reasoning if self.shows_reasoning else None
        message.reasoning = reasoning if self.reasoning_field in ("both", "reasoning") else UNSET
        message.reasoning_content = reasoning if self.reasoning_field in ("both", "reasoning_content") else UNSET
        if calls:
            message.tool_calls = [
                ToolCallReply(id=item.id, function=FunctionCall(item.name, item.arguments)) for item in calls
            ]
        has_calls = bool(calls) and all(item.is_complete for item in parsed.tool_calls)
        return message, self.finish_reason(choice.finish_reason, has_calls), parsed.num_reasoning_tokens

    def finish_reason(self, reason: FinishReason | None, has_complete_calls: bool) -> str | None:
        """`tool_calls` for complete calls the model chose to make; a named call keeps `stop`."""
        if reason is FinishReason.STOP and has_complete_calls and self.prepared.tool_use.choice != "named":
            return "tool_calls"
        return reason

    def delta(self, event: ReplyEvent) -> ChatDelta | None:
        """One event as a delta; None when the request hides it."""
        if isinstance(event, ContentDelta):
            return ChatDelta(content=event.text)
        if isinstance(event, ReasoningDelta):
            if not self.shows_reasoning:
                return None
            return ChatDelta(
                reasoning=event.text if self.reasoning_field in ("both", "reasoning") else UNSET,
                reasoning_content=event.text if self.reasoning_field in ("both", "reasoning_content") else UNSET,
            )
        if event.index > 0 and not self.prepared.tool_use.parallel:
            return None
        return ChatDelta(tool_calls=[tool_call_chunk(event)])


def wants_token_ids(call: Call, body: SamplingBody) -> bool:
    """Whether token strings are written as ids."""
    return bool(body.return_tokens_as_token_ids or call.settings.return_tokens_as_token_ids)


def tool_call_chunk(event: ToolCallDelta) -> ToolCallChunk:
    """One piece of a call; identity only in the first."""
    chunk = ToolCallChunk(event.index, FunctionDelta(arguments=event.arguments))
    if event.name is not None:
        chunk.function.name = event.name
        chunk.id = event.id if event.id is not None else UNSET
        chunk.type = "function"
    return chunk


def whole_reply(call: Call, prepared: Prepared, run: Run, choices: list[Choice]) -> ChatReply:
    """The reply of a run that has ended."""
    body = prepared.body
    writer = ReplyWriter(call, prepared)
    replies: list[ChatChoice] = []
    num_reasoning = 0
    for k, choice in enumerate(choices):
        message, finish_reason, num_hidden = writer.message(choice)
        num_reasoning += num_hidden
        skip = 0 if writer.shows_reasoning else num_hidden
        positions = None if choice.logprobs is None else choice.logprobs[skip:]
        replies.append(
            ChatChoice(
                k,
                message,
                writer.logprobs(positions),
                finish_reason,
                choice.stop_reason,
                choice.token_ids[skip:] if body.return_token_ids else None,
            )
        )
    log_outputs(call, [choice.text for choice in choices])
    usage = usage_of(
        call,
        body,
        run.num_prompt_tokens,
        run.num_completion_tokens,
        run.num_cached_tokens,
        num_reasoning if call.state.parsers.parses_reasoning else None,
    )
    asked_prompt = prepared.prompt.params.prompt_logprobs is not None
    reply = _reply(call, prepared, replies, usage)
    reply.prompt_logprobs = (
        prompt_logprobs(run.results[0].logprobs, writer.tokenizer, as_token_ids=writer.as_token_ids)
        if asked_prompt
        else None
    )
    reply.metrics = timings_of(call, run)
    reply.kv_transfer_params = None if run.kv_transfer_params is None else dict(run.kv_transfer_params)
    return reply


def _reply(call: Call, prepared: Prepared, choices: list[ChatChoice], usage: Usage) -> ChatReply:
    body = prepared.body
    return ChatReply(
        id=f"chatcmpl-{call.rid}",
        created=now(),
        model=prepared.model,
        system_fingerprint=call.state.system_fingerprint,
        choices=choices,
        usage=usage,
        prompt_token_ids=prepared.prompt.token_ids if body.return_token_ids else None,
        prompt_text=prepared.prompt.text if body.return_prompt_text else None,
    )


async def beam_reply(call: Call, prepared: Prepared) -> Response[Any]:
    """The best beams, which are never streamed."""
    body = prepared.body
    writer = ReplyWriter(call, prepared)
    beams = await call.while_connected(
        beam_search(call.state, f"chatcmpl-{call.rid}", prepared.prompt, prepared.n, body, prepared.priority)
    )
    choices: list[ChatChoice] = []
    num_reasoning = 0
    for k, beam in enumerate(beams):
        choice = Choice(beam.text, beam.token_ids, beam.logprobs, beam.finish_reason)
        message, finish_reason, num_hidden = writer.message(choice)
        num_reasoning += num_hidden
        ids = beam.token_ids if body.return_token_ids else None
        choices.append(ChatChoice(k, message, writer.logprobs(beam.logprobs), finish_reason, None, ids))
    usage = usage_of(
        call,
        body,
        len(prepared.prompt.token_ids),
        sum(len(beam.token_ids) for beam in beams),
        0,
        num_reasoning if call.state.parsers.parses_reasoning else None,
    )
    return call.json(_reply(call, prepared, choices, usage))
