"""xLAM: an array in one of several envelopes."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Cut, Malformed, Steps

_THOUGHT = "</think>"
_ENVELOPES = ("```json", "```", "[TOOL_CALLS]", "<tool_call>", _THOUGHT)
_CLOSINGS = ("```", "</tool_call>")


@register_tool_parser
class Xlam(JsonCalls):
    """Text outside the envelope is content. Elements that are no calls are passed over."""

    names = ("xlam",)
    passes_any_arguments = True
    skips_other_elements = True

    def read(self) -> Steps[None]:
        """Arrays: at the beginning of the text, or behind a mark."""
        yield from self.space()
        found = yield from self.accept(*_ENVELOPES)
        while True:
            if found == _THOUGHT:
                self.say_pending()
            yield from self.space()
            yield from self._array()
            found = yield from self.prose(*_ENVELOPES)
            if found is None:
                return

    def _array(self) -> Steps[None]:
        """Consume an array with its closing mark, if one comes; what is none is content."""
        if (yield from self.peek()) != "[":
            self.say_pending()
            return
        num_before = self._num_calls
        try:
            yield from self.call_array()
        except Malformed as error:
            if self._num_calls > num_before or isinstance(error, Cut):
                raise
            self.say_pending()
            return
        yield from self.space()
        yield from self.accept(*_CLOSINGS)
        self.commit()
