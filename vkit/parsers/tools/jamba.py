"""Jamba: an array in tags."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonArrayCalls
from vkit.parsers.registry import register_tool_parser


@register_tool_parser
class Jamba(JsonArrayCalls):
    """<tool_calls> [{"name", "arguments"}, …] </tool_calls>"""

    names = ("jamba",)
    marker = "<tool_calls>"
    marker_order = 230
    begin = "<tool_calls>"
    end = "</tool_calls>"
