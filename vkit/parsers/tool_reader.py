"""What every tool-call parser is (`ToolParser`), and the base that families are written on (`ToolReader`)."""

from __future__ import annotations

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Protocol

from vkit.parsers.events import ContentDelta, ParsedReply, ToolCallDelta, ToolEvent, merged
from vkit.parsers.scan import Cut, Malformed, Marks, Reader, Steps
from vkit.parsers.schema import ToolSchemas

KEEP, LINES, STRIP = "keep", "lines", "strip"
"""White space around a string value: kept; one newline on each side is markup; none belongs to the value."""

_NAME = re.compile(r"""[^\s<>{}"'=]+""")


class Forcing(Enum):
    """How a `required` or named choice is made to hold with a family."""

    JSON = "json"
    """The output is constrained to plain JSON; the family's own syntax is not used."""
    TAGS = "tags"
    """The output is constrained to the family's syntax around JSON: see `native_tags`."""
    SYNTAX = "syntax"
    """Only a grammar of the family's own syntax will do: see `native_call`. Without one the request is refused."""


class ToolParser(Protocol):
    """Finds the calls in one text. Made anew for each choice of each request."""

    names: ClassVar[tuple[str, ...]]
    """What `--tool-call-parser` calls it: the family, then aliases."""
    marker: ClassVar[str | None]
    """A chat template that holds this string belongs to the family; None: it must be named."""
    marker_order: ClassVar[int]
    """Which marker is looked for first: the smallest."""
    forcing: ClassVar[Forcing]
    native_block: ClassVar[tuple[str, str]]
    """Text before the first call and after the last one, for `Forcing.TAGS`."""
    native_separator: ClassVar[str | None]
    """Text between two calls; None: only one can be forced."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None: ...

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """(text before the arguments of a call to `name`, text after them), for `Forcing.TAGS`."""

    @classmethod
    def native_call(cls, tool: Mapping[str, Any]) -> dict[str, Any] | None:
        """A structural-tag node of a whole call to `tool`, for `Forcing.SYNTAX`; None: there is no such node.

        Raises:
            InvalidRequest: the tool's schema cannot be enforced in this syntax.
        """

    @classmethod
    def native_tags_at(cls, name: str, index: int) -> tuple[str, str] | None:
        """`native_tags` of the call number `index`, where calls are numbered; None: they are not."""

    def push(self, text: str) -> list[ToolEvent]:
        """What the new text adds."""

    def finish(self, *, was_cut: bool = False) -> list[ToolEvent]:
        """What was held back. `was_cut`: the token limit ended the text."""

    def parse(self, text: str, *, was_cut: bool = False, is_forced: bool = False) -> ParsedReply:
        """Content and calls of a whole text. `is_forced`: a call that was cut is returned as far as it goes."""

    @property
    def has_only_complete_calls(self) -> bool:
        """Whether there is a call, every call is complete, and nothing was malformed."""


class ToolReader(Reader[ToolEvent]):
    """Base of the families. A subclass writes `read` from the steps of `Reader` and the call writers below.

    Arguments are sent as they come except for their last bytes, which wait in `_tail` until the family knows that the
    call is well formed: so arguments that are whole JSON belong to a call that is whole.
    """

    names: ClassVar[tuple[str, ...]] = ()
    marker: ClassVar[str | None] = None
    marker_order: ClassVar[int] = 1000
    forcing: ClassVar[Forcing] = Forcing.JSON
    native_block: ClassVar[tuple[str, str]] = ("", "")
    native_separator: ClassVar[str | None] = "\n"
    keeps_partial: ClassVar[bool] = False
    """Whether a text that stops inside a call gives the call with the parameters that were complete."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self.tools = ToolSchemas(tools)
        self._num_calls = 0
        self._num_complete = 0
        self._num_pairs = 0
        self._is_open = False
        self._is_in_value = False
        self._tail: str | None = None
        self._after_tail = (0, 0)
        self._has_failed = False
        self._was_cut = False
        self._is_unfinished = False
        self._has_text = False

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """(text before the arguments of a call to `name`, text after them); None: the family has no such form."""
        return None

    @classmethod
    def native_call(cls, tool: Mapping[str, Any]) -> dict[str, Any] | None:
        """A structural-tag node of a whole call to `tool`; None: the family has none."""
        return None

    @classmethod
    def native_tags_at(cls, name: str, index: int) -> tuple[str, str] | None:
        """`native_tags` of the call number `index`; None: calls are not numbered."""
        return None

    @abstractmethod
    def read(self) -> Steps[None]:
        """The family's grammar."""

    def new_id(self) -> str:
        """An identity for a call."""
        return f"call_{secrets.token_hex(12)}"

    # The three ways in

    def finish(self, *, was_cut: bool = False) -> list[ToolEvent]:
        """What was held back. `was_cut`: the token limit ended the text."""
        self._was_cut = was_cut
        return super().finish()

    def parse(self, text: str, *, was_cut: bool = False, is_forced: bool = False) -> ParsedReply:
        """Content and calls of a whole text.

        A text with a call that is malformed, or that the token limit cut, is content from end to end.
        """
        self._is_whole = not is_forced
        reply = merged(self.push(text) + self.finish(was_cut=was_cut))
        is_unwanted = self._is_unfinished and (was_cut or not self.keeps_partial)
        if reply.tool_calls and (self._has_failed or is_unwanted) and not is_forced:
            self._has_failed = True
            return ParsedReply(self.restored(text))
        return reply

    def restored(self, text: str) -> str:
        """Content of a text whose calls are malformed."""
        return text

    @property
    def has_only_complete_calls(self) -> bool:
        """Whether there is a call, every call is complete, and nothing was malformed."""
        is_whole = not (self._has_failed or self._is_unfinished)
        return is_whole and 0 < self._num_complete == self._num_calls

    # What grammars deliver

    def say(self, text: str) -> None:
        """Deliver content."""
        self._has_text = self._has_text or not text.isspace()
        events = self._events
        if events and isinstance(events[-1], ContentDelta):
            text = events.pop().text + text  # type: ignore[union-attr]
        events.append(ContentDelta(text))

    def open_call(self, name: str, call_id: str | None = None) -> None:
        """Announce a call. Pending text was its markup.

        Raises:
            Malformed: a call without a name.
        """
        if not name:
            raise Malformed("a call without a name")
        self._events.append(ToolCallDelta(self._num_calls, "", call_id or self.new_id(), name))
        self._num_calls += 1
        self._num_pairs = 0
        self._is_open = True
        self.commit()

    def write(self, arguments: str) -> None:
        """Send more of the open call's arguments. Pending text is covered by them."""
        if arguments:
            self._events.append(ToolCallDelta(self._num_calls - 1, arguments))
        self.commit()

    def write_pending(self) -> None:
        """Send pending text as arguments."""
        self.write(self.pending())

    def hold(self, arguments: str) -> None:
        """Keep the last bytes of the arguments until `close_call`; what is consumed from here on is markup."""
        self._tail = arguments
        self._after_tail = self.mark()

    def open_pair(self, key: str) -> None:
        """Send what stands before a parameter's value."""
        start = ", " if self._num_pairs else "{"
        self._num_pairs += 1
        self.write(f"{start}{json.dumps(key, ensure_ascii=False)}: ")

    def write_pair(self, key: str, value: str) -> None:
        """Send one parameter; `value` is JSON text."""
        start = ", " if self._num_pairs else "{"
        self._num_pairs += 1
        self.write(f"{start}{json.dumps(key, ensure_ascii=False)}: {value}")

    def close_call(self) -> None:
        """Send the last bytes of the open call: what `hold` kept, else the brace that ends the parameters."""
        tail = self._last_brace() if self._tail is None else self._tail
        self._events.append(ToolCallDelta(self._num_calls - 1, tail, is_complete=True))
        self._tail = None
        self._num_complete += 1
        self._is_open = False
        self.commit()

    def trimmed_until(self, marks: Marks, spacing: str, sink: Callable[[str], None]) -> Steps[str]:
        """`until`, without the white space around the text that is markup. A text that ends first loses it too."""
        try:
            return (yield from self.until(marks, _Trimmer(spacing, sink)))
        except Cut:
            self.commit()
            raise

    def say_after(self, text: str) -> None:
        """Deliver content that follows calls, on a line of its own."""
        text = text.lstrip()
        if text:
            self.say("\n" + text if self._has_text else text)

    def text_after(self) -> Steps[None]:
        """Consume the white space after calls; the rest is plain, on a line of its own."""
        self.commit()
        if (yield from self.space()):
            self.commit()
            if self._has_text:
                self.say("\n")

    # What grammars are not

    def fail(self, error: Malformed) -> None:
        """Deliver as text what was consumed and is no call, or end the open call with what it has."""
        self._is_unfinished = isinstance(error, Cut)
        self._has_failed = not self._is_unfinished or not (self._is_open or (self.keeps_partial and self._num_calls))
        if self._is_unfinished and self._is_open and self.keeps_partial and not (self._was_cut or self._is_in_value):
            self.end_partial()
        else:
            self.release()

    def end_partial(self) -> None:
        """End the arguments of a call that the model stopped inside of; a parameter that was begun is dropped."""
        self._pos = len(self._text)
        self.write(self._last_brace())

    def _last_brace(self) -> str:
        return "}" if self._num_pairs else "{}"

    def release(self) -> None:
        """Deliver pending text: the end of the arguments as arguments, markup as content."""
        if self._tail is not None:
            tail, rest = self._tail, self.since(self._after_tail)
            self._tail = None
            self.write(tail)
            if rest.strip():
                self.say(rest)
        else:
            self.say_pending()


class _Trimmer:
    """Passes pieces of a value on, without the white space around it that is markup."""

    def __init__(self, spacing: str, sink: Callable[[str], None]) -> None:
        self._spacing = spacing
        self._sink = sink
        self._is_first = True
        self._held: list[str] = []

    def __call__(self, piece: str) -> None:
        if self._spacing == KEEP:
            self._sink(piece)
            return
        if self._is_first:
            piece = piece.lstrip() if self._spacing == STRIP else piece.removeprefix("\n")
            self._is_first = self._spacing == STRIP and not piece
        visible = piece.rstrip() if self._spacing == STRIP else piece.removesuffix("\n")
        if visible:
            self._sink("".join(self._held) + visible)
            self._held.clear()
        elif self._spacing == LINES and piece and self._held:
            self._sink("".join(self._held))
            self._held.clear()
        if len(piece) > len(visible):
            self._held.append(piece[len(visible) :])


def checked_name(name: str) -> str:
    """`name`, if it can be a tool's.

    Raises:
        Malformed: it is empty or holds white space or marks of other syntax.
    """
    if not _NAME.fullmatch(name):
        raise Malformed("not a tool's name")
    return name
