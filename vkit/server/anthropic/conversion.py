"""Messages requests to chat requests: content blocks to messages, tools and thinking to what templates know."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from vkit.errors import InvalidRequest
from vkit.server.anthropic.schemas import NO_EFFECT_FIELDS, CountTokensBody, MessagesBody
from vkit.server.call import Call
from vkit.server.engine_protocol import ChatTemplate
from vkit.server.media import MediaReference
from vkit.server.openai.schemas import ChatBody
from vkit.server.openai.tools import NO_TOOLS, ToolUse, check_function, known_name, resolved
from vkit.server.problems import bad_request, clip
from vkit.server.schema import Json, JsonSchemaFormat, ResponseFormat

MIN_THINKING_BUDGET = 1024
MAX_TOOL_NAME_LEN = 128
BILLING_MARK = "x-anthropic-billing-header"
EFFORTS = ("low", "medium", "high", "xhigh", "max")

_ROLES = ("user", "assistant", "system")
_DROPPED_BLOCKS = frozenset({"redacted_thinking", "tool_reference"})
_PLAIN_FIELDS = ("temperature", "top_p", "top_k", "stream", "cache_salt", "vllm_xargs")


def chat_body(call: Call, body: CountTokensBody) -> ChatBody:
    """The same request as chat sends it, tools left out.

    Raises:
        Problem: 400 naming the part.
    """
    for name in NO_EFFECT_FIELDS:
        if getattr(body, name, None) is not None:
            call.ignored.append(name)
    template = call.state.engine.chat_template
    messages = chat_messages(body, template)
    is_prefill = messages[-1]["role"] == "assistant"
    chat = ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=is_prefill or None,
        chat_template_kwargs=dict(body.chat_template_kwargs or {}),
    )
    if isinstance(body, MessagesBody):
        _add_sampling(call, chat, body)
    _add_thinking(call, chat, body)
    _add_output_config(chat, body.output_config)
    _add_output_format(chat, body)
    return chat


def _add_sampling(call: Call, chat: ChatBody, body: MessagesBody) -> None:
    for name in _PLAIN_FIELDS:
        setattr(chat, name, getattr(body, name))
    chat.stop = body.stop_sequences or None
    if body.max_tokens < 1:
        raise bad_request(f"max_tokens: must be at least 1, got {body.max_tokens}", "max_tokens")
    # Clients of this API always send a large limit, so one above the context is no mistake here.
    chat.max_tokens = min(body.max_tokens, call.state.engine.max_model_len)


def _add_thinking(call: Call, chat: ChatBody, body: CountTokensBody) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    kind = thinking.get("type")
    if thinking.get("display") is not None:
        call.ignored.append("thinking.display")
    if kind == "disabled":
        chat.reasoning_effort = "none"
    elif kind == "enabled":
        budget = _budget(body, thinking.get("budget_tokens"))
        assert chat.chat_template_kwargs is not None
        chat.chat_template_kwargs.setdefault("enable_thinking", True)
        if call.state.parsers.parses_reasoning:
            chat.thinking_token_budget = budget
        else:
            call.ignored.append("thinking.budget_tokens")
    elif kind != "adaptive":
        raise bad_request(f"thinking.type: expected enabled, disabled or adaptive, got {clip(kind)}", "thinking.type")


def _budget(body: CountTokensBody, budget: Any) -> int:
    field = "thinking.budget_tokens"
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < MIN_THINKING_BUDGET:
        raise bad_request(f"{field}: must be an integer of at least {MIN_THINKING_BUDGET}", field)
    if isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise bad_request(f"{field}: {budget} must be below max_tokens ({body.max_tokens})", field)
    return budget


def _add_output_config(chat: ChatBody, config: Json | None) -> None:
    if config is None:
        return
    effort = config.get("effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(
                f"output_config.effort: expected one of {', '.join(EFFORTS)}, got {clip(effort)}",
                "output_config.effort",
            )
        if chat.reasoning_effort is None:
            chat.reasoning_effort = effort
    if config.get("format") is not None:
        chat.response_format = _json_schema(config["format"], "output_config.format")


def _add_output_format(chat: ChatBody, body: CountTokensBody) -> None:
    """The older spelling of output_config.format."""
    if body.output_format is None:
        return
    if chat.response_format is not None:
        raise bad_request("output_format: cannot be combined with output_config.format", "output_format")
    chat.response_format = _json_schema(body.output_format, "output_format")


def _json_schema(form: Any, where: str) -> ResponseFormat:
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise bad_request(f"{where}: expected {{type: json_schema, schema: {{...}}}}", where)
    return ResponseFormat("json_schema", JsonSchemaFormat("output", schema))


def chat_messages(body: CountTokensBody, template: ChatTemplate | None) -> list[Json]:
    """The conversation as chat messages.

    Raises:
        Problem: 400 naming message and block.
    """
    if not body.messages:
        raise bad_request("messages: must have at least one message", "messages")
    leading = _system_text(body.system)
    turns = _merged(body.messages)
    inner: list[str] = []
    has_inner = any(role == "system" for role, _ in turns[1:])
    keeps_place = has_inner and template is not None and allows_inner_system(template)
    made: list[Json] = []
    for role, blocks in turns:
        if role == "system":
            text = "\n".join(_plain_text(block, where) for block, where in blocks)
            if keeps_place and made:
                made.append({"role": "system", "content": text})
            else:
                inner.append(text)
        elif role == "user":
            made += _user_messages(blocks)
        else:
            made.append(_assistant_message(blocks))
    system = "\n".join(text for text in (leading, *inner) if text)
    if system:
        made.insert(0, {"role": "system", "content": system})
    if not any(message["role"] != "system" for message in made):
        raise bad_request("messages: there are only system messages; at least one must be the user's", "messages")
    return made


def allows_inner_system(template: ChatTemplate) -> bool:
    """Whether the template writes a system message that is not the first."""
    probe = "vkit-inner-system"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": probe},
        {"role": "user", "content": "b"},
    ]
    try:
        return probe in template.render(messages)
    except InvalidRequest:
        return False


def _system_text(system: str | list[Json] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_plain_text(block, f"system.{i}") for i, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(BILLING_MARK))


Block = tuple[Json, str]
"""A content block and its dotted path."""


def _merged(messages: Sequence[Json]) -> list[tuple[str, list[Block]]]:
    """Turns of one role each, with all their blocks."""
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if role not in _ROLES:
            raise bad_request(f"{where}.role: expected user, assistant or system, got {clip(role)}", f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(content: Any, where: str) -> list[Block]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a string or a list of blocks", where)
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise bad_request(f"{where}.{i}: expected an object with a type", f"{where}.{i}")
    return [
        (block, f"{where}.{i}")
        for i, block in enumerate(content)
        if block["type"] not in _DROPPED_BLOCKS and not _is_billing(block)
    ]


def _is_billing(block: Json) -> bool:
    return isinstance(block.get("text"), str) and block["text"].startswith(BILLING_MARK)


def _user_messages(blocks: list[Block]) -> list[Json]:
    made: list[Json] = []
    parts: list[str | MediaReference] = []

    def flush() -> None:
        if parts:
            made.append({"role": "user", "content": _joined(parts)})
            parts.clear()

    for block, where in blocks:
        if block["type"] == "tool_result":
            if not all(isinstance(part, MediaReference) for part in parts):
                flush()
            message, media = _tool_message(block, where)
            made.append(message)
            parts.extend(media)
        elif block["type"] == "image":
            parts.append(_image(block, where))
        else:
            parts.append(_plain_text(block, where))
    flush()
    return made or [{"role": "user", "content": ""}]


def _joined(parts: Sequence[str | MediaReference]) -> str | list[Any]:
    """Content of a message: neighbouring texts joined, and one text alone where there are no media."""
    made: list[Any] = []
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            made.append({"type": "text", "text": "\n".join(part for part in run if isinstance(part, str))})
        else:
            made.extend(run)
    only = made[0]
    return only["text"] if len(made) == 1 and isinstance(only, dict) else made


def _image(block: Json, where: str) -> MediaReference:
    source = block.get("source")
    if not isinstance(source, dict):
        source = {}
    kind = source.get("type")
    if kind == "base64":
        data = _string(source, "data", f"{where}.source")
        return MediaReference("image", where, base64_data=data)
    if kind == "url":
        return MediaReference("image", where, url=_string(source, "url", f"{where}.source"))
    raise bad_request(f"{where}.source.type: expected base64 or url, got {clip(kind)}", f"{where}.source")


def _tool_message(block: Json, where: str) -> tuple[Json, list[MediaReference]]:
    """A tool's result, and the images in it: they go to the user message that follows."""
    tool_use_id = block.get("tool_use_id")
    if not isinstance(tool_use_id, str):
        raise bad_request(f"{where}.tool_use_id: this field is required", f"{where}.tool_use_id")
    content = block.get("content")
    parts = [] if content is None else _blocks(content, f"{where}.content")
    media = [_image(part, place) for part, place in parts if part["type"] == "image"]
    text = "\n".join(_plain_text(part, place) for part, place in parts if part["type"] != "image")
    if block.get("is_error") and not text.startswith("Error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": tool_use_id, "content": text}, media


def _assistant_message(blocks: list[Block]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block, where in blocks:
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            calls.append(_tool_call(block, where))
        else:
            texts.append(_plain_text(block, where))
    made: Json = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        made["reasoning"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _tool_call(block: Json, where: str) -> Json:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.input: expected an object", f"{where}.input")
    function = {"name": _string(block, "name", where), "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _plain_text(block: Json, where: str) -> str:
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", where)
    if kind == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            heads = [_string(block, key, where) for key in ("title", "context") if block.get(key) is not None]
            return "\n".join([*heads, _string(source, "data", f"{where}.source")])
        raise bad_request(f"{where}.source: only text documents are supported", f"{where}.source")
    if kind == "image":
        raise bad_request(f"{where}: no image is taken here", where)
    raise bad_request(f"{where}.type: block type {clip(kind)} is not supported here", f"{where}.type")


def _string(block: Json, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{key}: expected a string", f"{where}.{key}")
    return value


def tool_use(call: Call, body: CountTokensBody) -> ToolUse:
    """Tools of the request in chat form.

    Raises:
        Problem: 400 naming the tool.
    """
    kind, name, parallel = _choice(body.tool_choice)
    tools: list[Json] = []
    names: set[str] = set()
    for i, tool in enumerate(body.tools or ()):
        schema = tool.get("input_schema")
        is_server_tool = tool.get("type") not in (None, "custom")
        if is_server_tool and schema is None:
            call.ignored.append(f"tools.{i}")
            continue
        if not isinstance(schema, dict):
            raise bad_request(f"tools.{i}.input_schema: this field is required", f"tools.{i}.input_schema")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": {"type": "object", **schema},
            "strict": tool.get("strict"),
        }
        check_function(function, f"tools.{i}", names, max_name_len=MAX_TOOL_NAME_LEN)
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    if not tools:
        if kind in ("required", "named"):
            raise bad_request("tool_choice: needs tools", "tool_choice")
        return NO_TOOLS
    if kind == "named":
        known_name(name, [tool["function"]["name"] for tool in tools], "tool_choice.name")
    return resolved(call.state, tuple(tools), kind, name, parallel)


def _choice(choice: Json | None) -> tuple[str, str | None, bool]:
    """(kind, named tool, whether several calls may come)."""
    if choice is None:
        return "auto", None, True
    kinds = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
    kind = kinds.get(str(choice.get("type")))
    if kind is None:
        raise bad_request(
            f"tool_choice.type: expected auto, any, tool or none, got {clip(choice.get('type'))}", "tool_choice.type"
        )
    if kind == "named" and not isinstance(choice.get("name"), str):
        raise bad_request("tool_choice.name: this field is required", "tool_choice.name")
    return kind, choice.get("name"), not choice.get("disable_parallel_tool_use")
