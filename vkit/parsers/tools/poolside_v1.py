"""Poolside v1: the tags of GLM, values decoded by their look."""

from __future__ import annotations

from vkit.parsers.python_values import decoded
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import Forcing
from vkit.parsers.xml_calls import KeyValueCalls


@register_tool_parser
class PoolsideV1(KeyValueCalls):
    """A call without its closing tag is content."""

    names = ("poolside_v1",)
    forcing = Forcing.SYNTAX

    def convert(self, text: str, types: frozenset[str]) -> str:
        """JSON text of a value."""
        return decoded(text.strip(), types)
