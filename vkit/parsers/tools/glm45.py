"""GLM 4.5 to 4.7: keys and values in tags of their own."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import Forcing
from vkit.parsers.xml_calls import KeyValueCalls


@register_tool_parser
class Glm45(KeyValueCalls):
    """<tool_call>N <arg_key>K</arg_key> <arg_value>V</arg_value> … </tool_call>"""

    names = ("glm45", "glm47")
    forcing = Forcing.SYNTAX
    keeps_partial = True
