"""Pythonic: the whole text is a list of Python calls."""

from __future__ import annotations

from vkit.parsers.python_calls import PythonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps


@register_tool_parser
class Pythonic(PythonCalls):
    """Any text around the list makes everything content."""

    names = ("pythonic",)

    def read(self) -> Steps[None]:
        """One list."""
        yield from self.space()
        if (yield from self.peek()) != "[":
            return
        yield from self.python_list()
        if (yield from self.space()):
            raise Malformed("text after the list")
        self.close_call()
