"""Phi-4 mini: an array behind a word."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps

_WORD = "functools["


@register_tool_parser
class Phi4MiniJson(JsonCalls):
    """Text before is content, text after is dropped."""

    names = ("phi4_mini_json",)
    marker = _WORD
    marker_order = 120
    argument_keys = ("arguments", "parameters")

    def read(self) -> Steps[None]:
        """One array."""
        if (yield from self.prose(_WORD)) is None:
            return
        self._pos -= 1
        yield from self.call_array()
        yield from self.drop()
