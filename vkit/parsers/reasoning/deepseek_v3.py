"""DeepSeek V3.x: thinks only when the template is told to."""

from __future__ import annotations

from typing import ClassVar

from vkit.parsers.reasoning.deepseek_r1 import DeepseekR1
from vkit.parsers.reasoning_reader import Opening
from vkit.parsers.registry import register_reasoning_parser

_SWITCHES = ("thinking", "enable_thinking")


@register_reasoning_parser
class DeepseekV3(DeepseekR1):
    """Everything is answer, marks included, unless `thinking` or `enable_thinking` is on."""

    names = ("deepseek_v3",)
    thinks_by_default: ClassVar[bool] = False

    def starts_ended(self) -> bool:
        """Whether thinking is off."""
        if self.opening is not Opening.UNKNOWN:
            return self.opening is Opening.ANSWERING
        given = [bool(self.variables[name]) for name in _SWITCHES if self.variables.get(name) is not None]
        if self.thinks_by_default:
            return not all(given)
        return not any(given)
