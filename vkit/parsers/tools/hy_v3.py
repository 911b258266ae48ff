"""Hunyuan v3: keys and values in tags that may all carry one suffix, which the block's own tag tells."""

from __future__ import annotations

import re

from vkit.parsers.python_values import decoded
from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps
from vkit.parsers.schema import coerced
from vkit.parsers.tool_reader import checked_name
from vkit.parsers.xml_calls import KeyValueCalls, with_suffix

_SUFFIX = re.compile(r"(?::[\w.-]+)?")
_TYPES = frozenset({"boolean", "integer", "number", "array", "object", "null", "string"})


@register_tool_parser
class HyV3(KeyValueCalls):
    """<tool_calls> <tool_call>N<tool_sep> … </tool_call> … </tool_calls>, or with <tool_calls:SUFFIX> and so on."""

    names = ("hy_v3",)
    marker = "<tool_calls"
    marker_order = 240
    keeps_partial = True
    separator = "<tool_sep>"
    block = "<tool_calls"
    block_end = "</tool_calls>"

    def read(self) -> Steps[None]:
        """Blocks."""
        found = yield from self.prose(self.block)
        while found is not None:
            suffix, end = yield from self.take_until(">", "<", " ", "\n")
            if end != ">" or not _SUFFIX.fullmatch(suffix):
                raise Malformed("not the opening tag")
            yield from self._block(suffix)
            found = yield from self.drop(self.block)

    def _block(self, suffix: str) -> Steps[None]:
        call, block_end = with_suffix(self.call, suffix), with_suffix(self.block_end, suffix)
        ends = [with_suffix(tag, suffix) for tag in (self.separator, self.key, self.call_end)]
        num_before = self._num_calls
        while True:
            yield from self.space()
            if (yield from self.expect_or_end(block_end, call)) == block_end:
                if self._num_calls == num_before:
                    raise Malformed("a block without calls")
                self.commit()
                return
            text, end = yield from self.take_until(*ends)
            name = checked_name(text.strip())
            self.open_call(name)
            if end == ends[0]:
                yield from self.solid()
                end = yield from self.expect(*ends[1:])
            yield from self.key_values(name, end, suffix)

    def convert(self, text: str, types: frozenset[str]) -> str:
        """JSON text of a value: by the schema's types if it knows any, else by its look."""
        return coerced(text.strip(), types) if types & _TYPES else decoded(text.strip(), types)
