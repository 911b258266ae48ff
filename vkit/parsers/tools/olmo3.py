"""OLMo 3: Python calls in tags, one a line."""

from __future__ import annotations

from vkit.parsers.python_calls import PythonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps

_BEGIN, _END = "<function_calls>", "</function_calls>"


@register_tool_parser
class Olmo3(PythonCalls):
    """Text before is content, text after is dropped. A text that is nothing but calls needs no tags."""

    names = ("olmo3",)
    marker = _BEGIN
    marker_order = 80

    def read(self) -> Steps[None]:
        """One block, or bare calls."""
        if (yield from self.space()):
            first = yield from self.peek()
            if first.isalpha() or first == "_":
                yield from self._bare()
        if (yield from self.prose(_BEGIN)) is None:
            return
        yield from self._lines(_END)
        yield from self.drop()

    def _bare(self) -> Steps[None]:
        """Consume calls that are the whole text; what turns out to be something else is content."""
        try:
            yield from self._lines("")
        except Malformed:
            if self._num_calls:
                raise
            self.say_pending()

    def _lines(self, end: str) -> Steps[None]:
        """Consume calls up to and with `end`, the end of the text if empty."""
        while True:
            yield from self.python_call()
            if not (yield from self.space()) and not end:
                self.close_call()
                return
            if end and (yield from self._ends(end)):
                self.close_call()
                return
            if (yield from self.accept(",")) is not None:
                yield from self.solid()
            self.close_call()

    def _ends(self, end: str) -> Steps[bool]:
        yield from self.solid()
        return (yield from self.accept(end)) is not None
