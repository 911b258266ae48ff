"""One choice's text as the routes want it: thoughts first, then content and calls, streamed or whole."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import cast

from vkit.errors import InvalidRequest
from vkit.parsers.events import (
    ContentDelta,
    ParsedReply,
    ReasoningDelta,
    ReplyContext,
    ReplyEvent,
    ToolCallDelta,
)
from vkit.parsers.forced import (
    NamedCall,
    RequiredCalls,
    forced_calls,
    forced_schema,
    forced_tags,
    forcing_of,
    strict_tags,
)
from vkit.parsers.reasoning_reader import ReasoningParser, opening_of
from vkit.parsers.registry import reasoning_parser_for, tool_parser_for
from vkit.parsers.tool_reader import Forcing, ToolParser
from vkit.types import ReasoningMarks, StructuredOutputs

TextOf = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""


class OutputParser:
    """Parses one choice of one request; made anew for each."""

    def __init__(
        self,
        tool_parser: ToolParser | None,
        reasoning_parser: ReasoningParser | None,
        *,
        is_forced: bool = False,
        parallel: bool = True,
        text_of: TextOf | None = None,
    ) -> None:
        self._tools = tool_parser
        self._reasoning = reasoning_parser
        self._is_forced = is_forced
        self._parallel = parallel
        self._counter = _ReasoningTokens(reasoning_parser, text_of)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thoughts pushed so far, marks included."""
        return self._counter.count

    @property
    def has_only_complete_calls(self) -> bool:
        """Whether at least one call was pushed, and every one is complete."""
        return self._tools is not None and self._tools.has_only_complete_calls

    @property
    def has_reasoning_ended(self) -> bool:
        """Whether whatever comes is answer, so that a grammar applies."""
        return self._reasoning is None or self._reasoning.has_ended

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[ReplyEvent]:
        """What the new text adds."""
        if self._reasoning is None:
            return self._answer(text)
        was_ended = self._reasoning.has_ended
        events: list[ReplyEvent] = []
        for event in self._reasoning.push(text):
            events += [event] if isinstance(event, ReasoningDelta) else self._answer(event.text)
        self._counter.note(token_ids, was_ended, any(isinstance(event, ReasoningDelta) for event in events))
        return events

    def finish(self, *, was_cut: bool = False) -> list[ReplyEvent]:
        """What was held back. `was_cut`: the token limit ended the text."""
        events: list[ReplyEvent] = []
        for event in self._reasoning.finish() if self._reasoning is not None else ():
            if isinstance(event, ReasoningDelta):
                events.append(event)
                self._counter.saw_thoughts()
            else:
                events += self._answer(event.text)
        if self._tools is not None:
            events += self._kept(self._tools.finish(was_cut=was_cut))
        return events

    def parse(self, text: str, token_ids: Sequence[int] = (), *, was_cut: bool = False) -> ParsedReply:
        """The whole text at once."""
        thoughts: str | None = None
        answer: str | None = text
        if self._reasoning is not None and text:
            was_ended = self._reasoning.has_ended
            thoughts, answer = self._reasoning.parse(text)
            self._counter.note(token_ids, was_ended, thoughts is not None)
        reply = ParsedReply(answer)
        if self._tools is not None and answer:
            reply = self._tools.parse(answer, was_cut=was_cut, is_forced=self._is_forced)
            if reply.tool_calls and not (reply.content or "").strip():
                reply.content = None
            if not self._parallel:
                del reply.tool_calls[1:]
        reply.reasoning = thoughts
        reply.num_reasoning_tokens = self.num_reasoning_tokens
        return reply

    def _answer(self, text: str) -> list[ReplyEvent]:
        if self._tools is None:
            return [ContentDelta(text)] if text else []
        return self._kept(self._tools.push(text))

    def _kept(self, events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
        if self._parallel:
            return list(events)
        return [event for event in events if not isinstance(event, ToolCallDelta) or event.index == 0]


class _ReasoningTokens:
    """Counts the tokens of thoughts, so that a text pushed token by token and a whole one give the same number."""

    def __init__(self, parser: ReasoningParser | None, text_of: TextOf | None) -> None:
        self._parser = parser
        self._text_of = text_of
        self._ids: list[int] = []
        self._num_undecided = 0
        self._has_thoughts = False
        self.count = 0

    def note(self, token_ids: Sequence[int], was_ended: bool, has_thoughts: bool) -> None:
        """Take note of tokens whose text was parsed; `was_ended`: no thoughts were expected before them."""
        parser = self._parser
        assert parser is not None
        if has_thoughts:
            self.saw_thoughts()
        if was_ended and parser.has_ended and not has_thoughts:
            return
        self._add(len(token_ids) if not parser.has_ended else self._num_to_end(token_ids, parser.end))
        self._ids += token_ids

    def saw_thoughts(self) -> None:
        """What was undecided so far was part of thoughts."""
        self._has_thoughts = True
        self.count += self._num_undecided
        self._num_undecided = 0

    def _add(self, num: int) -> None:
        if self._has_thoughts:
            self.count += num
        else:
            self._num_undecided += num

    def _num_to_end(self, token_ids: Sequence[int], end: str) -> int:
        """How many of the newest tokens it takes to complete the end mark."""
        text_of = self._text_of
        if len(token_ids) < 2 or text_of is None:
            return len(token_ids)
        return 1 + bisect_left(
            range(1, len(token_ids)), True, key=lambda num: end in text_of([*self._ids, *token_ids[:num]])
        )


class OutputParsers:
    """The parsers an operator chose."""

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        reasoning_parser: type[ReasoningParser] | None,
        *,
        text_of: TextOf | None = None,
    ) -> None:
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._text_of = text_of

    @property
    def parses_tools(self) -> bool:
        """Whether tool calls are recognised."""
        return self.tool_parser is not None

    @property
    def parses_reasoning(self) -> bool:
        """Whether reasoning is recognised."""
        return self.reasoning_parser is not None

    @property
    def forcing(self) -> Forcing:
        """How a forced choice is made to hold."""
        return forcing_of(self.tool_parser)

    def needs_special_tokens(self, context: ReplyContext) -> bool:
        """Whether the text must hold special tokens, because marks may be among them."""
        return self.parses_reasoning or self._opened_tools(context) is not None

    def starts_reasoning(self, context: ReplyContext) -> bool:
        """Whether the reply may begin with thoughts."""
        reasoning = self._opened_reasoning(context)
        return reasoning is not None and not reasoning.has_ended

    def reasoning_marks(self, context: ReplyContext) -> ReasoningMarks | None:
        """The marks that a constraint on the answer has to wait for; None: there are no thoughts to come."""
        reasoning = self._opened_reasoning(context)
        if reasoning is None or reasoning.has_ended or not reasoning.end:
            return None
        if reasoning.is_undecided:
            return ReasoningMarks(
                reasoning.end, reasoning.start, may_start_late=getattr(reasoning, "may_start_late", False)
            )
        return ReasoningMarks(reasoning.end, repeated=reasoning.start or None)

    def forced_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        """What the output must be for a forced choice to hold, after the thoughts; None: the choice forces nothing.

        Raises:
            InvalidRequest: the family's syntax cannot be enforced.
        """
        if context.tool_choice not in ("required", "named"):
            return None
        name = context.tool_name if context.tool_choice == "named" else None
        marks, parallel = self.reasoning_marks(context), context.parallel_tool_calls
        if self.forcing is Forcing.JSON:
            schema = forced_schema(context.tools, name, parallel=parallel)
            return StructuredOutputs(json=schema, begins_after=marks)
        if self.forcing is Forcing.TAGS and self.tool_parser is not None:
            tags = forced_tags(self.tool_parser, context.tools, name, parallel=parallel)
            return StructuredOutputs(structural_tag=tags, begins_after=marks)
        if self.forcing is Forcing.SYNTAX and self.tool_parser is not None:
            calls = forced_calls(self.tool_parser, context.tools, name, parallel=parallel)
            if calls is not None:
                return StructuredOutputs(structural_tag=calls, begins_after=marks)
        raise InvalidRequest(
            f"tool_choice: no call can be forced in the syntax of {self._family()}", param="tool_choice"
        )

    def strict_constraint(self, context: ReplyContext) -> StructuredOutputs | None:
        """What keeps calls to `strict` tools to their schemas where the model chooses freely; None: nothing does."""
        if context.tool_choice != "auto" or self.tool_parser is None:
            return None
        tags = strict_tags(self.tool_parser, context.tools)
        return (
            None if tags is None else StructuredOutputs(structural_tag=tags, begins_after=self.reasoning_marks(context))
        )

    def _family(self) -> str:
        return self.tool_parser.names[0] if self.tool_parser is not None else "none"

    def open(self, context: ReplyContext) -> OutputParser:
        """A parser for one choice."""
        return OutputParser(
            self._opened_tools(context),
            self._opened_reasoning(context),
            is_forced=context.tool_choice in ("required", "named"),
            parallel=context.parallel_tool_calls,
            text_of=self._text_of,
        )

    def _opened_tools(self, context: ReplyContext) -> ToolParser | None:
        if not context.tools or context.tool_choice == "none":
            return None
        if context.tool_choice != "auto" and self.forcing is Forcing.JSON:
            if context.tool_choice == "named":
                return cast(ToolParser, NamedCall(context.tools, context.tool_name or ""))
            return cast(ToolParser, RequiredCalls(context.tools))
        return None if self.tool_parser is None else self.tool_parser(context.tools)

    def _opened_reasoning(self, context: ReplyContext) -> ReasoningParser | None:
        parser = self.reasoning_parser
        if parser is None:
            return None
        return parser(opening_of(context.prompt_text or "", parser), context.chat_template_kwargs)


def open_parsers(
    tool_call_parser: str = "hermes",
    reasoning_parser: str = "none",
    *,
    chat_template: str | None = None,
    text_of: TextOf | None = None,
) -> OutputParsers:
    """The parsers called so; `auto` asks the chat template.

    Raises:
        UsageError: no such parser.
    """
    return OutputParsers(
        tool_parser_for(tool_call_parser, chat_template),
        reasoning_parser_for(reasoning_parser, chat_template),
        text_of=text_of,
    )
