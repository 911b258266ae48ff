"""DeepSeek V4: the DSML of V3.2 in a block of another name."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tools.deepseek_v32 import DeepseekV32


@register_tool_parser
class DeepseekV4(DeepseekV32):
    """A block without its closing tag is content."""

    names = ("deepseek_v4",)
    marker = "<｜DSML｜tool_calls>"
    marker_order = 40
    block = "<｜DSML｜tool_calls>"
    block_end = "</｜DSML｜tool_calls>"
