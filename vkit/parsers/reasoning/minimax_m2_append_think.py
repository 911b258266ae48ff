"""MiniMax M2 for clients that keep raw transcripts: the start mark of the prompt is put back, nothing is split."""

from __future__ import annotations

from vkit.parsers.reasoning_reader import ReasoningReader
from vkit.parsers.registry import register_reasoning_parser
from vkit.parsers.scan import Steps


@register_reasoning_parser
class MinimaxM2AppendThink(ReasoningReader):
    """<think> and the whole text as answer."""

    names = ("minimax_m2_append_think",)
    start = ""
    end = ""

    def starts_ended(self) -> bool:
        """There are never thoughts."""
        return True

    def read(self) -> Steps[None]:
        """The mark before the first text."""
        if (yield from self.peek()):
            self.say("<think>")
