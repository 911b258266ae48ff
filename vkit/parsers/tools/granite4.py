"""Granite 4: Hermes' tags with text anywhere between the blocks."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps


@register_tool_parser
class Granite4(TaggedJsonCalls):
    """All text outside blocks is content; every block must be closed."""

    names = ("granite4",)
    begin = "<tool_call>"
    end = "</tool_call>"

    def read(self) -> Steps[None]:
        """Text and blocks."""
        while (found := (yield from self.prose(self.begin, self.end))) is not None:
            if found == self.end or not (yield from self.call_object()):
                raise Malformed("a closing tag without a call")
            yield from self.solid()
            yield from self.expect(self.end)
            self.close_call()
