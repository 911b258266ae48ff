"""Chat messages as clients send them to messages as templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vkit.server.media import MEDIA_PARTS, MediaReference, media_reference
from vkit.server.problems import bad_request, clip
from vkit.server.schema import Json

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
FILE_PARTS = frozenset({"file", "input_file"})

_KNOWN_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"}
)


def template_messages(
    messages: Sequence[Json],
    *,
    has_developer_role: bool,
    ignored: list[str],
    media: list[MediaReference],
    where: str = "messages",
) -> list[Json]:
    """The conversation, checked. Parts stay a list: the template knows whether it wants them joined.

    Media parts become bare ones, such as {"type": "image"}, and what they refer to is appended to `media`.

    Raises:
        Problem: 400 naming the message and its key.
    """
    if not messages:
        raise bad_request(f"{where}: must have at least one message", where)
    return [_message(message, f"{where}.{i}", has_developer_role, ignored, media) for i, message in enumerate(messages)]


def _message(
    message: Json, where: str, has_developer_role: bool, ignored: list[str], media: list[MediaReference]
) -> Json:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role: expected a role name, got {clip(role)}", f"{where}.role")
    ignored.extend(f"{where}.{key}" for key in message if key not in _KNOWN_KEYS and message[key] is not None)
    made: Json = {"role": "system" if role == "developer" and not has_developer_role else role}
    made["content"] = _content(message.get("content"), role, where, ignored, media)
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            made[key] = _text(message[key], f"{where}.{key}")
    if role == "assistant":
        _add_assistant_fields(made, message, where)
    return made


def _add_assistant_fields(made: Json, message: Json, where: str) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = _text(reasoning, f"{where}.reasoning")
    if made["content"] in ("", []) and message.get("refusal") is not None:
        made["content"] = _text(message["refusal"], f"{where}.refusal")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls: expected a list", f"{where}.tool_calls")
        made["tool_calls"] = [_tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Json:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise bad_request(f"{where}: expected an object with a function", where)
    function = call["function"]
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments, f"{where}.function.arguments")
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments: expected JSON text", f"{where}.function.arguments")
    made: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        made["id"] = _text(call["id"], f"{where}.id")
    return made


def parse_arguments(text: str, where: str) -> Any:
    """A tool call's arguments as templates want them.

    Raises:
        Problem: 400 for text that is not JSON.
    """
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        raise bad_request(f"{where}: not valid JSON ({exc})", where) from None


def _content(content: Any, role: str, where: str, ignored: list[str], media: list[MediaReference]) -> str | list[Json]:
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "function"):
            return ""
        raise bad_request(f"{where}: this field is required for role {clip(role)!r}", where)
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a string or a list of parts", where)
    made: list[Json] = []
    for i, part in enumerate(content):
        place = f"{where}.{i}"
        if isinstance(part, MediaReference):  # another route's, read already
            media.append(part)
            made.append({"type": part.kind})
        elif isinstance(part, dict) and part.get("type") in MEDIA_PARTS:
            media.append(media_reference(part, place, ignored))
            made.append({"type": media[-1].kind})
        else:
            made.append({"type": "text", "text": part_text(part, place)})
    return made


def part_text(part: Any, where: str) -> str:
    """The text of one content part.

    Raises:
        Problem: 400 for media, which have no place here, for files, and for unknown kinds.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request(f"{where}: expected an object with a type", where)
    kind = part.get("type")
    if kind is None and isinstance(part.get("text"), str):
        kind = "text"
    if kind in TEXT_PARTS:
        return _text(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return _text(part.get("refusal"), f"{where}.refusal")
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise bad_request(f"{where}: no {MEDIA_PARTS[kind]} is taken here (part type {kind!r})", where)
    if isinstance(kind, str) and kind in FILE_PARTS:
        raise bad_request(f"{where}: files are not taken here (part type {kind!r})", where)
    raise bad_request(f"{where}.type: unknown part type {clip(kind)}", f"{where}.type")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where}: expected a string, got {clip(value)}", where)
    return value
