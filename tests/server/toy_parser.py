"""A parser for tests of the routes: <think>…</think>, then text, with <call>name {json}</call> in it.

Written for clarity: it parses the whole text again at each push and gives out the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkit.server.parsing import (
    ContentDelta,
    ParsedReply,
    ReasoningDelta,
    ReplyContext,
    ReplyEvent,
    ToolCall,
    ToolCallDelta,
)
from vkit.types import ReasoningMarks, StructuredOutputs

OPEN, CLOSE = "<call>", "</call>"
END_THINK = "</think>"


class ToyParser:
    def __init__(self, context: ReplyContext) -> None:
        self.context = context
        self.parses_tools = context.tool_choice != "none"
        self.text = ""
        self.sent_reasoning = ""
        self.sent_content = ""
        self.sent_calls: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """One token per byte: the thought and its marks."""
        if not self.text.startswith("<think>"):
            return 0
        end = self.text.find(END_THINK)
        return len(self.text.encode()) if end < 0 else len(self.text[:end].encode()) + len(END_THINK)

    def push(self, text: str, token_ids: Sequence[int]) -> list[ReplyEvent]:
        self.text += text
        return self._news(is_final=False, was_cut=False)

    def finish(self, *, was_cut: bool) -> list[ReplyEvent]:
        return self._news(is_final=True, was_cut=was_cut)

    def parse(self, text: str, token_ids: Sequence[int], *, was_cut: bool) -> ParsedReply:
        self.text = text
        reasoning, content, calls = self._split(is_final=True, was_cut=was_cut)
        return ParsedReply(content or (None if calls else ""), reasoning or None, calls, self.num_reasoning_tokens)

    @property
    def has_only_complete_calls(self) -> bool:
        return bool(self.calls) and all(call.is_complete for call in self.calls)

    def _split(self, *, is_final: bool, was_cut: bool) -> tuple[str, str, list[ToolCall]]:
        text, reasoning = self.text, ""
        if text.startswith("<think>"):
            reasoning, closed, text = text[7:].partition(END_THINK)
            if not closed and not is_final:
                for size in range(1, len(END_THINK)):
                    if reasoning.endswith(END_THINK[:size]):
                        reasoning = reasoning[:-size]
                        break
        elif "<think>".startswith(text) and not is_final:
            return "", "", []
        content, calls = "", []
        while text and self.parses_tools:
            before, found, rest = text.partition(OPEN)
            if not found:
                break
            inner, closed, after = rest.partition(CLOSE)
            name, _, arguments = inner.partition(" ")
            if not closed and is_final:
                return reasoning, content + text, calls
            content += before
            if not closed:
                return reasoning, content, calls
            calls.append(ToolCall(f"call_{len(calls):024x}", name, arguments))
            text = after
        if not is_final and self.parses_tools:
            for size in range(1, len(OPEN)):
                if text.endswith(OPEN[:size]):
                    text = text[:-size]
                    break
        return reasoning, content + text, calls

    def _news(self, *, is_final: bool, was_cut: bool) -> list[ReplyEvent]:
        reasoning, content, self.calls = self._split(is_final=is_final, was_cut=was_cut)
        events: list[ReplyEvent] = []
        if reasoning != self.sent_reasoning:
            events.append(ReasoningDelta(reasoning[len(self.sent_reasoning) :]))
        if content != self.sent_content:
            events.append(ContentDelta(content[len(self.sent_content) :]))
        for index, call in enumerate(self.calls[len(self.sent_calls) :], start=len(self.sent_calls)):
            events.append(ToolCallDelta(index, "", call.id, call.name))
            half = len(call.arguments) // 2
            events.append(ToolCallDelta(index, call.arguments[:half]))
            events.append(ToolCallDelta(index, call.arguments[half:]))
            self.sent_calls.append(call.id)
        self.sent_reasoning, self.sent_content = reasoning, content
        return events


class ToyParsers:
    parses_tools = True
    parses_reasoning = True

    def needs_special_tokens(self, context: ReplyContext) -> bool:
        return False

    def starts_reasoning(self, context: ReplyContext) -> bool:
        return True

    def reasoning_marks(self, context: ReplyContext) -> ReasoningMarks | None:
        return ReasoningMarks(END_THINK, "<think>")

    def forced_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        if context.tool_choice not in ("required", "named"):
            return None
        return StructuredOutputs(regex=r"<call>[a-z_]+ \{[^}]*\}</call>", begins_after=self.reasoning_marks(context))

    def strict_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        return None

    def open(self, context: ReplyContext) -> ToyParser:
        return ToyParser(context)
