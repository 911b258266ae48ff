"""POST /v1/messages, its render twin, and /v1/messages/count_tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar.response.base import Response

from vkit.server.anthropic.conversion import chat_body, tool_use
from vkit.server.anthropic.schemas import (
    ContentBlock,
    ContextManagement,
    CountTokensBody,
    CountTokensReply,
    MessageReply,
    MessagesBody,
    MessageUsage,
)
from vkit.server.call import Call
from vkit.server.inference import Choice, Run
from vkit.server.openai.chat.request import Prepared, prepare, render_context
from vkit.server.openai.completions import log_outputs
from vkit.server.openai.render import rendered
from vkit.server.openai.shared import with_load_header
from vkit.server.parsing import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from vkit.server.problems import ContextOverflow, anthropic_error, bad_request, problem_from
from vkit.server.schema import Json
from vkit.server.stream import Frames, event_frame
from vkit.types import FinishReason

PING = event_frame("ping", {"type": "ping"})


async def messages(call: Call) -> Response[Any]:
    """Answer a conversation."""
    body = await call.body(MessagesBody)
    prepared = await _prepare(call, body)
    run = Run(call.state, f"msg_{call.rid}", [prepared.prompt], priority=prepared.priority, cache_salt=body.cache_salt)
    if body.stream:
        call.state.admit(1)
        return await call.events(_events(call, prepared, run), _as_is, wait_for_first=False, comment=PING)
    choice = (await call.while_connected(run.whole()))[0][0]
    return call.json(_whole_reply(call, prepared, run, choice), headers=with_load_header(call, {}))


async def render_messages(call: Call) -> Response[Any]:
    """The prompt and parameters that /v1/messages would run."""
    body = await call.body(MessagesBody)
    prepared = await _prepare(call, body)
    return call.json(
        rendered(
            call,
            f"msg_{call.rid}",
            prepared.model,
            prepared.prompt,
            call.state.engine.tokenizer,
            prepared.body,
            priority=prepared.priority,
            parse_context=render_context(prepared),
        )
    )


async def count_tokens(call: Call) -> Response[Any]:
    """How many tokens the prompt of /v1/messages has. Runs nothing."""
    body = await call.body(CountTokensBody)
    prepared = await _prepare(call, body, must_fit=False)
    num_tokens = len(prepared.prompt.token_ids)
    return call.json(CountTokensReply(num_tokens, ContextManagement(num_tokens)))


async def _prepare(call: Call, body: CountTokensBody, *, must_fit: bool = True) -> Prepared:
    if not body.model:
        raise bad_request("model: this field is required", "model")
    call.state.served_name(body.model)
    try:
        return await prepare(
            call,
            chat_body(call, body),
            tool_use=tool_use(call, body),
            must_fit=must_fit,
            names=_chat_fields(body),
        )
    except ContextOverflow as exc:
        # Clients shorten their history when they see these words.
        limit = exc.max_model_len - 1
        raise bad_request(f"prompt is too long: {exc.num_tokens} tokens > {limit} maximum", "messages") from None


def _chat_fields(body: CountTokensBody) -> dict[str, str]:
    """Chat's name for a field -> what this request calls it."""
    has_effort = body.output_config is not None and body.output_config.get("effort") is not None
    return {
        "response_format": "output_config.format" if body.output_format is None else "output_format",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort" if has_effort else "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
        "chat_template_kwargs.enable_thinking": "thinking",
        "tool_calls": "messages.tool_use",
    }


async def _as_is(frames: Frames) -> Frames:
    try:
        async for frame in frames:
            yield frame
    finally:
        await frames.aclose()


def _usage(call: Call, run: Run) -> MessageUsage:
    """Counts of the request; with cache details, cached tokens are counted apart."""
    cached = run.num_cached_tokens if call.settings.enable_prompt_tokens_details else 0
    return MessageUsage(
        input_tokens=run.num_prompt_tokens - cached,
        output_tokens=run.num_completion_tokens,
        cache_read_input_tokens=cached,
    )


def _stop(prepared: Prepared, choice: Choice, has_complete_calls: bool) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if choice.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if has_complete_calls:
        return "tool_use", None
    if isinstance(choice.stop_reason, str) and choice.stop_reason in prepared.prompt.params.stop:
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def signature_of(thinking: str) -> str:
    """A mark of our own under a thought: clients hand it back unread."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def _whole_reply(call: Call, prepared: Prepared, run: Run, choice: Choice) -> MessageReply:
    parser = call.state.parsers.open(prepared.context)
    parsed = parser.parse(choice.text, choice.token_ids, was_cut=choice.finish_reason is FinishReason.LENGTH)
    log_outputs(call, [choice.text])
    content: list[ContentBlock] = []
    if parsed.reasoning:
        content.append(
            ContentBlock(type="thinking", thinking=parsed.reasoning, signature=signature_of(parsed.reasoning))
        )
    if parsed.content:
        content.append(ContentBlock(type="text", text=parsed.content))
    calls = parsed.tool_calls if prepared.tool_use.parallel else parsed.tool_calls[:1]
    for item in calls:
        arguments = _object(item.arguments)
        if arguments is not None:
            content.append(ContentBlock(type="tool_use", id=item.id, name=item.name, input=arguments))
    has_complete_calls = bool(calls) and all(item.is_complete for item in calls)
    stop_reason, stop_sequence = _stop(prepared, choice, has_complete_calls)
    return MessageReply(
        id=f"msg_{call.rid}",
        model=prepared.model,
        content=content or [ContentBlock(type="text", text="")],
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=_usage(call, run),
    )


def _object(arguments: str) -> Json | None:
    """Arguments as an object; None when a cut left no JSON."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


class _Blocks:
    """Writes the events of content blocks: one open at a time, numbered without gaps."""

    def __init__(self) -> None:
        self.index = -1
        self._open: str | None = None
        self._thinking: list[str] = []
        self._has_arguments = False

    def add(self, event: ReplyEvent) -> list[bytes]:
        """The events one parser event becomes."""
        if isinstance(event, ReasoningDelta):
            frames = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(event.text)
            return [*frames, self._delta({"type": "thinking_delta", "thinking": event.text})]
        if isinstance(event, ContentDelta):
            frames = self._ensure("text", {"type": "text", "text": ""})
            return [*frames, self._delta({"type": "text_delta", "text": event.text})]
        return self._add_call(event)

    def _add_call(self, event: ToolCallDelta) -> list[bytes]:
        frames: list[bytes] = []
        if event.name is not None:
            frames += self.close()
            frames += self._start("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            self._has_arguments = False
        if event.arguments:
            self._has_arguments = True
            frames.append(self._delta({"type": "input_json_delta", "partial_json": event.arguments}))
        return frames

    def _ensure(self, kind: str, block: Json) -> list[bytes]:
        if self._open == kind:
            return []
        return [*self.close(), *self._start(kind, block)]

    def _start(self, kind: str, block: Json) -> list[bytes]:
        self.index += 1
        self._open = kind
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [event_frame("content_block_start", start)]

    def _delta(self, delta: Json) -> bytes:
        return event_frame("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": delta})

    def close(self) -> list[bytes]:
        """End the open block, if any."""
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open == "thinking":
            signature = signature_of("".join(self._thinking))
            frames.append(self._delta({"type": "signature_delta", "signature": signature}))
            self._thinking.clear()
        elif self._open == "tool_use" and not self._has_arguments:
            frames.append(self._delta({"type": "input_json_delta", "partial_json": "{}"}))
        self._open = None
        frames.append(event_frame("content_block_stop", {"type": "content_block_stop", "index": self.index}))
        return frames

    def finish(self) -> list[bytes]:
        """End the open block; an empty text block when nothing was ever said."""
        if self.index < 0:
            return [*self._start("text", {"type": "text", "text": ""}), *self.close()]
        return self.close()


async def _events(call: Call, prepared: Prepared, run: Run) -> AsyncGenerator[bytes, None]:
    opening = MessageReply(
        id=f"msg_{call.rid}",
        model=prepared.model,
        content=[],
        usage=MessageUsage(input_tokens=run.num_prompt_tokens, output_tokens=0),
    )
    yield event_frame("message_start", {"type": "message_start", "message": opening})
    blocks = _Blocks()
    whole = Choice()
    parser = call.state.parsers.open(prepared.context)
    deltas = run.deltas()
    try:
        async for delta in deltas:
            whole.text += delta.text
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            events = parser.push(delta.text, delta.token_ids)
            if delta.finish_reason is not None:
                events = [*events, *parser.finish(was_cut=delta.finish_reason is FinishReason.LENGTH)]
            for event in events:
                if isinstance(event, ToolCallDelta) and event.index > 0 and not prepared.tool_use.parallel:
                    continue
                for frame in blocks.add(event):
                    yield frame
    except Exception as exc:  # the status line is already sent: the stream itself must carry the failure
        for frame in blocks.close():
            yield frame
        body = anthropic_error(problem_from(exc), call.rid)
        yield event_frame("error", body)
        return
    finally:
        await deltas.aclose()
        log_outputs(call, [whole.text])
    for frame in blocks.finish():
        yield frame
    stop_reason, stop_sequence = _stop(prepared, whole, parser.has_only_complete_calls)
    yield event_frame(
        "message_delta",
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": _usage(call, run),
        },
    )
    yield event_frame("message_stop", {"type": "message_stop"})
