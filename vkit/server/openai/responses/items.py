"""Response items: clients' input made uniform, and items turned into the chat messages that templates read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vkit.server.call import new_id
from vkit.server.media import MEDIA_PARTS, MediaReference, media_reference
from vkit.server.openai.messages import part_text
from vkit.server.problems import bad_request, clip
from vkit.server.schema import Json

ROLES = ("user", "system", "developer", "assistant")
SKIPPED_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
        *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "compaction", "shell_call", "shell_call_output"),
    }
)
"""Traces of tools that run elsewhere; nothing in them is for the model."""

_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_UNFINISHED = ("in_progress", "incomplete")


def item_id(kind: str) -> str:
    """A fresh id for an item of this type."""
    return _ID_PREFIXES.get(kind, "item_") + new_id()


def normalised_items(given: str | Sequence[Json], find: Callable[[str], Json | None]) -> list[Json]:
    """Input items with every key that replayed items may lack. `find` resolves references to stored items.

    Raises:
        Problem: 400 for an item that is none, 404 for a reference to nothing.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_normalised(item, f"input.{i}", find) for i, item in enumerate(given)]


def _normalised(item: Json, where: str, find: Callable[[str], Json | None]) -> Json:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind == "item_reference":
        return _resolved(item, where, find)
    if kind == "message":
        return _message(item, where)
    if kind in SKIPPED_ITEMS or (isinstance(kind, str) and kind.startswith("mcp_")):
        return {**item, "id": item.get("id") or item_id(str(kind))}
    made = {**item, "type": kind, "id": item.get("id") or item_id(str(kind)), "status": item.get("status", "completed")}
    if kind == "reasoning":
        made["summary"] = item.get("summary") or []
        return made
    required = {
        "function_call": ("call_id", "name", "arguments"),
        "custom_tool_call": ("call_id", "name", "input"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call_output": ("call_id", "output"),
    }.get(str(kind))
    if required is None:
        raise bad_request(f"{where}: unknown item type {clip(kind)}", where)
    for key in required:
        if key not in item or (key != "output" and not isinstance(item[key], str)):
            raise bad_request(f"{where}.{key}: expected a string", f"{where}.{key}")
    return made


def _resolved(item: Json, where: str, find: Callable[[str], Json | None]) -> Json:
    from vkit.server.problems import not_found

    wanted = item.get("id")
    found = find(wanted) if isinstance(wanted, str) else None
    if found is None:
        raise not_found(f"{where}: no stored item has the id {clip(wanted)}", where)
    return found


def _message(item: Json, where: str) -> Json:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role: expected one of {', '.join(ROLES)}, got {clip(role)}", f"{where}.role")
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content: expected a string or a list of parts", f"{where}.content")
    parts = []
    for i, part in enumerate(content):
        if not is_media_part(part):
            input_part_text(part, f"{where}.content.{i}")
        if part.get("type") == "output_text":
            part = {"annotations": [], **part}
        parts.append(part)
    return {
        **item,
        "type": "message",
        "id": item.get("id") or item_id("message"),
        "role": role,
        "status": item.get("status") or "completed",
        "content": parts,
    }


def input_part_text(part: Any, where: str) -> str:
    """The text of a content part.

    Raises:
        Problem: 400 for media and files that are not text.
    """
    if isinstance(part, dict) and part.get("type") == "input_file":
        data = part.get("file_data")
        if isinstance(data, str) and not data.startswith("data:"):
            return data
        raise bad_request(f"{where}: only input_file with file_data text is supported", where)
    return part_text(part, where)


def is_media_part(part: Any) -> bool:
    """Whether a content part brings an image, a video or sound."""
    return isinstance(part, dict) and part.get("type") in MEDIA_PARTS


def chat_messages(items: Sequence[Json], instructions: str | None, ignored: list[str]) -> list[Json]:
    """The conversation as chat messages. Calls, and the message and thought before them, share one message.

    Media that tools returned go to a user message after the results. Keys without effect are appended to `ignored`.

    Raises:
        Problem: 400 for arguments that are not JSON.
    """
    made: list[Json] = []
    if instructions is not None:
        made.append({"role": "system", "content": instructions})
    turn: Json | None = None
    returned: list[MediaReference] = []

    def flush() -> None:
        if returned:
            made.append({"role": "user", "content": list(returned)})
            returned.clear()

    def assistant() -> Json:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": None}
            made.append(turn)
        return turn

    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type")
        if kind not in ("function_call_output", "custom_tool_call_output"):
            flush()
        if kind == "reasoning":
            if turn is not None and (turn.get("content") or turn.get("tool_calls")):
                turn = None
            text = _reasoning_text(item)
            if text:
                current = assistant()
                current["reasoning"] = current.get("reasoning", "") + text
        elif kind == "message" and item["role"] == "assistant":
            if turn is not None and (turn.get("content") or turn.get("tool_calls")):
                turn = None
            assistant()["content"] = _content_text(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            assistant().setdefault("tool_calls", []).append(_tool_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            text, media = _output(item, where, ignored)
            made.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            returned.extend(media)
        elif kind == "message":
            turn = None
            made.append({"role": item["role"], "content": _content(item, where, ignored)})
    flush()
    return made


def continues_last(items: Sequence[Json]) -> bool:
    """Whether the last item is an unfinished assistant message, to be gone on with."""
    last = items[-1] if items else {}
    return last.get("type") == "message" and last.get("role") == "assistant" and last.get("status") in _UNFINISHED


def _reasoning_text(item: Json) -> str:
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return "".join(part.get("text", "") for part in parts if isinstance(part, dict))
    return ""


def _content_text(item: Json, where: str) -> str:
    joined = "" if item["role"] == "assistant" else "\n"
    return joined.join(input_part_text(part, f"{where}.content.{i}") for i, part in enumerate(item["content"]))


def _content(item: Json, where: str, ignored: list[str]) -> str | list[Any]:
    """A message's content: one text, or text parts and what the media parts refer to."""
    if not any(is_media_part(part) for part in item["content"]):
        return _content_text(item, where)
    made: list[Any] = []
    for i, part in enumerate(item["content"]):
        place = f"{where}.content.{i}"
        if is_media_part(part):
            made.append(media_reference(part, place, ignored))
        else:
            made.append({"type": "text", "text": input_part_text(part, place)})
    return made


def _output(item: Json, where: str, ignored: list[str]) -> tuple[str, list[MediaReference]]:
    """Text of a tool's result, and the media in it."""
    output = item["output"]
    if isinstance(output, str):
        return output, []
    if not isinstance(output, list):
        raise bad_request(f"{where}.output: expected a string or a list of parts", f"{where}.output")
    texts, media = [], []
    for i, part in enumerate(output):
        place = f"{where}.output.{i}"
        if is_media_part(part):
            media.append(media_reference(part, place, ignored))
        else:
            texts.append(input_part_text(part, place))
    return "\n".join(texts), media


def _tool_call(item: Json) -> Json:
    name = item["name"]
    if item.get("namespace"):
        name = flattened(str(item["namespace"]), name)
    if item["type"] == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item["input"]}).decode()
    else:
        arguments = item["arguments"]
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def flattened(namespace: str, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return name if name.startswith(f"{namespace}__") else f"{namespace}__{name}"
