"""Calls written as Python: name(key=value, …), in a list or one a line."""

from __future__ import annotations

import re

from vkit.parsers.events import ToolEvent
from vkit.parsers.python_values import PythonValues
from vkit.parsers.scan import Malformed, Steps
from vkit.parsers.tool_reader import ToolReader

_NAME_RUN = re.compile(r"[.\w]*")
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY = re.compile(r"[^\W\d]\w*")


class PythonCalls(ToolReader, PythonValues[ToolEvent]):
    """Steps that read calls. A call is announced when its first value has begun as one, or its brackets are empty."""

    def python_call(self) -> Steps[None]:
        """Consume one call and send it, the last brace held."""
        name = yield from self._word(_NAME)
        if (yield from self.solid()) != "(":
            raise Malformed("expected (")
        self._pos += 1
        is_announced = False
        while (yield from self.solid()) != ")":
            key = yield from self._word(_KEY)
            if (yield from self.solid()) != "=":
                raise Malformed("expected =")
            self._pos += 1

            def begin(key: str = key, is_first: bool = not is_announced) -> None:
                if is_first:
                    self._announce(name)
                self.open_pair(key)

            yield from self.python_value(self.write, begin)
            is_announced = True
            following = yield from self.solid()
            if following == ",":
                self._pos += 1
            elif following != ")":
                raise Malformed("expected , or )")
        self._pos += 1
        if not is_announced:
            self._announce(name)
        self.hold("}" if is_announced else "{}")

    def _announce(self, name: str) -> None:
        self.open_call(name)

    def _word(self, pattern: re.Pattern[str]) -> Steps[str]:
        yield from self.solid()
        start = self.mark()
        yield from self.run(_NAME_RUN)
        word = self.since(start)
        if self._pos >= len(self._text):
            yield from self.more()
        if not pattern.fullmatch(word):
            raise Malformed("expected a name")
        return word

    def python_list(self) -> Steps[None]:
        """Consume [call, …] and send the calls, the last one still open.

        Raises:
            Malformed: no such list, or an empty one.
        """
        if (yield from self.solid()) != "[":
            raise Malformed("expected [")
        self._pos += 1
        while True:
            yield from self.python_call()
            following = yield from self.solid()
            if following not in ",]":
                raise Malformed("expected , or ]")
            self._pos += 1
            if following == "," and (yield from self.solid()) != "]":
                self.close_call()
                continue
            if following == ",":
                self._pos += 1
            return
