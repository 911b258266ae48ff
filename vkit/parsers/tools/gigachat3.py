"""GigaChat 3: one call at the end of the text."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps

_MARK = "<|function_call|>"
_HEADER = "<|message_sep|>\n\nfunction call<|role_sep|>\n"


@register_tool_parser
class Gigachat3(JsonCalls):
    """Text before is content; text after makes everything content. An object that is no call is dropped."""

    names = ("gigachat3",)
    marker = _MARK
    marker_order = 180

    def read(self) -> Steps[None]:
        """One call."""
        if (yield from self.prose(_MARK, _HEADER)) is None:
            return
        is_call = yield from self.call_object()
        yield from self.space()
        yield from self.accept("</s>")
        if (yield from self.space()):
            raise Malformed("text after the call")
        if is_call:
            self.close_call()
        self.commit()
