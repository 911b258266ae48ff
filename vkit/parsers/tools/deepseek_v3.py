"""DeepSeek V3: marks, a type, a name, and the arguments in a fence."""

from __future__ import annotations

from typing import ClassVar

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.tool_reader import Forcing

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


@register_tool_parser
class DeepseekV3(JsonCalls):
    """Text before is content, text after is dropped."""

    names: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    marker: ClassVar[str | None] = CALLS
    marker_order = 20
    forcing = Forcing.TAGS
    native_block = (CALLS, CALLS_END)

    def read(self) -> Steps[None]:
        """Blocks of calls."""
        found = yield from self.prose(CALLS)
        while found is not None:
            yield from self.space()
            mark = yield from self.expect(CALL)
            while mark == CALL:
                yield from self.call()
                yield from self.space()
                mark = yield from self.expect(CALL, CALLS_END)
                self.close_call()
            found = yield from self.drop(CALLS)

    def call(self) -> Steps[None]:
        """Consume a call after its opening mark."""
        yield from self.take_until(SEPARATOR)
        name, _ = yield from self.take_until("\n")
        yield from self.space()
        yield from self.expect(f"{FENCE}json")
        yield from self.arguments(name.strip())
        yield from self.space()
        yield from self.expect(FENCE)
        yield from self.space()
        yield from self.expect(CALL_END)

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """The marks up to the fence, and from the fence on."""
        return f"{CALL}function{SEPARATOR}{name}\n{FENCE}json\n", f"\n{FENCE}{CALL_END}"
