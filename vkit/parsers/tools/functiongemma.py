"""FunctionGemma: call:NAME{key:<escape>value<escape>}"""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.schema import dumps, loads
from vkit.parsers.tool_reader import ToolReader, checked_name

_BEGIN, _END = "<start_function_call>", "<end_function_call>"
_ESCAPE = "<escape>"


@register_tool_parser
class Functiongemma(ToolReader):
    """Values are JSON if they look it, else text. Text before is content, text after is dropped."""

    names = ("functiongemma",)
    marker = _BEGIN
    marker_order = 160
    keeps_partial = True

    def read(self) -> Steps[None]:
        """Calls."""
        found = yield from self.prose(_BEGIN)
        while found is not None:
            yield from self.solid()
            yield from self.expect("call:")
            name, _ = yield from self.take_until("{")
            self.open_call(checked_name(name.strip()))
            yield from self._pairs()
            yield from self.space()
            yield from self.expect_or_end(_END)
            self.close_call()
            found = yield from self.drop(_BEGIN)

    def _pairs(self) -> Steps[None]:
        """Consume pairs up to and with the closing brace, and send them."""
        while (yield from self.solid()) != "}":
            key, _ = yield from self.take_until(":")
            yield from self.solid()
            yield from self.expect(_ESCAPE)
            text, _ = yield from self.take_until(_ESCAPE)
            self.write_pair(key.strip(), _value(text))
            yield from self.solid()
            if (yield from self.accept(",")) is None:
                break
        yield from self.expect("}")


def _value(text: str) -> str:
    try:
        return dumps(loads(text))
    except ValueError:
        return dumps(text)
