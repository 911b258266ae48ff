"""<think>thoughts</think>answer, by a model that may or may not think: the head of the text decides."""

from __future__ import annotations

from vkit.parsers.reasoning.deepseek_r1 import DeepseekR1
from vkit.parsers.reasoning_reader import Opening
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps


@register_reasoning_parser
class ThinkAuto(DeepseekR1):
    """Thoughts when the text, or the prompt, opens the block; else answer."""

    names = ("think_auto",)
    marker = "<think>"
    marker_order = 20
    needs_start = True

    def read(self) -> Steps[None]:
        """Thoughts, if any, then answer."""
        if self.has_ended:
            return
        # A whole text with an end mark had thoughts even where a stream could not know.
        if self.opening is Opening.THINKING or (self._is_whole and self.end in self._text):
            yield from self.block()
            return
        yield from self.space()
        if (yield from self.accept(self.start)) is None:
            self.has_ended = True
            return
        self.commit()
        yield from self.thoughts()
