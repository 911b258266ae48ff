"""Step 3.5: the tags of Qwen3-Coder."""

from __future__ import annotations

from typing import ClassVar

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tool_reader import LINES
from vkit.parsers.xml_calls import TaggedXmlCalls


@register_tool_parser
class Step3p5(TaggedXmlCalls):
    """<tool_call> <function=N> <parameter=K> V </parameter> </function> </tool_call>"""

    names: ClassVar[tuple[str, ...]] = ("step3p5",)
    marker: ClassVar[str | None] = "<function="
    marker_order = 250
    block = "<tool_call>"
    block_end = "</tool_call>"
    call = "<function="
    call_end = "</function>"
    param = "<parameter="
    param_end = "</parameter>"
    spacing = LINES
