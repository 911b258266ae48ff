"""InternLM 2: one call between marks."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps


@register_tool_parser
class Internlm(JsonCalls):
    """Text before is content, text after is dropped, a second call too."""

    names = ("internlm",)
    marker = "<|action_start|><|plugin|>"
    marker_order = 110
    argument_keys = ("arguments", "parameters")

    def read(self) -> Steps[None]:
        """One call."""
        if (yield from self.prose("<|action_start|><|plugin|>")) is None:
            return
        yield from self.take_until("{")
        self._pos -= 1
        if not (yield from self.call_object()):
            raise Malformed("an object that is no call")
        yield from self.solid()
        yield from self.expect("<|action_end|>")
        self.close_call()
        yield from self.drop()
