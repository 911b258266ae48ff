"""What every reasoning parser is (`ReasoningParser`), and the base that parsers are written on (`ReasoningReader`)."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Protocol

from vkit.parsers.events import ContentDelta, ReasoningDelta
from vkit.parsers.scan import Cut, Malformed, Reader, Steps, marks_of

ReasoningEvent = ReasoningDelta | ContentDelta

_TURN = re.compile(r"<\|[^<>|]*\|>|<｜[^<>｜]*｜>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|<[^<>\s]*:(?:bos|eos)>")
"""Strings that begin or end a turn in the templates there are."""


class Opening(Enum):
    """Where the prompt left the model."""

    UNKNOWN = "unknown"
    """The prompt says nothing: the parser's own habit holds."""
    THINKING = "thinking"
    """The prompt opened the block."""
    ANSWERING = "answering"
    """The prompt closed the block."""


class ReasoningParser(Protocol):
    """Splits one text into thoughts and answer. Made anew for each choice of each request."""

    names: ClassVar[tuple[str, ...]]
    """What `--reasoning-parser` calls it."""
    start: ClassVar[str]
    end: ClassVar[str]
    """Marks around the thoughts, as a prompt may hold them; empty: there are none."""
    marker: ClassVar[str | None]
    """A chat template that holds this string gets this parser under `auto`; None: it must be named."""
    marker_order: ClassVar[int]
    """Which marker is looked for first: the smallest."""
    may_start_late: ClassVar[bool]
    """Whether thoughts may follow a part of the answer."""

    def __init__(self, opening: Opening = Opening.UNKNOWN, variables: Mapping[str, Any] | None = None) -> None: ...

    def push(self, text: str) -> list[ReasoningEvent]:
        """What the new text adds."""

    def finish(self) -> list[ReasoningEvent]:
        """What was held back."""

    def parse(self, text: str) -> tuple[str | None, str | None]:
        """(thoughts, answer) of a whole text."""

    @property
    def has_ended(self) -> bool:
        """Whether whatever comes is answer: a grammar applies, calls are calls."""

    @property
    def is_undecided(self) -> bool:
        """Before any text: whether only a start mark would begin thoughts."""


class ReasoningReader(Reader[ReasoningEvent]):
    """Base of the parsers. A subclass writes `read` from the steps of `Reader` and those below."""

    names: ClassVar[tuple[str, ...]] = ()
    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    marker: ClassVar[str | None] = None
    marker_order: ClassVar[int] = 1000
    needs_start: ClassVar[bool] = False
    """Whether a text without a start mark is answer."""
    may_start_late: ClassVar[bool] = False

    def __init__(self, opening: Opening = Opening.UNKNOWN, variables: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.opening = opening
        self.variables = variables or {}
        self.has_ended = self.starts_ended()
        self._is_thinking = False

    def starts_ended(self) -> bool:
        """Whether there are no thoughts to come, before any text."""
        return self.opening is Opening.ANSWERING

    @property
    def is_undecided(self) -> bool:
        """Before any text: whether only a start mark would begin thoughts."""
        return self.needs_start and self.opening is Opening.UNKNOWN

    @abstractmethod
    def read(self) -> Steps[None]:
        """The parser's grammar; what is left when it returns is answer."""

    def parse(self, text: str) -> tuple[str | None, str | None]:
        """(thoughts, answer) of a whole text."""
        self._is_whole = True
        thoughts: list[str] = []
        answer: list[str] = []
        for event in self.push(text) + self.finish():
            (thoughts if isinstance(event, ReasoningDelta) else answer).append(event.text)
        return "".join(thoughts) or None, "".join(answer) or None

    # What grammars deliver

    def say(self, text: str) -> None:
        """Deliver answer."""
        events = self._events
        if events and isinstance(events[-1], ContentDelta):
            text = events.pop().text + text
        events.append(ContentDelta(text))

    def think(self, text: str) -> None:
        """Deliver thoughts."""
        if text:
            self._events.append(ReasoningDelta(text))
        self.commit()

    def fail(self, error: Malformed) -> None:
        """Deliver what is pending: thoughts while there are any, else answer."""
        if isinstance(error, Cut) and self._is_thinking:
            self._pos = len(self._text)
            self.think(self.pending())
        else:
            self.say_pending()

    # Steps

    def swallow_start(self) -> Steps[None]:
        """Consume white space and a start mark that come next; neither, when no mark does."""
        yield from self.space()
        if (yield from self.accept(self.start)) is not None:
            self.commit()

    def thoughts(self) -> Steps[None]:
        """Deliver thoughts up to the end mark, and drop it.

        Raises:
            Cut: there is none.
        """
        self.begin_thoughts()
        yield from self.until(marks_of(self.end), self.think)
        self.end_thoughts()

    def begin_thoughts(self) -> None:
        """What comes from here on is thoughts, pending text included."""
        self._is_thinking = True
        self.has_ended = False
        self.think(self.pending())

    def end_thoughts(self) -> None:
        """What comes from here on is answer; pending text was the mark."""
        self._is_thinking = False
        self.has_ended = True
        self.commit()


def opening_of(prompt: str, parser: type[ReasoningParser]) -> Opening:
    """Where `prompt` left the model: the last mark after the last turn began says it."""
    start, end = parser.start, parser.end
    if not start and not end:
        return Opening.UNKNOWN
    turns = [match.end() for match in _TURN.finditer(prompt) if match[0] not in (start, end)]
    tail = prompt[turns[-1] :] if turns else prompt
    opened = tail.rfind(start) if start else -1
    closed = tail.rfind(end) if end else -1
    if opened < 0 and closed < 0:
        return Opening.UNKNOWN
    last, mark = max((opened, start), (closed, end))
    # Without a turn boundary an older turn may hold the mark: then it counts only at the very end.
    if not turns and tail[last + len(mark) :].strip():
        return Opening.UNKNOWN
    return Opening.THINKING if opened > closed else Opening.ANSWERING
