"""Where tool-call and reasoning parsers plug in: what the routes ask of them.

The parsers themselves live in vkit.parsers; the routes know only these protocols and the pieces a reply is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vkit.parsers.events import (
    ContentDelta,
    ParsedReply,
    ReasoningDelta,
    ReplyContext,
    ReplyEvent,
    ToolCall,
    ToolCallDelta,
)
from vkit.types import ReasoningMarks, StructuredOutputs

__all__ = [
    "ContentDelta",
    "ParsedReply",
    "ReasoningDelta",
    "ReplyContext",
    "ReplyEvent",
    "ReplyParser",
    "ReplyParsers",
    "ToolCall",
    "ToolCallDelta",
]


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

    def needs_special_tokens(self, context: ReplyContext) -> bool:
        """Whether the text must hold special tokens, because marks may be among them."""

    def starts_reasoning(self, context: ReplyContext) -> bool:
        """Whether the reply may begin with thoughts."""

    def reasoning_marks(self, context: ReplyContext) -> ReasoningMarks | None:
        """The marks that a constraint on the answer has to wait for; None: there are no thoughts to come."""

    def forced_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        """What the output must be for a forced choice to hold, after the thoughts; None: the choice forces nothing.

        Raises:
            InvalidRequest: the family's syntax cannot be enforced.
        """

    def strict_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        """What keeps calls to `strict` tools to their schemas where the model chooses freely; None: nothing does."""

    def open(self, context: ReplyContext) -> ReplyParser:
        """A parser for one choice."""
