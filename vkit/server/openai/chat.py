"""POST /v1/chat/completions and its render twin: messages through the model's template, replies through its parsers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from litestar.response.base import Response

from vkit.errors import InvalidRequest
from vkit.media import PlacedPrompt
from vkit.server.call import Call
from vkit.server.inference import Choice, Delta, EnginePrompt, Run, best_choices
from vkit.server.media import MediaOptions, MediaReference, check_references, media_options, place_media
from vkit.server.openai.beam import beam_search
from vkit.server.openai.completions import log_outputs
from vkit.server.openai.logprobs import LogprobWriter, prompt_logprobs
from vkit.server.openai.messages import template_messages
from vkit.server.openai.render import rendered
from vkit.server.openai.schemas import (
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    FunctionCall,
    FunctionDelta,
    TokenizeBody,
    ToolCallChunk,
    ToolCallReply,
)
from vkit.server.openai.shared import (
    check_stream_options,
    check_thinking_budget,
    effective_priority,
    note_no_effect,
    now,
    timings_of,
    usage_of,
    wants_usage,
    with_load_header,
    with_thinking_marks,
)
from vkit.server.openai.tools import ToolUse, chat_tool_use
from vkit.server.parsing import ContentDelta, ReasoningDelta, ReplyContext, ReplyEvent, ReplyParser, ToolCallDelta
from vkit.server.problems import ContextOverflow, Problem, bad_request, clip, problem_from, renamed
from vkit.server.prompts import ChatPrompt, encode_rendered, render_chat
from vkit.server.sampling import (
    Wanted,
    build_params,
    check_common,
    check_logprobs,
    check_max_tokens,
    check_n,
    check_priority,
    room_for,
    truncate_prompt,
)
from vkit.server.schema import UNSET, Json, SamplingBody, Unset, Usage
from vkit.server.settings import EFFORTS
from vkit.server.stream import data_frame, ending_with_done
from vkit.server.structured import asked_by, check_enforceable, of_reply
from vkit.types import FinishReason, PositionLogprobs

logger = logging.getLogger("vkit.server.requests")

_RESERVED_VARIABLES = frozenset(
    {"chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


@dataclass(slots=True)
class Prepared:
    """A validated request."""

    body: ChatBody
    model: str
    prompt: EnginePrompt
    role: str
    n: int
    priority: int
    tool_use: ToolUse
    echo: str
    """Text of the last message when it is repeated, else empty."""
    context: ReplyContext
    variables: Mapping[str, Any] = field(default_factory=dict)


async def chat_completions(call: Call) -> Response[Any]:
    """Answer a conversation."""
    body = await call.body(ChatBody)
    prepared = await prepare(call, body)
    if body.use_beam_search:
        return await _beam_reply(call, prepared)
    run = Run(
        call.state,
        f"chatcmpl-{call.rid}",
        [prepared.prompt],
        priority=prepared.priority,
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )
    if body.stream:
        return await call.events(_chunks(call, prepared, run), ending_with_done)
    choices = (await call.while_connected(run.whole()))[0]
    reply = _whole_reply(call, prepared, run, best_choices(choices, prepared.n))
    return call.json(reply, headers=with_load_header(call, {}))


async def render_chat_completions(call: Call) -> Response[Any]:
    """The prompt and parameters that /v1/chat/completions would run."""
    body = await call.body(ChatBody)
    if body.use_beam_search:
        raise bad_request("use_beam_search: cannot be rendered as one generate request", "use_beam_search")
    prepared = await prepare(call, body)
    item = rendered(
        call,
        f"chatcmpl-{call.rid}",
        prepared.model,
        prepared.prompt,
        call.state.engine.tokenizer,
        body,
        priority=prepared.priority,
        parse_context=render_context(prepared),
    )
    item.reasoning_ended = not call.state.parsers.starts_reasoning(prepared.context)
    return call.json(item)


def render_context(prepared: Prepared) -> Json:
    """What output_mode derender must know to parse the reply as this route would."""
    body, tool_use = prepared.body, prepared.tool_use
    return {
        "tools": list(tool_use.tools) or None,
        "tool_choice": tool_use.choice,
        "tool_name": tool_use.name,
        "parallel_tool_calls": tool_use.parallel,
        "include_reasoning": body.include_reasoning is not False,
        "chat_template_kwargs": dict(prepared.variables),
        "history_tool_call_cnt": sum(len(message.get("tool_calls") or []) for message in body.messages),
    }


CHAT_NAMES: Mapping[str, str] = {}


async def prepare(
    call: Call,
    body: ChatBody,
    *,
    tool_use: ToolUse | None = None,
    must_fit: bool = True,
    names: Mapping[str, str] = CHAT_NAMES,
) -> Prepared:
    """The request, validated, rendered and tokenized.

    `must_fit`: refuse a prompt that leaves no room for output. `names`: what the client calls fields of chat, where its
    route has other names for them.

    Raises:
        Problem: 400 or 404.
    """
    try:
        return await _prepared(call, body, tool_use, must_fit, names)
    except ContextOverflow:
        raise  # routes have words of their own for it
    except (Problem, InvalidRequest) as exc:
        raise renamed(problem_from(exc), names) from None


async def _prepared(
    call: Call, body: ChatBody, tool_use: ToolUse | None, must_fit: bool, names: Mapping[str, str]
) -> Prepared:
    state = call.state
    model = state.served_name(body.model)
    engine = state.engine
    check_common(body, call.settings)
    check_stream_options(body)
    check_thinking_budget(call, body.thinking_token_budget)
    _check_flags(call, body)
    n, best_of = check_n(body, call.settings)
    note_no_effect(call, body)
    priority = effective_priority(call, body.priority)
    check_priority(priority, call.settings)
    if tool_use is None:
        tool_use = _tool_use(call, body)
    _note_unrendered(call, body, tool_use, names)
    asked = asked_by(body, format_field=names.get("response_format", "response_format"))
    wanted = _wanted(call, body, best_of)
    chat = chat_prompt(call, body, tool_use)
    text = await render_chat(engine, chat, engine.compile_template)
    token_ids = await encode_rendered(engine.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
    if not token_ids:
        raise bad_request("messages: the rendered prompt has no tokens", "messages")
    token_ids, placed = await _with_media(call, body, chat, token_ids)
    room = room_for(len(token_ids), engine.max_model_len, "messages") if must_fit else engine.max_model_len
    params = build_params(body, wanted, state.defaults.values, room, engine.tokenizer)
    context = ReplyContext(
        text, token_ids, tool_use.tools, tool_use.choice, tool_use.name, tool_use.parallel, chat.variables
    )
    params = with_thinking_marks(call, params, context)
    asked = of_reply(call, asked, context)
    if asked is not None:
        if body.use_beam_search:
            raise bad_request(f"use_beam_search: cannot be combined with {asked.field}", "use_beam_search")
        params = params.with_(structured_outputs=await check_enforceable(call, asked))
    if state.parsers.needs_special_tokens(context):
        params = params.with_(skip_special_tokens=False)
    last = chat.messages[-1]
    generates_new_turn = chat.add_generation_prompt and not chat.continue_final_message
    role = call.settings.response_role if generates_new_turn else str(last["role"])
    return Prepared(
        body,
        model,
        EnginePrompt(token_ids, text, params, placed, lora=state.lora_of(body.model)),
        role,
        n,
        priority,
        tool_use,
        _echoed(last, role) if body.echo else "",
        context,
        chat.variables,
    )


async def _with_media(
    call: Call, body: ChatBody, chat: ChatPrompt, token_ids: list[int]
) -> tuple[list[int], PlacedPrompt | None]:
    """The prompt at its full length, and with its media if it has any."""
    engine = call.state.engine
    if not chat.media:
        return truncate_prompt(token_ids, body, engine.max_model_len), None
    for name in ("truncate_prompt_tokens", "use_beam_search"):
        if getattr(body, name):
            raise bad_request(f"{name}: cannot be combined with media", name)
    placed = await call.while_connected(
        place_media(engine, call.state.media, token_ids, chat.media, asked_media_options(call, body))
    )
    assert placed is not None, "there are media"
    return placed.token_ids, placed


def _check_flags(call: Call, body: ChatBody) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request("continue_final_message: contradicts add_generation_prompt: true", "continue_final_message")
    if body.stream and body.prompt_logprobs not in (None, 0):
        raise bad_request("prompt_logprobs: not available with stream: true", "prompt_logprobs")
    if body.use_beam_search:
        for name, clash in (
            ("stream", body.stream),
            ("logprob_token_ids", body.logprob_token_ids),
            ("thinking_token_budget", body.thinking_token_budget is not None),
        ):
            if clash:
                raise bad_request(f"use_beam_search: cannot be combined with {name}", "use_beam_search")
    elif body.length_penalty is not None:
        raise bad_request("length_penalty: only used with use_beam_search", "length_penalty")
    asked_media_options(call, body)
    check_template_source(call, body.chat_template)
    for name in ("mm_payload", "return_mm_kwargs"):
        if getattr(body, name) is not None:
            call.ignored.append(name)


def asked_media_options(call: Call, body: ChatBody | TokenizeBody) -> MediaOptions:
    """How the request wants its media prepared.

    Raises:
        Problem: 400.
    """
    return media_options(
        body.mm_processor_kwargs, body.media_io_kwargs, is_trusted=call.settings.trust_request_mm_kwargs
    )


def check_template_source(call: Call, template: str | None) -> None:
    """Refuse a request's own template where the operator does.

    Raises:
        Problem: 400.
    """
    if template is not None and not call.settings.trust_request_chat_template:
        raise bad_request(
            "chat_template: this server was started with --no-trust-request-chat-template", "chat_template"
        )


def _tool_use(call: Call, body: ChatBody) -> ToolUse:
    tools, choice = body.tools, body.tool_choice
    if body.functions is None and body.function_call not in (None, "none"):
        raise bad_request("function_call: needs functions", "function_call")
    if tools is None and body.functions is not None:
        tools = [{"type": "function", "function": function} for function in body.functions]
        choice = body.function_call if choice is None else choice
        if isinstance(choice, dict) and "name" in choice and "type" not in choice:
            choice = {"type": "function", "function": choice}
    return chat_tool_use(call.state, tools, choice, parallel=body.parallel_tool_calls is not False)


def _note_unrendered(call: Call, body: ChatBody, tool_use: ToolUse, names: Mapping[str, str]) -> None:
    """Name what the model's template never shows it. A forced choice of tool holds all the same."""
    template, own = call.state.engine.chat_template, body.chat_template

    def is_lost(*variables: str) -> bool:
        if own is not None:
            return not any(name in own for name in variables)
        return template is not None and not any(template.mentions(name) for name in variables)

    def note(field: str) -> None:
        call.ignored.append(names.get(field, field))

    if tool_use.offered and is_lost("tools"):
        note("functions" if body.functions is not None and body.tools is None else "tools")
    if body.documents and is_lost("documents"):
        note("documents")
    if is_lost("tool_calls"):
        called = [f"messages.{i}.tool_calls" for i, said in enumerate(body.messages) if said.get("tool_calls")]
        if called and "tool_calls" in names:  # the messages were put together from the route's own items
            called = ["tool_calls"]
        for field in called:
            note(field)
    if call.state.parsers.parses_reasoning:  # these also tell the parser what to expect
        return
    if body.reasoning_effort is not None and is_lost("reasoning_effort", "enable_thinking"):
        note("reasoning_effort")
    for name in body.chat_template_kwargs or ():
        if is_lost(name):
            note(f"chat_template_kwargs.{name}")


def template_variables(call: Call, kwargs: Json | None, *, reasoning_effort: str | None) -> dict[str, Any]:
    """Variables of the template beside the conversation: server defaults, then the request's.

    `enable_thinking` is defined only when somebody asked, so that a template's own default stays in force.

    Raises:
        Problem: 400.
    """
    variables = {**call.settings.default_chat_template_kwargs, **(kwargs or {})}
    for name in variables:
        if name in _RESERVED_VARIABLES or not name.isidentifier():
            raise bad_request(f"chat_template_kwargs: {clip(name)!r} is not allowed here", "chat_template_kwargs")
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            raise bad_request(
                f"reasoning_effort: expected one of {', '.join(EFFORTS)}, got {clip(reasoning_effort)!r}",
                "reasoning_effort",
            )
        told = call.settings.reasoning_effort_map.get(reasoning_effort, reasoning_effort)
        variables.setdefault("reasoning_effort", told)
        variables.setdefault("enable_thinking", reasoning_effort != "none")
    return variables


def chat_prompt(call: Call, body: ChatBody, tool_use: ToolUse) -> ChatPrompt:
    """What the template is given.

    Raises:
        Problem: 400.
    """
    template = call.state.engine.chat_template
    source = body.chat_template if body.chat_template is not None else (template.source if template else "")
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    media: list[MediaReference] = []
    messages = template_messages(
        body.messages, has_developer_role="developer" in source, ignored=call.ignored, media=media
    )
    engine = call.state.engine
    check_references(media, engine.media.kinds if engine.media is not None else (), engine.media_limits)
    return ChatPrompt(
        messages,
        tools=list(tool_use.offered) or None,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
        documents=body.documents,
        variables=template_variables(call, body.chat_template_kwargs, reasoning_effort=body.reasoning_effort),
        template=body.chat_template,
        media=media,
    )


def _wanted(call: Call, body: ChatBody, best_of: int) -> Wanted:
    state = call.state
    max_model_len = state.engine.max_model_len
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = check_max_tokens(getattr(body, name), max_model_len, name)
    if max_tokens is None and state.defaults.max_tokens is not None:
        max_tokens = min(state.defaults.max_tokens, max_model_len)
    top = check_logprobs(body.top_logprobs, call.settings, "top_logprobs")
    if top and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs: true", "top_logprobs")
    logprobs = (top or 0) if body.logprobs else None
    asked_prompt = check_logprobs(body.prompt_logprobs, call.settings, "prompt_logprobs")
    if body.echo and logprobs is not None and asked_prompt is None and not body.stream:
        asked_prompt = logprobs
    if best_of > (body.n or 1) and logprobs is None:
        logprobs = 0
    return Wanted(
        n=best_of,
        max_tokens=max_tokens,
        max_tokens_field=name,
        logprobs=logprobs,
        logprobs_field="logprobs: true",
        prompt_logprobs=asked_prompt,
    )


def _echoed(last: Mapping[str, Any], role: str) -> str:
    content = last.get("content")
    if last["role"] != role or not content:
        return ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


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


def _whole_reply(call: Call, prepared: Prepared, run: Run, choices: list[Choice]) -> ChatReply:
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
        chunks += self._event_chunks(delta.index, events)
        if delta.finish_reason is not None:
            chunks.append(self._closing(delta))
        elif self._shows_every_token() and choice.token_ids and not events and not delta.text:
            chunks.append(self._with_tokens(ChatChunkChoice(delta.index, ChatDelta())))
        return chunks

    def _shows_every_token(self) -> bool:
        return self.always_usage and not self.call.state.parsers.parses_reasoning

    def _event_chunks(self, index: int, events: list[ReplyEvent]) -> list[ChatChunk]:
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


async def _chunks(call: Call, prepared: Prepared, run: Run) -> AsyncGenerator[bytes, None]:
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


async def _beam_reply(call: Call, prepared: Prepared) -> Response[Any]:
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
