"""Python literals and keyword calls, read as they arrive and written as JSON.

Only what JSON can hold: strings, numbers, True/False/None (and their JSON spellings), lists, and dicts with string
keys. Anything else (tuples, sets, names, operators, calls as values) is malformed.

Source: The Python Language Reference, 2.4 (literals); the project's parser contract, section A.8.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TypeVar

from vkit.parsers.scan import Malformed, Reader, Steps
from vkit.parsers.schema import STRING, dumps, loads

E = TypeVar("E")
Write = Callable[[str], None]

_QUOTED_RUN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_WORD_RUN = re.compile(r"[-+.\w]*")
_INTEGER = re.compile(r"([+-]?)0*(\d(?:_?\d)*)", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:\d(?:_?\d)*\.?(?:\d(?:_?\d)*)?|\.\d(?:_?\d)*)(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    **dict(zip("ntrabfv", "\n\t\r\a\b\f\v", strict=True)),
    **dict(zip("\\'\"", "\\'\"", strict=True)),
    "\n": "",
}
_CODE_LENS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")


class PythonValues(Reader[E]):
    """Steps that read Python values."""

    def python_value(self, write: Write, before: Callable[[], None] | None = None) -> Steps[None]:
        """Consume a value and write it as JSON. `before` is called once, when it is certain that it begins as one."""
        closers: list[str] = []
        announce = before or _nothing
        while True:
            first = yield from self.solid()
            if first in "'\"":
                announce()
                yield from self.python_string(write)
            elif first in "[{":
                self._pos += 1
                announce()
                write(first)
                closers.append("]" if first == "[" else "}")
                announce = _nothing
                if not (yield from self._closes(closers, write)):
                    if first == "{":
                        yield from self._key(write)
                    continue
            else:
                text = yield from self.python_word()
                announce()
                write(text)
            announce = _nothing
            while closers:
                following = yield from self.solid()
                if following == ",":
                    self._pos += 1
                    if (yield from self._closes(closers, write)):
                        continue
                    write(", ")
                    if closers[-1] == "}":
                        yield from self._key(write)
                    break
                if not (yield from self._closes(closers, write)):
                    raise Malformed("expected , or the end of a list or dict")
            else:
                return

    def _closes(self, closers: list[str], write: Write) -> Steps[bool]:
        if (yield from self.solid()) != closers[-1]:
            return False
        self._pos += 1
        write(closers.pop())
        return True

    def _key(self, write: Write) -> Steps[None]:
        if (yield from self.solid()) not in "'\"":
            raise Malformed("keys must be strings")
        yield from self.python_string(write)
        if (yield from self.solid()) != ":":
            raise Malformed("expected :")
        self._pos += 1
        write(": ")

    def python_string(self, write: Write) -> Steps[None]:
        """Consume a quoted string and write it as a JSON string, piece by piece."""
        quote = self._text[self._pos]
        run = _QUOTED_RUN[quote]
        self._pos += 1
        write('"')
        while True:
            match = run.match(self._text, self._pos)
            assert match is not None
            if match[0]:
                self._pos = match.end()
                write(dumps(match[0])[1:-1])
            following = yield from self.peek()
            if not following:
                yield from self.more()
            elif following == quote:
                self._pos += 1
                write('"')
                return
            elif following == "\\":
                yield from self._escape(write)

    def _escape(self, write: Write) -> Steps[None]:
        while len(self._text) < self._pos + 2:
            yield from self.more()
        kind = self._text[self._pos + 1]
        size = 2
        if kind in _CODE_LENS:
            size += _CODE_LENS[kind]
            while len(self._text) < self._pos + size:
                yield from self.more()
            digits = self._text[self._pos + 2 : self._pos + size]
            if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
                raise Malformed("an escape that is no character")
            text = chr(int(digits, 16))
        else:
            text = _ESCAPES.get(kind, "\\" + kind)
        self._pos += size
        write(json.dumps(text)[1:-1])

    def python_word(self) -> Steps[str]:
        """Consume a number or one of Python's or JSON's constants; it as JSON.

        Raises:
            Malformed: anything else.
        """
        start = self.mark()
        yield from self.run(_WORD_RUN)
        word = self.since(start)
        if word in _WORDS:
            return _WORDS[word]
        integer = _INTEGER.fullmatch(word)
        if integer is not None:
            return ("-" if integer[1] == "-" else "") + integer[2].replace("_", "")
        if _FLOAT.fullmatch(word) and math.isfinite(float(word)):
            return repr(float(word))
        raise Malformed("not a Python literal")


class _Literal(PythonValues[str]):
    """A text that is one literal."""

    def read(self) -> Steps[None]:
        yield from self.python_value(self._events.append)
        if (yield from self.space()):
            raise Malformed("more than a literal")
        self.commit()

    def say(self, text: str) -> None:
        raise Malformed("more than a literal")

    def fail(self, error: Malformed) -> None:
        raise error


def literal_json(text: str) -> str:
    """JSON text of the Python literal `text`.

    Raises:
        ValueError: not such a literal.
    """
    reader = _Literal()
    try:
        return "".join(reader.push(text) + reader.finish())
    except Malformed as error:
        raise ValueError(str(error)) from None


def decoded(text: str, types: frozenset[str]) -> str:
    """JSON text of the value that `text` stands for: itself for strings, else JSON, a Python literal, or itself."""
    if types != STRING:
        for convert in (_json, literal_json):
            try:
                return convert(text)
            except ValueError:
                continue
    return dumps(text)


def _json(text: str) -> str:
    return dumps(loads(text))


def _nothing() -> None:
    pass
