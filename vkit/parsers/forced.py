"""Calls that the request forces: what the output is constrained to, and how plain JSON becomes calls.

Source: the project's parser contract, section A.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.scan import Steps
from vkit.parsers.tool_reader import Forcing, ToolParser

Tool = Mapping[str, Any]

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a tool that states none."""
MAX_NUMBERED_CALLS = 8
"""Most calls that a forced choice allows where the syntax numbers them."""
_DEFINITIONS = ("$defs", "definitions")


class NamedCall(JsonCalls):
    """The whole text is the arguments of one call."""

    def __init__(self, tools: Sequence[Tool], name: str) -> None:
        self._name = name
        super().__init__(tools)

    def read(self) -> Steps[None]:
        """One object."""
        yield from self.arguments(self._name)
        self.close_call()
        yield from self.space()


class RequiredCalls(JsonCalls):
    """The whole text is an array of {"name", "parameters"}."""

    argument_keys = ("parameters", "arguments")

    def read(self) -> Steps[None]:
        """One array."""
        yield from self.call_array()
        self.commit()
        yield from self.space()


def forcing_of(parser: type[ToolParser] | None) -> Forcing:
    """How a forced choice is made to hold beside `parser`."""
    return Forcing.JSON if parser is None else getattr(parser, "forcing", Forcing.JSON)


def forced_schema(tools: Sequence[Tool], name: str | None = None, *, parallel: bool = True) -> dict[str, Any]:
    """JSON schema of the output that `NamedCall` (a `name` is given) or `RequiredCalls` reads.

    Definitions of the tools stand at its root, renamed where two tools' names meet.
    """
    if name is not None:
        return dict(next(_parameters(tool) for tool in tools if tool["function"]["name"] == name))
    definitions: dict[str, Any] = {}
    branches = [_branch(tool, definitions) for tool in tools]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": branches[0] if len(branches) == 1 else {"anyOf": branches},
    }
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def forced_tags(
    parser: type[ToolParser], tools: Sequence[Tool], name: str | None = None, *, parallel: bool = True
) -> dict[str, Any]:
    """Structural tag of calls in the family's own syntax: one call to `name`, or at least one to any tool."""
    if name is None and parallel:
        numbered = _numbered_tags(parser, tools)
        if numbered is not None:
            return numbered
    tags: list[dict[str, Any]] = []
    for tool in tools:
        tool_name = tool["function"]["name"]
        around = parser.native_tags(tool_name) if name in (None, tool_name) else None
        if around is not None:
            content = {"type": "json_schema", "json_schema": _parameters(tool)}
            tags.append({"type": "tag", "begin": around[0], "content": content, "end": around[1]})
    separator = parser.native_separator
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator or "",
        "at_least_one": True,
        "stop_after_first": name is not None or separator is None or not parallel,
    }
    before, after = ({"type": "const_string", "value": text} for text in parser.native_block)
    elements = [calls] if not any(parser.native_block) else [before, calls, after]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def _numbered_tags(parser: type[ToolParser], tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Structural tag of one call to any tool or several, numbered from 0; None: the family numbers none."""
    tags_at = getattr(parser, "native_tags_at", None)
    if tags_at is None or tags_at(tools[0]["function"]["name"], 0) is None:
        return None
    rest: dict[str, Any] | None = None
    for index in reversed(range(MAX_NUMBERED_CALLS)):
        calls = []
        for tool in tools:
            around = tags_at(tool["function"]["name"], index)
            content = {"type": "json_schema", "json_schema": _parameters(tool)}
            calls.append({"type": "tag", "begin": around[0], "content": content, "end": around[1]})
        elements: list[dict[str, Any]] = [{"type": "or", "elements": calls}]
        if rest is not None:
            elements.append({"type": "or", "elements": [rest, {"type": "const_string", "value": ""}]})
        rest = {"type": "sequence", "elements": elements}
    assert rest is not None
    before, after = ({"type": "const_string", "value": text} for text in parser.native_block)
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [before, rest, after]}}


def forced_calls(
    parser: type[ToolParser], tools: Sequence[Tool], name: str | None = None, *, parallel: bool = True
) -> dict[str, Any] | None:
    """Structural tag of whole calls as `native_call` writes them: one to `name`, or at least one to any tool.

    None: the family has no such form.

    Raises:
        InvalidRequest: a tool's schema cannot be enforced in this syntax.
    """
    native_call = getattr(parser, "native_call", None)
    wanted = [tool for tool in tools if name in (None, tool["function"]["name"])]
    nodes = [native_call(tool) for tool in wanted] if native_call is not None else []
    if not nodes or None in nodes:
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": "", "content": node, "end": ""} for node in nodes],
        "separator": parser.native_separator or "",
        "at_least_one": True,
        "stop_after_first": name is not None or not parallel,
    }
    return {"type": "structural_tag", "format": calls}


def strict_tags(parser: type[ToolParser], tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Structural tag of free text in which every call follows the family's syntax, and a `strict` tool's its schema.

    None: no tool is strict, or the family has no tags that tell where a call begins.
    """
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    tags: list[dict[str, Any]] = []
    for tool in tools:
        around = parser.native_tags(tool["function"]["name"])
        if around is None:
            return None
        schema = _parameters(tool) if tool["function"].get("strict") else {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": around[0], "content": content, "end": around[1]})
    before, after = parser.native_block
    if before:
        calls: dict[str, Any] = {"type": "tags_with_separator", "tags": tags}
        calls |= {"separator": parser.native_separator or "", "stop_after_first": parser.native_separator is None}
        calls["at_least_one"] = True
        tags, trigger = [{"type": "tag", "begin": before, "content": calls, "end": after}], before
    else:
        begins = [tag["begin"] for tag in tags]
        marker = parser.marker or ""
        trigger = marker if all(begin.startswith(marker) for begin in begins) else _common_start(begins)
    if not trigger:
        return None
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}


def _common_start(texts: Sequence[str]) -> str:
    """The longest text that all begin with."""
    common = min(texts, key=len)
    while not all(text.startswith(common) for text in texts):
        common = common[:-1]
    return common


def _parameters(tool: Tool) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, Mapping) and parameters else NO_PARAMETERS


def _branch(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    name = tool["function"]["name"]
    parameters = _parameters(tool)
    renamed: dict[str, str] = {}
    for group in _DEFINITIONS:
        found = parameters.get(group)
        for key in found if isinstance(found, Mapping) else ():
            renamed[f"#/{group}/{key}"] = _free_name(key, name, {**definitions, **dict.fromkeys(renamed.values())})
    whole = _free_name(name, "parameters", {**definitions, **dict.fromkeys(renamed.values())})
    body = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    moved = _Mover(renamed, whole)
    schema = moved.schema(body)
    for group in _DEFINITIONS:
        found = parameters.get(group)
        for key, value in found.items() if isinstance(found, Mapping) else ():
            definitions[renamed[f"#/{group}/{key}"]] = moved.schema(value)
    if moved.needs_whole:
        definitions[whole] = schema
        schema = {"$ref": f"#/$defs/{whole}"}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _free_name(wanted: str, prefix: str, taken: Mapping[str, Any]) -> str:
    while wanted in taken:
        wanted = f"{prefix}.{wanted}"
    return wanted


class _Mover:
    """Rewrites references inside one tool's schema for the place it moves to."""

    def __init__(self, renamed: Mapping[str, str], whole: str) -> None:
        self._renamed = renamed
        self._whole = whole
        self.needs_whole = False
        """Whether something refers to the schema's root."""

    def schema(self, node: Any) -> Any:
        """A copy of `node` whose references hold at the new place."""
        if isinstance(node, Mapping):
            return {
                key: self._reference(value) if key == "$ref" and isinstance(value, str) else self.schema(value)
                for key, value in node.items()
            }
        if isinstance(node, list):
            return [self.schema(item) for item in node]
        return node

    def _reference(self, reference: str) -> str:
        for old, new in self._renamed.items():
            if reference == old or reference.startswith(old + "/"):
                return f"#/$defs/{new}{reference[len(old) :]}"
        if reference.startswith("#"):
            self.needs_whole = True
            return f"#/$defs/{self._whole}{reference[1:]}"
        return reference
