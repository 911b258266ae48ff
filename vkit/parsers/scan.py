"""Reading text that arrives in pieces as if it were all there.

A `Reader` is a grammar written as straight-line generator code: each step consumes what it recognises and yields when
it needs text that has not arrived. So one description of a family serves streams and whole texts, and gives the same
result however the text is cut. What has been consumed but not delivered is *pending*; a grammar that meets something it
cannot be raises `Malformed`, and the pending text is then given out as what it is: text.

Every character is looked at a bounded number of times, so the work is linear in the length of the text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E")

Steps = Generator[None, None, T]
"""Grammar code: yields while it waits for more text."""

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the grammar describes."""


class Cut(Malformed):
    """The text ended where the grammar needs more."""


class Marks:
    """Fixed strings to look for; of two that start at one place the longer wins."""

    def __init__(self, *marks: str) -> None:
        self.marks = tuple(sorted(marks, key=len, reverse=True))
        self.max_len = len(self.marks[0])
        self._search = re.compile("|".join(map(re.escape, self.marks))).search
        self._prefixes = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._first = re.compile("[" + "".join(re.escape(mark[0]) for mark in marks) + "]").search

    def find(self, text: str, start: int, *, is_ended: bool) -> tuple[int, str | None]:
        """(where the next mark starts, the mark), or (where text that may become one starts, None).

        A mark that more text could make a longer one is not found yet.
        """
        match = self._search(text, start)
        if match is None:
            return (len(text) if is_ended else len(text) - self._held(text, start)), None
        begin = match.start()
        if not is_ended and len(text) - begin < self.max_len and text[begin:] in self._prefixes:
            return begin, None
        return begin, match[0]

    def _held(self, text: str, start: int) -> int:
        """Length of the longest end of the text that a mark may start with."""
        size = len(text)
        match = self._first(text, max(start, size - self.max_len + 1))
        while match is not None:
            if text[match.start() :] in self._prefixes:
                return size - match.start()
            match = self._first(text, match.end())
        return 0


class Reader(ABC, Generic[E]):
    """A grammar at work on one text. Feed it with `push`, end with `finish`; both return what became certain."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._pieces: list[str] = []
        self._pending_from = 0
        self._is_ended = False
        self._is_whole = False
        self._steps: Steps[None] | None = self.read()
        self._events: list[E] = []

    @abstractmethod
    def read(self) -> Steps[None]:
        """The grammar. When it returns, the rest of the text is plain."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Deliver plain text."""

    @abstractmethod
    def fail(self, error: Malformed) -> None:
        """Deliver what can be of a text that is not what the grammar describes. Pending text must not be lost."""

    def push(self, text: str) -> list[E]:
        """What the new text adds."""
        if not text:
            return []
        if self._steps is None:
            self.say(text)
            events, self._events = self._events, []
            return events
        pos = self._pos
        if self._pending_from < pos:
            self._pieces.append(self._text[self._pending_from : pos])
        self._text = self._text[pos:] + text if pos < len(self._text) else text
        self._pos = self._pending_from = 0
        return self._advance()

    def finish(self) -> list[E]:
        """What was held back."""
        if self._is_ended:
            return []
        self._is_ended = True
        return self._advance()

    def _advance(self) -> list[E]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
                self.say_pending()
            except Malformed as error:
                self._steps = None
                self.fail(error)
        if self._steps is None and self._pos < len(self._text):
            self.say(self._text[self._pos :])
            self._pos = len(self._text)
            self.commit()
        events, self._events = self._events, []
        return events

    # What was consumed and not delivered

    def commit(self) -> None:
        """Pending text needs no more keeping: it was delivered, or is markup of something delivered."""
        self._pieces.clear()
        self._pending_from = self._pos

    def pending(self) -> str:
        """Text consumed since the last `commit`."""
        here = self._text[self._pending_from : self._pos]
        return "".join(self._pieces) + here if self._pieces else here

    def mark(self) -> tuple[int, int]:
        """A place to come back to with `since`, until the next `commit`."""
        return len(self._pieces), self._pos - self._pending_from

    def since(self, mark: tuple[int, int]) -> str:
        """Text consumed since `mark`."""
        index, offset = mark
        pieces = [*self._pieces[index:], self._text[self._pending_from : self._pos]]
        return "".join(pieces)[offset:]

    def say_pending(self) -> None:
        """Deliver pending text as plain text."""
        text = self.pending()
        if text:
            self.say(text)
        self.commit()

    # Steps

    def more(self) -> Steps[None]:
        """Wait for text.

        Raises:
            Cut: there is no more.
        """
        if self._is_ended:
            raise Cut
        yield

    def space(self) -> Steps[bool]:
        """Consume white space; whether text follows."""
        while True:
            match = _SPACE.match(self._text, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos < len(self._text):
                return True
            if self._is_ended:
                return False
            yield

    def solid(self) -> Steps[str]:
        """Consume white space; the character that follows, not consumed."""
        while not (yield from self.space()):
            yield from self.more()
        return self._text[self._pos]

    def peek(self) -> Steps[str]:
        """The next character, not consumed; empty at the end."""
        while self._pos >= len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._pos]

    def accept(self, *choices: str) -> Steps[str | None]:
        """Consume whichever of `choices` comes next; the longest, if several do. None: none of them does."""
        while True:
            rest = self._text[self._pos : self._pos + max(map(len, choices))]
            if not self._is_ended and any(len(rest) < len(choice) and choice.startswith(rest) for choice in choices):
                yield
                continue
            found = max((choice for choice in choices if rest.startswith(choice)), key=len, default=None)
            self._pos += len(found or "")
            return found

    def expect(self, *choices: str) -> Steps[str]:
        """Consume one of `choices`.

        Raises:
            Malformed: something else comes.
        """
        found = yield from self.accept(*choices)
        if found is None:
            raise Cut if self._rest_starts(*choices) else Malformed(f"expected {' or '.join(choices)}")
        return found

    def expect_or_end(self, *choices: str) -> Steps[str]:
        """Consume one of `choices`; where the text ends, what there is of the first counts as all of it.

        Raises:
            Malformed: something else comes.
        """
        try:
            return (yield from self.expect(*choices))
        except Cut:
            if not self._rest_starts(choices[0]):
                raise
            self._pos = len(self._text)
            return choices[0]

    def _rest_starts(self, *choices: str) -> bool:
        rest = self._text[self._pos :]
        return self._is_ended and any(choice.startswith(rest) for choice in choices)

    def run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Consume while characters match `pattern`, a character class under a star; stops at the end too."""
        while True:
            match = pattern.match(self._text, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos < len(self._text) or self._is_ended:
                return
            yield

    def until(self, marks: Marks, sink: Callable[[str], None]) -> Steps[str]:
        """Consume up to and with one of `marks`; it. The text before goes to `sink` piece by piece.

        Raises:
            Cut: no mark came. What could be the start of one is left unconsumed.
        """
        while True:
            end, found = marks.find(self._text, self._pos, is_ended=self._is_ended)
            is_over = self._is_ended and found is None
            if is_over:
                end, _ = marks.find(self._text, self._pos, is_ended=False)
            if end > self._pos:
                piece = self._text[self._pos : end]
                self._pos = end
                sink(piece)
            if found is not None:
                self._pos += len(found)
                return found
            if is_over:
                raise Cut
            yield

    def take_until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Consume up to and with one of `marks`: (text before it, the mark).

        Raises:
            Cut: no mark came.
        """
        pieces: list[str] = []
        found = yield from self.until(marks_of(*marks), pieces.append)
        return "".join(pieces), found

    def prose(self, *marks: str) -> Steps[str | None]:
        """Deliver text up to one of `marks`; the mark, consumed but pending, or None at the end.

        White space before the mark stays pending too: it goes when a call follows, and comes back when none does.
        """
        wanted = marks_of(*marks)
        while True:
            end, found = wanted.find(self._text, self._pos, is_ended=self._is_ended)
            visible = len(self._text[self._pos : end].rstrip()) + self._pos if end > self._pos else end
            if visible > self._pos:
                self._pos = visible
                self.say_pending()
            self._pos = end
            if found is not None:
                self._pos += len(found)
                return found
            if self._is_ended:
                self.say_pending()
                return None
            yield

    def drop(self, *marks: str) -> Steps[str | None]:
        """Discard text up to one of `marks` (the whole rest without any); the mark, consumed but pending."""
        if not marks:
            while True:
                self._pos = len(self._text)
                self.commit()
                if self._is_ended:
                    return None
                yield
        wanted = marks_of(*marks)
        while True:
            end, found = wanted.find(self._text, self._pos, is_ended=self._is_ended)
            self._pos = end
            self.commit()
            if found is not None:
                self._pos += len(found)
                return found
            if self._is_ended:
                return None
            yield


@lru_cache(maxsize=1024)
def marks_of(*marks: str) -> Marks:
    """`Marks` of these strings, made once."""
    return Marks(*marks)
