"""DeepSeek V3.1: the marks of V3 without type and fence."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.tools.deepseek_v3 import CALL, CALL_END, SEPARATOR, DeepseekV3


@register_tool_parser
class DeepseekV31(DeepseekV3):
    """Text before is content, text after is dropped."""

    names = ("deepseek_v31",)
    marker = None

    def call(self) -> Steps[None]:
        """Consume a call after its opening mark."""
        name, _ = yield from self.take_until(SEPARATOR)
        yield from self.arguments(name.strip())
        yield from self.space()
        yield from self.expect(CALL_END)

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """The marks around the arguments."""
        return f"{CALL}{name}{SEPARATOR}", CALL_END
