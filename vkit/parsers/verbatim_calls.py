"""Calls whose arguments are passed on exactly as the model wrote them, JSON or not."""

from __future__ import annotations

from vkit.parsers.json_calls import JsonCalls
from vkit.parsers.scan import Steps, marks_of

_QUOTED = marks_of('"', "\\")
_CLOSES = {"}", "]"}


class VerbatimCalls(JsonCalls):
    """Steps that send text as arguments unseen."""

    keeps_partial = True

    def balanced(self, *ends: str) -> Steps[str]:
        """Send text up to where its brackets are balanced, or one of `ends` comes; that end, or empty.

        The last bracket is held. Brackets and ends inside strings do not count.
        """
        stops = marks_of(*ends, '"', "{", "}", "[", "]")
        depth = 0
        while True:
            stop = yield from self.until(stops, self._pass)
            if stop in ends:
                self._pos -= len(stop)
                self.write_pending()
                self._pos += len(stop)
                self.hold("")
                return stop
            if stop == '"':
                while (yield from self.until(_QUOTED, self._pass)) == "\\":
                    if not (yield from self.peek()):
                        yield from self.more()
                    self._pos += 1
            elif stop not in _CLOSES:
                depth += 1
            else:
                depth -= 1
                if depth <= 0:
                    self.hold(self.pending())
                    return ""

    def _pass(self, piece: str) -> None:
        self.write_pending()

    def end_partial(self) -> None:
        """Send the rest of the text as arguments."""
        self._pos = len(self._text)
        self.write_pending()
