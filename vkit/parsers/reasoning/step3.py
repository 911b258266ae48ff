"""Step 3: thinks from the first token on; only the end mark matters."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps


@register_reasoning_parser
class Step3(ReasoningReader):
    """Thoughts up to the first end mark; a start mark is part of them."""

    names = ("step3",)
    start = ""

    def read(self) -> Steps[None]:
        """Thoughts, then answer."""
        if not self.has_ended:
            yield from self.thoughts()
