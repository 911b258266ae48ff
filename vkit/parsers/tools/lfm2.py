"""LFM2: a list of Python calls between marks, which the model likes to repeat."""

from __future__ import annotations

from vkit.parsers.python_calls import PythonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Cut, Steps

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"


@register_tool_parser
class Lfm2(PythonCalls):
    """Text around is content, but for an echo of the calls: whatever an end mark without a start mark closes."""

    names = ("lfm2",)
    marker = _START
    marker_order = 150

    def read(self) -> Steps[None]:
        """Lists, with text around them."""
        found = yield from self.prose(_START)
        while found is not None:
            yield from self.python_list()
            yield from self.space()
            yield from self.expect(_END)
            self.close_call()
            found = yield from self._after()

    def _after(self) -> Steps[str | None]:
        """Consume text after calls, and deliver it when it is sure to be no echo; the next start mark, or None."""
        while True:
            try:
                text, found = yield from self.take_until(_START, _END)
            except Cut:
                self._pos = len(self._text)
                text, found = self.pending().rstrip(), ""
                self.commit()
                self.say_after(text)
                return None
            if found == _START:
                self._pos -= len(_START)
                self.commit()
                self._pos += len(_START)
                self.say_after(text.rstrip())
                return found
            self.commit()
