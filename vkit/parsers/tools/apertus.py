"""Apertus: an array of objects whose only key is the name."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.partial_json import completed
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps

_PREFIX, _SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


@register_tool_parser
class Apertus(JsonCalls):
    """Text around is content. The suffix may be missing; a call that the model stopped inside of is completed."""

    names = ("apertus",)
    marker = _PREFIX
    marker_order = 170
    keeps_partial = True

    def read(self) -> Steps[None]:
        """One array."""
        if (yield from self.prose(_PREFIX)) is None:
            return
        yield from self.call_array()
        yield from self.space()
        yield from self.accept(_SUFFIX)
        yield from self.text_after()

    def call_element(self) -> Steps[bool]:
        """Consume {"N": {arguments}}; the call is open then."""
        yield from self.expect_json("{")
        name = yield from self.json_text()
        yield from self.json_colon()
        if (yield from self.json_solid()) != "{":
            raise Malformed("arguments must be an object")
        yield from self.arguments(name)
        yield from self.expect_json("}")
        return True

    def end_partial(self) -> None:
        """Complete the arguments of a whole text; a stream has sent what cannot be completed in every case."""
        if self._is_whole and self._tail is None:
            self._pos = len(self._text)
            self.write(completed(self.pending()))
        else:
            self.release()
