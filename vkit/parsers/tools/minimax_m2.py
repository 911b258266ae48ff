"""MiniMax M2: invoke and parameter tags."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import LINES
from vkit.parsers.xml_calls import TaggedXmlCalls


@register_tool_parser
class MinimaxM2(TaggedXmlCalls):
    """<minimax:tool_call> <invoke name="N"> <parameter name="K">V</parameter> </invoke> </minimax:tool_call>"""

    names = ("minimax_m2",)
    marker = "<minimax:tool_call>"
    marker_order = 200
    block = "<minimax:tool_call>"
    block_end = "</minimax:tool_call>"
    call = "<invoke"
    call_end = "</invoke>"
    param = "<parameter"
    param_end = "</parameter>"
    spacing = LINES
