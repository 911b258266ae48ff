"""Granite 20B function calling: objects behind a mark."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps


@register_tool_parser
class Granite20bFc(TaggedJsonCalls):
    """<function_call> {"name", "arguments"}, repeated; the object ends by itself."""

    names = ("granite-20b-fc",)
    marker = "<function_call>"
    marker_order = 90
    begin = "<function_call>"
    end = ""

    def end_tag(self) -> Steps[None]:
        """There is none."""
        return
        yield
