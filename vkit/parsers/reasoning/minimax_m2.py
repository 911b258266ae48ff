"""MiniMax M2: thinks from the first token on, with or without a start mark."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Malformed, Steps, marks_of


@register_reasoning_parser
class MinimaxM2(ReasoningReader):
    """Thoughts up to the first end mark without the newline before it; start marks there, and later end marks, go."""

    names = ("minimax_m2",)
    _newline = ""

    def read(self) -> Steps[None]:
        """Thoughts, then answer."""
        if not self.has_ended:
            self.begin_thoughts()
            while (yield from self.until(marks_of(self.start, self.end), self._think)) == self.start:
                self.commit()
            self._newline = ""
            self.end_thoughts()
        while (yield from self.prose(self.end)) is not None:
            before = self.pending().removesuffix(self.end)
            if before:
                self.say(before)
            self.commit()

    def _think(self, piece: str) -> None:
        text = self._newline + piece
        self._newline = "\n" if text.endswith("\n") else ""
        self.think(text.removesuffix("\n"))

    def fail(self, error: Malformed) -> None:
        """Deliver what is pending, and the newline that turned out to stand before no end mark."""
        self._pos = len(self._text)
        self.think(self._newline + self.pending())
