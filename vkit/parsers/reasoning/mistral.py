"""[THINK]thoughts[/THINK] somewhere in the answer."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import Opening, ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps


@register_reasoning_parser
class Mistral(ReasoningReader):
    """Answer, but for the block; an end mark without a start mark is removed."""

    names = ("mistral",)
    start = "[THINK]"
    end = "[/THINK]"
    marker = "[THINK]"
    marker_order = 10
    needs_start = True
    may_start_late = True

    def read(self) -> Steps[None]:
        """Answer, thoughts, answer."""
        if self.has_ended:
            return
        if self.opening is Opening.THINKING:
            yield from self.swallow_start()
            yield from self.thoughts()
            return
        mark = self.end
        while mark == self.end:
            found = yield from self.prose(self.start, self.end)
            if found is None:
                return
            mark = found
            before = self.pending().removesuffix(mark)
            if before:
                self.say(before)
            self.commit()
        yield from self.thoughts()

    def say(self, text: str) -> None:
        """Deliver answer: unless a block begins later, there are no thoughts to come."""
        self.has_ended = True
        super().say(text)
