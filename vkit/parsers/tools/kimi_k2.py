"""Kimi K2: a section of calls, each with the model's own identity."""

from __future__ import annotations

import re

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Malformed, Steps, marks_of
from vkit.parsers.tool_reader import STRIP, Forcing
from vkit.parsers.verbatim_calls import VerbatimCalls

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEADER = re.compile(r"(?:functions\.)?([^:]+):(?:.*:)?\d+", re.DOTALL)


@register_tool_parser
class KimiK2(VerbatimCalls):
    """The header is the identity; arguments are passed on as they are, `{}` if there are none."""

    names = ("kimi_k2",)
    marker = _SECTION
    marker_order = 190
    forcing = Forcing.TAGS
    native_block = (_SECTION, _SECTION_END)
    native_separator = None  # calls are numbered: see native_tags_at

    def read(self) -> Steps[None]:
        """Sections of calls."""
        found = yield from self.prose(_SECTION)
        while found is not None:
            yield from self._section()
            found = yield from self.drop(_SECTION)

    def _section(self) -> Steps[None]:
        num_before = self._num_calls
        end = ""
        while end != _SECTION_END:
            yield from self.space()
            if (yield from self.expect_or_end(_SECTION_END, _CALL)) == _SECTION_END:
                break
            header, end = yield from self.take_until(_ARGUMENTS, _CALL_END, _SECTION_END)
            match = _HEADER.fullmatch(header.strip())
            if end != _ARGUMENTS:
                continue
            if match is None:
                _, end = yield from self.take_until(_CALL_END, _SECTION_END)
                continue
            self.open_call(match[1], header.strip())
            end = yield from self._arguments()
        if self._num_calls == num_before:
            raise Malformed("a section without calls")
        self.commit()

    def _arguments(self) -> Steps[str]:
        sent: list[str] = []

        def send(piece: str) -> None:
            sent.append(piece)
            self.write(piece)

        end = yield from self.trimmed_until(marks_of(_CALL_END, _SECTION_END), STRIP, send)
        self.hold("" if sent else "{}")
        self.close_call()
        return end

    @classmethod
    def native_tags(cls, name: str) -> tuple[str, str] | None:
        """The marks and the header of a first call, and the mark that closes it."""
        return cls.native_tags_at(name, 0)

    @classmethod
    def native_tags_at(cls, name: str, index: int) -> tuple[str, str] | None:
        """The marks and the header of a call, which ends in its number, and the mark that closes it."""
        return f"{_CALL}functions.{name}:{index} {_ARGUMENTS}", _CALL_END
