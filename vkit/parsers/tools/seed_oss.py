"""Seed-OSS: the tags of Qwen3-Coder in a block of another name."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.tools.step3p5 import Step3p5


@register_tool_parser
class SeedOss(Step3p5):
    """<seed:tool_call> <function=N> <parameter=K>V</parameter> </function> </seed:tool_call>"""

    names = ("seed_oss",)
    marker = "<seed:tool_call>"
    marker_order = 220
    block = "<seed:tool_call>"
    block_end = "</seed:tool_call>"
