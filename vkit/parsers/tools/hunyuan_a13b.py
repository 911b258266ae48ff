"""Hunyuan A13B: an array in tags, unless it is only thought of."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonArrayCalls
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps

_THINK, _THINK_END = "<think>", "</think>"
_SPEAKER = "助手："


@register_tool_parser
class HunyuanA13b(JsonArrayCalls):
    """Calls inside a thought are text. The speaker's name at the beginning of an answer goes."""

    names = ("hunyuan_a13b",)
    begin = "<tool_calls>"
    end = "</tool_calls>"
    skips_other_elements = True

    def read(self) -> Steps[None]:
        """Text with thoughts, then one array."""
        if (yield from self.accept(_SPEAKER)) is not None:
            self.commit()
        while (found := (yield from self.prose(_THINK, self.begin))) == _THINK:
            self.say_pending()
            if (yield from self.prose(_THINK_END)) is None:
                return
            self.say_pending()
        if found is not None:
            yield from self.array()
