"""Granite 3.0 and 3.1: an array behind a mark, or as the beginning of the text."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps


@register_tool_parser
class Granite(JsonCalls):
    """The closing bracket ends the block; text around it is content."""

    names = ("granite",)
    marker = "<|tool_call|>"
    marker_order = 100

    def read(self) -> Steps[None]:
        """One array."""
        if not (yield from self.space()):
            return
        if (yield from self.peek()) != "[" and (yield from self.prose("<|tool_call|>", "<tool_call>")) is None:
            return
        yield from self.call_array()
        self.commit()
