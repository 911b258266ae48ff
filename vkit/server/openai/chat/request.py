"""A conversation as the engine gets it: checked, rendered through the model's template, tokenized."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vkit.errors import InvalidRequest
from vkit.media import PlacedPrompt
from vkit.server.call import Call
from vkit.server.inference import EnginePrompt
from vkit.server.media import MediaOptions, MediaReference, check_references, media_options, place_media
from vkit.server.openai.messages import template_messages
from vkit.server.openai.schemas import (
    ChatBody,
    TokenizeBody,
)
from vkit.server.openai.shared import (
    check_stream_options,
    check_thinking_budget,
    effective_priority,
    note_no_effect,
    with_thinking_marks,
)
from vkit.server.openai.tools import ToolUse, chat_tool_use
from vkit.server.parsing import ReplyContext
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
from vkit.server.schema import Json
from vkit.server.settings import EFFORTS
from vkit.server.structured import asked_by, check_enforceable, of_reply

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
