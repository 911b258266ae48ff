"""<think>thoughts</think>answer, by a model that always thinks: a missing start mark changes nothing."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import Opening, ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps, marks_of


@register_reasoning_parser
class DeepseekR1(ReasoningReader):
    """Everything is thoughts until the first end mark."""

    names = ("deepseek_r1",)

    def read(self) -> Steps[None]:
        """Thoughts, then answer."""
        if not self.has_ended:
            yield from self.block()

    def block(self) -> Steps[None]:
        """Deliver thoughts up to the end mark; the first start mark is swallowed."""
        yield from self.space()
        is_opened = (yield from self.accept(self.start)) is not None
        if is_opened:
            self.commit()
        self.begin_thoughts()
        if not is_opened and self.opening is not Opening.THINKING:
            mark = yield from self.until(marks_of(self.start, self.end), self.think)
            if mark == self.end:
                self.end_thoughts()
                return
            if self._is_whole:  # what stands before the start mark is not part of the thoughts; a stream has sent it
                self._events.clear()
            self.commit()
        yield from self.thoughts()
