"""Calls written as JSON: one object, an array of objects, or bare arguments, wherever a family puts them.

The JSON is checked as it is read, byte by byte of the grammar, so a call is known to be malformed at the first wrong
character; nothing is parsed twice.

Source: RFC 8259 for the grammar of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar

from vkit.parsers.scan import Cut, Malformed, Steps
from vkit.parsers.schema import dumps, loads
from vkit.parsers.tool_reader import ToolReader

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_LEN = 6
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)

Flush = Callable[[], None]


class JsonCalls(ToolReader):
    """Steps that read JSON and the calls in it."""

    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)
    """Keys of the arguments; if an object has several, the first named here wins."""
    default_arguments: ClassVar[str | None] = None
    """Arguments of an object that has none; None: then it is no call."""
    passes_any_arguments: ClassVar[bool] = False
    """Whether arguments that are no object are passed on as they are; else they make the call malformed."""
    skips_other_elements: ClassVar[bool] = False
    """Whether array elements that are no calls are passed over; else they make the array malformed."""

    _has_begun_arguments = False
    """Whether a named object's arguments have begun: then a stream has announced a call."""

    # JSON

    def json_solid(self, flush: Flush | None = None) -> Steps[str]:
        """Consume JSON's white space; the character that follows, not consumed."""
        while True:
            match = _SPACE.match(self._text, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos < len(self._text):
                return self._text[self._pos]
            if flush is not None:
                flush()
            yield from self.more()

    def json_string(self, flush: Flush | None = None) -> Steps[None]:
        """Consume a string, quotes included."""
        self._pos += 1
        while True:
            match = _STRING_RUN.match(self._text, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos >= len(self._text):
                if flush is not None:
                    flush()
                yield from self.more()
            elif self._text[self._pos] == '"':
                self._pos += 1
                return
            elif self._text[self._pos] == "\\":
                yield from self._json_escape()
            else:
                raise Malformed("a control character in a string")

    def _json_escape(self) -> Steps[None]:
        while True:
            match = _ESCAPE.match(self._text, self._pos)
            if match is not None:
                self._pos = match.end()
                return
            rest = self._text[self._pos : self._pos + _ESCAPE_LEN]
            if len(rest) == _ESCAPE_LEN or (len(rest) > 1 and rest[1] != "u"):
                raise Malformed("an unknown escape in a string")
            yield from self.more()

    def json_text(self) -> Steps[str]:
        """Consume a string; its value.

        Raises:
            Malformed: something else comes.
        """
        if (yield from self.json_solid()) != '"':
            raise Malformed("expected a string")
        start = self.mark()
        yield from self.json_string()
        return str(json.loads(self.since(start)))

    def json_scalar(self) -> Steps[None]:
        """Consume a number, true, false or null."""
        start = self.mark()
        yield from self.run(_SCALAR_RUN)
        if not _SCALAR.fullmatch(self.since(start)):
            raise Cut if self._is_ended and self._pos >= len(self._text) else Malformed("not a JSON value")

    def json_value(self, flush: Flush | None = None) -> Steps[None]:
        """Consume a value, however deep. `flush` is called before each wait, between characters of a string too."""
        closers: list[str] = []
        while True:
            first = yield from self.json_solid(flush)
            if first == '"':
                yield from self.json_string(flush)
            elif first in "{[":
                self._pos += 1
                closers.append("}" if first == "{" else "]")
                following = yield from self.json_solid(flush)
                if following != closers[-1]:
                    if first == "{":
                        yield from self._json_key(flush)
                    continue
                self._pos += 1
                closers.pop()
            else:
                yield from self.json_scalar()
            while closers:
                following = yield from self.json_solid(flush)
                if following == ",":
                    self._pos += 1
                    if closers[-1] == "}":
                        yield from self._json_key(flush)
                    break
                if following != closers[-1]:
                    raise Malformed(f"expected , or {closers[-1]}")
                self._pos += 1
                closers.pop()
            else:
                return

    def _json_key(self, flush: Flush | None) -> Steps[None]:
        if (yield from self.json_solid(flush)) != '"':
            raise Malformed("expected a key")
        yield from self.json_string(flush)
        yield from self.json_colon(flush)

    def json_colon(self, flush: Flush | None = None) -> Steps[None]:
        """Consume the colon after a key."""
        if (yield from self.json_solid(flush)) != ":":
            raise Malformed("expected :")
        self._pos += 1

    def expect_json(self, char: str) -> Steps[None]:
        """Consume white space and `char`."""
        if (yield from self.json_solid()) != char:
            raise Malformed(f"expected {char}")
        self._pos += 1

    # Calls

    def arguments(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Announce a call and send the JSON object that comes as its arguments, the last bytes held."""
        first = yield from self.json_solid()
        if first == "{":
            self.open_call(name, call_id)
            try:
                yield from self.json_value(None if self._is_whole else self.write_pending)
            except Malformed as error:
                self._write_up_to(error)
                raise
            self.hold(self.pending())
            return
        start = self.mark()
        yield from self.json_value()
        arguments = self._other_arguments(self.since(start))
        self.open_call(name, call_id)
        self.hold(arguments)

    def _write_up_to(self, error: Malformed) -> None:
        """Send the arguments up to an error, so that a stream does not depend on where its pieces end."""
        if not self._is_whole:
            if isinstance(error, Cut):
                self._pos = len(self._text)
            self.write_pending()

    def _other_arguments(self, raw: str) -> str:
        """Arguments that are no object: a string may hold one."""
        try:
            value = loads(raw)
            text = value if isinstance(value, str) else raw
            if self.passes_any_arguments:
                return text
            if isinstance(value, str) and isinstance(loads(value), dict):
                return text
        except ValueError:
            pass
        raise Malformed("arguments must be an object")

    def call_object(self) -> Steps[bool]:
        """Consume {"name": …, "arguments": …}; whether it is a call, then open with its last bytes held."""
        yield from self.expect_json("{")
        name: str | None = None
        held: dict[str, str] = {}
        is_sent = False
        following = yield from self.json_solid()
        while following != "}":
            key = yield from self.json_text()
            yield from self.json_colon()
            if key == "name" and name is None and (yield from self.json_solid()) == '"':
                name = yield from self.json_text()
            elif key in self.argument_keys:
                if is_sent or key in held:
                    raise Malformed("arguments twice")
                # A whole text can wait for the key that wins.
                self._has_begun_arguments |= name is not None
                if name and not (self._is_whole and key != self.argument_keys[0]):
                    yield from self.arguments(name)
                    is_sent = True
                else:
                    yield from self.json_solid()
                    start = self.mark()
                    yield from self.json_value()
                    held[key] = self.since(start)
            else:
                yield from self.json_value()
            following = yield from self.json_solid()
            if following == ",":
                self._pos += 1
                if (yield from self.json_solid()) != '"':
                    raise Malformed("expected a key")
            elif following != "}":
                raise Malformed("expected , or }")
        self._pos += 1
        if is_sent:
            return True
        raw = next((held[key] for key in self.argument_keys if key in held), self.default_arguments)
        if not name or raw is None:
            return False
        arguments = raw if raw.startswith("{") else self._other_arguments(raw)
        self.open_call(name)
        self.hold(arguments)
        return True

    def call_element(self) -> Steps[bool]:
        """Consume an array's element; whether it is a call, then open."""
        if (yield from self.json_solid()) == "{":
            return (yield from self.call_object())
        yield from self.json_value()
        return False

    def call_array(self) -> Steps[None]:
        """Consume [call, …] and send the calls.

        Raises:
            Malformed: no array, no call in it, or an element that is no call.
        """
        yield from self.expect_json("[")
        num_before = self._num_calls
        following = yield from self.json_solid()
        while following != "]":
            is_call = yield from self.call_element()
            if not is_call and not self.skips_other_elements:
                raise Malformed("an element that is no call")
            following = yield from self.json_solid()
            if following not in ",]":
                raise Malformed("expected , or ]")
            if is_call:
                self.close_call()
            if following == ",":
                self._pos += 1
                if (yield from self.json_solid()) == "]":
                    raise Malformed("a comma before ]")
        self._pos += 1
        if self._num_calls == num_before:
            raise Malformed("no call in the array")


class TaggedJsonCalls(JsonCalls):
    """BEGIN {"name": …, "arguments": …} END, repeated; text before is content, text after and between is dropped."""

    begin: ClassVar[str]
    end: ClassVar[str]

    def read(self) -> Steps[None]:
        """Blocks, the last of which may lack its closing tag."""
        found = yield from self.prose(self.begin)
        while found is not None:
            if not (yield from self.call_object()):
                raise Malformed("an object that is no call")
            yield from self.end_tag()
            self.close_call()
            found = yield from self.drop(self.begin)

    def end_tag(self) -> Steps[None]:
        """Consume the closing tag, or the end of the text."""
        yield from self.space()
        yield from self.expect_or_end(self.end)

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """(text before the arguments of a call to `name`, text after them)."""
        return f'{cls.begin}\n{{"name": {dumps(name)}, "arguments": ', f"}}\n{cls.end}"


class JsonArrayCalls(JsonCalls):
    """BEGIN [{"name": …, "arguments": …}, …] END, once; text before is content, text after is dropped."""

    begin: ClassVar[str]
    end: ClassVar[str]

    def read(self) -> Steps[None]:
        """One array."""
        if (yield from self.prose(self.begin)) is not None:
            yield from self.array()

    def array(self) -> Steps[None]:
        """Consume the array after its opening tag, its closing tag, and the rest."""
        yield from self.call_array()
        yield from self.space()
        yield from self.expect(self.end)
        self.commit()
        yield from self.drop()
