"""Gemma 4: call:NAME{key:value}, strings between <|"|>, objects and arrays in the same dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vkit.parsers.call_syntax import DialectSyntax
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps, marks_of
from vkit.parsers.schema import STRING, coerced, dumps
from vkit.parsers.tool_reader import Forcing, ToolReader, checked_name

_BEGIN, _END = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,{}\[\]<]*")
_LOOKS = frozenset({"null", "integer", "number", "boolean"})
_MAX_DEPTH = 64


@register_tool_parser
class Gemma4(ToolReader):
    """Bare values get their types from the schema where it knows them. Text after a call is dropped."""

    names = ("gemma4",)
    marker = "<|tool_call>call:"
    marker_order = 210
    forcing = Forcing.SYNTAX
    keeps_partial = True
    native_separator = ""
    _is_in_string = False

    @classmethod
    def native_call(cls, tool: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call in the dialect."""
        return DialectSyntax(tool, _QUOTE).call(f"{_BEGIN}call:", _END)

    def read(self) -> Steps[None]:
        """Calls."""
        found = yield from self.prose(_BEGIN)
        while found is not None:
            yield from self.solid()
            yield from self.expect("call:")
            text, _ = yield from self.take_until("{")
            name = checked_name(text.strip())
            self.open_call(name)
            yield from self._pairs(name)
            yield from self.space()
            yield from self.expect_or_end(_END)
            self.close_call()
            found = yield from self.drop(_BEGIN)

    def _pairs(self, tool: str) -> Steps[None]:
        """Consume pairs up to and with the closing brace, and send them."""
        while (yield from self.solid()) != "}":
            key = yield from self._key()
            schema = self.tools.properties(tool).get(key)
            yield from self.solid()
            if (yield from self.accept(_QUOTE)) is not None:
                yield from self._string(key)
            else:
                self.write_pair(key, (yield from self._value(tool, schema, 0)))
            yield from self.solid()
            if (yield from self.accept(",")) is None:
                break
        yield from self.expect("}")

    def _key(self) -> Steps[str]:
        yield from self.solid()
        if (yield from self.accept(_QUOTE)) is None:
            key, _ = yield from self.take_until(":")
            return key.strip()
        key, _ = yield from self.take_until(_QUOTE)
        yield from self.solid()
        yield from self.expect(":")
        return key

    def _string(self, key: str) -> Steps[None]:
        """Consume a string after its first quote and send it as it comes; one that a whole text ends in is complete."""
        self.open_pair(key)
        self.write('"')
        self._is_in_value = not self._is_whole
        self._is_in_string = True
        yield from self.until(marks_of(_QUOTE), self._write_text)
        self.write('"')
        self._is_in_value = self._is_in_string = False

    def end_partial(self) -> None:
        """End the arguments of a call that the model stopped inside of, and the string that a whole text ends in."""
        if self._is_in_string:
            self.write('"')
        super().end_partial()

    def _write_text(self, text: str) -> None:
        self.write(dumps(text)[1:-1])

    def _value(self, tool: str, schema: object, depth: int) -> Steps[str]:
        """Consume a value; JSON text of it."""
        if depth > _MAX_DEPTH:
            raise Malformed("nested too deep")
        yield from self.solid()
        opening = yield from self.accept(_QUOTE, "{", "[")
        if opening == _QUOTE:
            text, _ = yield from self.take_until(_QUOTE)
            return dumps(text)
        if opening == "{":
            return (yield from self._object(tool, schema, depth))
        if opening == "[":
            return (yield from self._array(tool, schema, depth))
        start = self.mark()
        yield from self.run(_BARE)
        if self._pos >= len(self._text):
            yield from self.more()
        text = self.since(start).strip()
        if schema is None and depth:
            return coerced(text, _LOOKS)
        return coerced(text, self.tools.types_of(tool, schema) if schema is not None else STRING)

    def _object(self, tool: str, schema: object, depth: int) -> Steps[str]:
        items: list[str] = []
        while (yield from self.solid()) != "}":
            key = yield from self._key()
            value = yield from self._value(tool, self.tools.child(tool, schema, key), depth + 1)
            items.append(f"{dumps(key)}: {value}")
            yield from self.solid()
            if (yield from self.accept(",")) is None:
                break
        yield from self.expect("}")
        return "{" + ", ".join(items) + "}"

    def _array(self, tool: str, schema: object, depth: int) -> Steps[str]:
        items: list[str] = []
        inner = self.tools.child(tool, schema, None)
        while (yield from self.solid()) != "]":
            items.append((yield from self._value(tool, inner, depth + 1)))
            yield from self.solid()
            if (yield from self.accept(",")) is None:
                break
        yield from self.expect("]")
        return "[" + ", ".join(items) + "]"
