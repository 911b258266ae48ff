"""OLMo 3: marks of ordinary text, the start mark optional."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import Opening, ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps


@register_reasoning_parser
class Olmo3(ReasoningReader):
    """Thoughts up to the first end mark. Without one a whole text is answer; a stream has sent thoughts by then."""

    names = ("olmo3",)

    def read(self) -> Steps[None]:
        """Thoughts, then answer."""
        if self.has_ended:
            return
        if self._is_whole and self.end not in self._text and self.opening is not Opening.THINKING:
            self.has_ended = True
            return
        if (yield from self.accept(self.start)) is not None:
            self.commit()
        yield from self.thoughts()
