"""ERNIE 4.5: Hermes' tags, and wrappers around the answer."""

from __future__ import annotations

from vkit.parsers.json_calls import TaggedJsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps

_WRAPPERS = ("<response>", "</response>")
_THOUGHT_END = "</think>"


@register_tool_parser
class Ernie45(TaggedJsonCalls):
    """Arguments may be missing. Response tags go, and the newline after them and after a thought."""

    names = ("ernie45",)
    begin = "<tool_call>"
    end = "</tool_call>"
    default_arguments = "{}"

    def read(self) -> Steps[None]:
        """Text and blocks; text after a block is dropped."""
        found = yield from self.prose(self.begin, *_WRAPPERS, _THOUGHT_END)
        while found is not None:
            if found == self.begin:
                if not (yield from self.call_object()):
                    raise Malformed("an object without a name")
                yield from self.solid()
                yield from self.expect(self.end)
                self.close_call()
                found = yield from self.drop(self.begin)
                continue
            text = self.pending()
            self.commit()
            kept = text if found == _THOUGHT_END else text.removesuffix(found)
            if kept:
                self.say(kept)
            if (yield from self.accept("\n")) is not None:
                self.commit()
            found = yield from self.prose(self.begin, *_WRAPPERS, _THOUGHT_END)
