"""Step 3: steptml in marks."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.tool_reader import STRIP
from vkit.parsers.xml_calls import TaggedXmlCalls


@register_tool_parser
class Step3(TaggedXmlCalls):
    """Text around the block is content; a block without its end mark is content too."""

    names = ("step3",)
    marker = "<｜tool_calls_begin｜>"
    marker_order = 50
    block = "<｜tool_calls_begin｜>"
    block_end = "<｜tool_calls_end｜>"
    call = "<｜tool_call_begin｜>"
    call_end = "</steptml:invoke>"
    param = "<steptml:parameter"
    param_end = "</steptml:parameter>"
    ends_at_next = False
    keeps_partial = False
    spacing = STRIP

    def read(self) -> Steps[None]:
        """Text and blocks."""
        while (yield from self.prose(self.block)) is not None:
            yield from self.calls()

    def one_call(self) -> Steps[str]:
        """Consume a call after its mark; what ended it."""
        yield from self.take_until("<steptml:invoke")
        return (yield from super().one_call())

    def end_call(self, end: str) -> Steps[None]:
        """Close the call, and consume the mark after its tag."""
        if end == self.call_end:
            yield from self.solid()
            yield from self.expect("<｜tool_call_end｜>")
        self.close_call()
