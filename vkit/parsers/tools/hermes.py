"""Hermes and the many models that learnt its tags."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import Forcing


@register_tool_parser
class Hermes(TaggedJsonCalls):
    """<tool_call> {"name", "arguments"} </tool_call>"""

    names = ("hermes",)
    marker = "<tool_call>"
    marker_order = 260
    forcing = Forcing.TAGS
    begin = "<tool_call>"
    end = "</tool_call>"
