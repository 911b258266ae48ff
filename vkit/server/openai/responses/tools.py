"""Tools of a Responses request: what of them the model is shown, and which are free-form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkit.server.call import Call
from vkit.server.openai.responses.items import flattened
from vkit.server.openai.responses.schemas import ResponsesBody
from vkit.server.openai.tools import NO_TOOLS, ToolUse, allowed_tools, check_function, known_name, resolved
from vkit.server.problems import bad_request, clip
from vkit.server.schema import Json

CUSTOM_PARAMETERS: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
MAX_NAME_LEN = 128


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools in use."""

    tool_use: ToolUse
    custom_names: frozenset[str]
    """Tools whose argument is plain text."""
    namespaces: Mapping[str, tuple[str, str]]
    """Name that the model knows -> the namespace and the tool's own name in it."""
    choice: str | Json
    """As the response object echoes it."""


def response_tools(call: Call, body: ResponsesBody) -> ResponseTools:
    """The request's tools in chat form; kinds that run elsewhere are named as ignored.

    Raises:
        Problem: 400 naming the tool.
    """
    tools: list[Json] = []
    custom: set[str] = set()
    names: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}
    for i, tool in enumerate(body.tools or ()):
        _add(call, tool, f"tools.{i}", tools, custom, names, namespaces, namespace=None)
    choice = body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if not tools:
        if choice not in (None, "auto", "none"):
            raise bad_request("tool_choice: needs tools that the model can call", "tool_choice")
        return ResponseTools(NO_TOOLS, frozenset(), {}, "none" if choice == "none" or not body.tools else "auto")
    checked = tuple(tools)
    kind, name = "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(
                f"tool_choice: expected none, auto, required or a named tool, got {clip(choice)!r}", "tool_choice"
            )
        kind = choice
    elif choice is not None:
        listed = [tool["function"]["name"] for tool in tools]
        if choice.get("type") in ("function", "custom"):
            kind, name = "named", known_name(choice.get("name"), listed, "tool_choice.name")
        elif choice.get("type") == "allowed_tools":
            kind, name, checked = allowed_tools(choice, listed, checked)
        else:
            raise bad_request("tool_choice.type: expected function, custom or allowed_tools", "tool_choice.type")
    tool_use = resolved(call.state, checked, kind, name, parallel)
    return ResponseTools(tool_use, frozenset(custom), namespaces, choice if choice is not None else "auto")


def _add(
    call: Call,
    tool: Json,
    where: str,
    tools: list[Json],
    custom: set[str],
    names: set[str],
    namespaces: dict[str, tuple[str, str]],
    *,
    namespace: str | None,
) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        inner, name = tool.get("tools"), tool.get("name")
        if not isinstance(inner, list) or not isinstance(name, str):
            raise bad_request(f"{where}: a namespace needs a name and a list of tools", where)
        for k, item in enumerate(inner):
            if not isinstance(item, dict):
                raise bad_request(f"{where}.tools.{k}: expected an object", f"{where}.tools.{k}")
            _add(call, item, f"{where}.tools.{k}", tools, custom, names, namespaces, namespace=name)
        return
    if kind not in ("function", "custom"):
        call.ignored.append(where)
        return
    name = tool.get("name")
    if namespace is not None and isinstance(name, str):
        inner, name = name, flattened(namespace, name)
        namespaces[name] = (namespace, inner)
    function: Json = {"name": name, "description": tool.get("description")}
    if kind == "custom":
        form = tool.get("format") or {}
        if isinstance(form, dict) and form.get("type", "text") != "text":
            raise bad_request(f"{where}.format: only text is supported", f"{where}.format")
        function["parameters"] = CUSTOM_PARAMETERS
    else:
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
    check_function(function, where, names, max_name_len=MAX_NAME_LEN)
    if kind == "custom":
        custom.add(function["name"])
    tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
