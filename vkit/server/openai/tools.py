"""Tools and tool_choice of a request, checked and brought to one form whatever the route."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vkit.server.problems import bad_request, clip
from vkit.server.schema import Json
from vkit.server.state import ServerState

MAX_NAME_LEN = 64

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may call."""

    tools: tuple[Json, ...] = ()
    """In chat form: {"type": "function", "function": {...}}."""
    choice: str = "none"
    """"none", "auto", "required" or "named"."""
    name: str | None = None
    parallel: bool = True
    offered: tuple[Json, ...] = field(default=())
    """Those shown to the template."""


NO_TOOLS = ToolUse()


def check_tools(tools: list[Json] | None, where: str = "tools") -> tuple[Json, ...]:
    """Tools in chat form.

    Raises:
        Problem: 400 naming the tool.
    """
    if tools is None:
        return ()
    if not tools:
        raise bad_request(f"{where}: must not be an empty list", where)
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise bad_request(f"{where}.{i}.type: only 'function' is supported", f"{where}.{i}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise bad_request(f"{where}.{i}.function: this field is required", f"{where}.{i}.function")
        check_function(function, f"{where}.{i}.function", names)
    return tuple({"type": "function", "function": tool["function"]} for tool in tools)


def check_function(function: Json, where: str, names: set[str], *, max_name_len: int = MAX_NAME_LEN) -> None:
    """Check one function and add its name to `names`.

    Raises:
        Problem: 400 naming the key.
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > max_name_len:
        raise bad_request(
            f"{where}.name: expected 1..{max_name_len} of A-Z a-z 0-9 _ . -, got {clip(name)}", f"{where}.name"
        )
    if name in names:
        raise bad_request(f"{where}.name: {name!r} is given twice", f"{where}.name")
    names.add(name)
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise bad_request(f"{where}.{key}: expected {_KINDS[kind]}", f"{where}.{key}")


_KINDS: dict[type[Any], str] = {str: "a string", dict: "a JSON schema object", bool: "true or false"}


def chat_tool_use(
    state: ServerState, tools: list[Json] | None, choice: str | Json | None, *, parallel: bool
) -> ToolUse:
    """Tools of a chat request.

    Raises:
        Problem: 400 naming the field.
    """
    checked = check_tools(tools)
    if not checked:
        if choice not in (None, "none"):
            raise bad_request("tool_choice: needs tools", "tool_choice")
        return NO_TOOLS
    names = [tool["function"]["name"] for tool in checked]
    kind, name = "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice: expected none, auto, required or a named function, got {clip(choice)!r}", "tool_choice"
            )
        kind = choice
    elif choice is not None:
        kind, name, checked = _choice_object(choice, names, checked)
    return resolved(state, checked, kind, name, parallel)


def _choice_object(choice: Json, names: list[str], tools: tuple[Json, ...]) -> tuple[str, str | None, tuple[Json, ...]]:
    if choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return "named", known_name(name, names, "tool_choice.function.name"), tools
    if choice.get("type") == "allowed_tools":
        return allowed_tools(choice.get("allowed_tools"), names, tools)
    raise bad_request("tool_choice.type: expected 'function' or 'allowed_tools'", "tool_choice.type")


def known_name(name: Any, names: list[str], where: str) -> str:
    """The name of a tool that was given.

    Raises:
        Problem: 400.
    """
    if not isinstance(name, str):
        raise bad_request(f"{where}: this field is required", where)
    if name not in names:
        raise bad_request(f"tool_choice: {clip(name)!r} is none of the tools ({', '.join(names[:10])})", "tool_choice")
    return name


def allowed_tools(allowed: Any, names: list[str], tools: tuple[Json, ...]) -> tuple[str, str | None, tuple[Json, ...]]:
    """A choice among some of the tools.

    Raises:
        Problem: 400.
    """
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise bad_request(f"{where}.mode: expected auto or required", f"{where}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise bad_request(f"{where}.tools: expected a list of tools", f"{where}.tools")
    wanted: set[str] = set()
    for i, item in enumerate(listed):
        function = item.get("function", item) if isinstance(item, dict) else {}
        wanted.add(known_name(function.get("name"), names, f"{where}.tools.{i}.name"))
    return allowed["mode"], None, tuple(tool for tool in tools if tool["function"]["name"] in wanted)


def resolved(state: ServerState, tools: tuple[Json, ...], kind: str, name: str | None, parallel: bool) -> ToolUse:
    """The tools in use, if this server can act on them.

    Raises:
        Problem: 400 when calls could not be forced.
    """
    hidden = kind == "none" and state.settings.exclude_tools_when_tool_choice_none
    return ToolUse(tools, kind, name, parallel, () if hidden else tools)
