"""What a reply is made of: the pieces parsers find in a model's text, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. `id` and `name` are set in a call's first delta only; calls never interleave."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    is_complete: bool = False
    """Whether this is the call's last delta. A call that was cut or turned out malformed never gets one."""


ToolEvent = ContentDelta | ToolCallDelta
ReplyEvent = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str
    is_complete: bool = True


@dataclass(slots=True)
class ParsedReply:
    """The whole of one choice."""

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a parser may know about the request."""

    prompt_text: str
    prompt_token_ids: Sequence[int]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "none"
    """"none", "auto", "required" or "named"."""
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def merged(events: Sequence[ReplyEvent]) -> ParsedReply:
    """The reply that `events` add up to; content and reasoning are None when nothing of them came."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        else:
            if event.name is not None:
                calls.append(ToolCall(event.id or "", event.name, "", is_complete=False))
                arguments.append([])
            arguments[event.index].append(event.arguments)
            calls[event.index].is_complete |= event.is_complete
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return ParsedReply("".join(content) or None, "".join(reasoning) or None, calls)
