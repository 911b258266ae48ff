"""LongCat: Hermes with tags of its own."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import Forcing


@register_tool_parser
class Longcat(TaggedJsonCalls):
    """<longcat_tool_call> {"name", "arguments"} </longcat_tool_call>"""

    names = ("longcat",)
    marker = "<longcat_tool_call>"
    marker_order = 10
    forcing = Forcing.TAGS
    begin = "<longcat_tool_call>"
    end = "</longcat_tool_call>"
