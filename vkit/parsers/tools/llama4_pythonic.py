"""Llama 4, pythonic: a list of Python calls, with or without marks around it."""

from __future__ import annotations

from vkit.parsers.python_calls import PythonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps

_START, _END = "<|python_start|>", "<|python_end|>"


@register_tool_parser
class Llama4Pythonic(PythonCalls):
    """Marks around the text go even when there is no list between them."""

    names = ("llama4_pythonic",)
    marker = _START
    marker_order = 130

    def read(self) -> Steps[None]:
        """One list."""
        yield from self.space()
        found = yield from self.accept(_START)
        if found is None and (yield from self.peek()) != "[":
            return
        try:
            yield from self.python_list()
            yield from self.space()
            if (yield from self.accept(_END)) is not None:
                yield from self.space()
            if (yield from self.peek()):
                raise Malformed("text after the list")
            self.close_call()
        except Malformed:
            if self._num_calls or found is None:
                raise
            held = self.pending().partition(_START)
            self.say(held[0] + held[2])
            self.commit()
            if (yield from self.prose(_END)) is not None:
                text = self.pending().removesuffix(_END)
                self.commit()
                if text:
                    self.say(text)

    def restored(self, text: str) -> str:
        """The text without the marks around it."""
        head, start, rest = text.partition(_START)
        return text if head.strip() or not start else head + rest.replace(_END, "", 1)
