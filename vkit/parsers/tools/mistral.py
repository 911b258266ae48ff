"""Mistral: a name and its arguments behind a mark, or an array behind one mark (tokenizers before v11)."""

from __future__ import annotations

import secrets
import string

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps
from vkit.parsers.tool_reader import Forcing, checked_name
from vkit.parsers.verbatim_calls import VerbatimCalls

_BEGIN = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LEN = 9


@register_tool_parser
class Mistral(VerbatimCalls):
    """Arguments behind a name are passed on even when they are no JSON, so that the model sees its own attempt."""

    names = ("mistral",)
    marker = _BEGIN
    marker_order = 60
    forcing = Forcing.TAGS
    native_separator = ""

    def new_id(self) -> str:
        """Nine letters and digits, as the model's template demands."""
        return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LEN))

    def read(self) -> Steps[None]:
        """Calls of one of the two forms."""
        found = yield from self.prose(_BEGIN)
        if found is not None and (yield from self._is_array()):
            yield from self.call_array()
            yield from self.drop()
            return
        while found is not None:
            text, end = yield from self.take_until("{", _ARGUMENTS, _BEGIN)
            if end == _BEGIN:
                raise Malformed("a call without arguments")
            if end == _ARGUMENTS:
                yield from self.solid()
                yield from self.expect("{")
            self._pos -= 1
            self.open_call(checked_name(text.strip()))
            stop = yield from self.balanced(_BEGIN)
            self.close_call()
            found = stop or (yield from self.prose(_BEGIN))

    def _is_array(self) -> Steps[bool]:
        """Whether an array of objects comes, or an empty one."""
        if (yield from self.solid()) != "[":
            return False
        while not (rest := self._text[self._pos + 1 :].lstrip()):
            yield from self.more()
        return rest[0] in "{]"

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """The mark and the name; nothing follows the arguments."""
        return f"{_BEGIN}{name}", ""
