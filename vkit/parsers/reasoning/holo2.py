"""Holo2: DeepSeek V3's switches, thinking unless told not to."""

from __future__ import annotations

from vkit.parsers.reasoning.deepseek_v3 import DeepseekV3
from vkit.parsers.registry import register_reasoning_parser


@register_reasoning_parser
class Holo2(DeepseekV3):
    """Thinks unless `thinking` or `enable_thinking` is off."""

    names = ("holo2",)
    thinks_by_default = True
