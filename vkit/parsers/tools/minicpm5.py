"""MiniCPM 5: function and param tags, checked against the tools."""

from __future__ import annotations

from vkit.parsers.python_values import decoded
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Cut, Malformed, Steps
from vkit.parsers.schema import dumps
from vkit.parsers.xml_calls import XmlCalls, attributes_in, object_of

_BEGIN, _END = '<function name="', "</function>"
_PARAM, _PARAM_END = "<param", "</param>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_WRAPPERS = ("arguments", "properties")


@register_tool_parser
class Minicpm5(XmlCalls):
    """A block that fits no tool is text, so a call is sent when its block is closed. Text after a call is dropped."""

    names = ("minicpm5",)
    marker = _BEGIN
    marker_order = 70

    def read(self) -> Steps[None]:
        """Blocks."""
        found = yield from self.prose(_BEGIN)
        while found is not None:
            try:
                name, _ = yield from self.take_until('">')
                pairs = yield from self._pairs()
                self._send(name, pairs)
            except Malformed as error:
                if isinstance(error, Cut):
                    raise
                self.say_pending()
            found = yield from self.prose(_BEGIN) if not self._num_calls else self.drop(_BEGIN)

    def _pairs(self) -> Steps[dict[str, str]]:
        """Consume parameters up to and with the end of the block; their texts by name."""
        pairs: dict[str, str] = {}
        while True:
            yield from self.solid()
            if (yield from self.expect(_PARAM, _END)) == _END:
                return pairs
            tag, _ = yield from self.take_until(">")
            key = attributes_in(tag).get("name")
            if not key or key in pairs:
                raise Malformed("a parameter without a name, or twice")
            pairs[key] = yield from self._text_value()

    def _text_value(self) -> Steps[str]:
        yield from self.space()
        if (yield from self.accept(_CDATA)) is None:
            text, _ = yield from self.take_until(_PARAM_END)
            return text.strip()
        text, _ = yield from self.take_until(_CDATA_END)
        yield from self.solid()
        yield from self.expect(_PARAM_END)
        return text.strip()

    def _send(self, name: str, pairs: dict[str, str]) -> None:
        """Send a call.

        Raises:
            Malformed: no such tool, or a parameter it needs is missing.
        """
        if not self.tools.declares(name):
            raise Malformed("no such tool")
        known = self.tools.properties(name)
        values = {key: decoded(text, self.tools.types(name, key)) for key, text in pairs.items() if key in known}
        if len(pairs) == 1 and not values:
            ((key, text),) = pairs.items()
            inner = object_of(text) if key in _WRAPPERS else None
            values = {inner_key: dumps(value) for inner_key, value in (inner or {}).items()}
        if any(key not in values for key in self.tools.required(name)):
            raise Malformed("a required parameter is missing")
        self.open_call(name)
        for key, value in values.items():
            self.write_pair(key, value)
        self.close_call()
