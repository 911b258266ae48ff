"""Where tool-call and reasoning parsers plug in: what they are given, and what the routes get from them.

A parser turns the raw text of one choice into reasoning, content and tool calls, streamed or whole. The routes know
only these types; the parsers themselves live elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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


ReplyEvent = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(slots=True)
class ToolCall:
    """One complete call. `arguments` is JSON text."""

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


class ReplyParser(Protocol):
    """Parses one choice of one request; made anew for each."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning pushed so far."""

    def push(self, text: str, token_ids: Sequence[int]) -> list[ReplyEvent]:
        """What the new text adds."""

    def finish(self, *, was_cut: bool) -> list[ReplyEvent]:
        """What was held back. `was_cut`: the token limit ended the text."""

    def parse(self, text: str, token_ids: Sequence[int], *, was_cut: bool) -> ParsedReply:
        """The whole text at once; agrees with the pushed events."""

    @property
    def has_only_complete_calls(self) -> bool:
        """Whether at least one call was pushed, and every one is complete."""


class ReplyParsers(Protocol):
    """The parsers an operator chose."""

    @property
    def parses_tools(self) -> bool:
        """Whether tool calls are recognised."""

    @property
    def parses_reasoning(self) -> bool:
        """Whether reasoning is recognised."""

    def open(self, context: ReplyContext) -> ReplyParser:
        """A parser for one choice."""


class PlainReply:
    """The parser of a server without parsers: everything is content."""

    num_reasoning_tokens = 0
    has_only_complete_calls = False

    def push(self, text: str, token_ids: Sequence[int]) -> list[ReplyEvent]:
        """The text as content."""
        return [ContentDelta(text)] if text else []

    def finish(self, *, was_cut: bool) -> list[ReplyEvent]:
        """Nothing: no text is ever held back."""
        return []

    def parse(self, text: str, token_ids: Sequence[int], *, was_cut: bool) -> ParsedReply:
        """The text as content."""
        return ParsedReply(text)


class PlainParsers:
    """No parsers."""

    parses_tools = False
    parses_reasoning = False

    def open(self, context: ReplyContext) -> ReplyParser:
        """A parser that finds only content."""
        return PlainReply()
