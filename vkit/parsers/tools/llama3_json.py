"""Llama 3 and 4: bare objects, several separated by semicolons."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Cut, Malformed, Steps
from vkit.parsers.schema import dumps
from vkit.parsers.tool_reader import Forcing

_TAG = "<|python_tag|>"


@register_tool_parser
class Llama3Json(JsonCalls):
    """Text before the first object is content, text between and after is dropped.

    Braces that do not hold JSON are text; JSON that is no call makes everything content: an answer, not a call.
    """

    names = ("llama3_json", "llama4_json")
    marker = _TAG
    marker_order = 140
    forcing = Forcing.TAGS
    native_separator = "; "
    argument_keys = ("arguments", "parameters")

    def read(self) -> Steps[None]:
        """Objects wherever they stand."""
        found = yield from self.prose(_TAG, "{")
        while found is not None:
            if found == "{":
                self._pos -= 1
            yield from self.space()
            if (yield from self.peek()) == "{":
                yield from self._object()
            else:
                self.say_pending()
            found = yield from self.drop(_TAG, "{") if self._num_calls else self.prose(_TAG, "{")

    def _object(self) -> Steps[None]:
        """Consume an object and send it, if it is a call; what is not even JSON is content."""
        try:
            is_call = yield from self.call_object()
        except Malformed as error:
            if self._num_calls or self._has_begun_arguments or isinstance(error, Cut):
                raise
            self.say_pending()
            return
        if not is_call:
            raise Malformed("an object that is no call")
        self.close_call()

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """The object around the arguments."""
        return f'{{"name": {dumps(name)}, "parameters": ', "}"
