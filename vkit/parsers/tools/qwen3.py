"""Qwen 2.5, 3 and 3.5, but for the coder models."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import Forcing


@register_tool_parser
class Qwen3(TaggedJsonCalls):
    """<tool_call> {"name", "arguments"} </tool_call>"""

    names = ("qwen3",)
    forcing = Forcing.TAGS
    begin = "<tool_call>"
    end = "</tool_call>"
