"""Qwen3-Coder and the models that learnt its tags."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.tools.step3p5 import Step3p5


@register_tool_parser
class Qwen3Coder(Step3p5):
    """The outer tag may be missing."""

    names = ("qwen3_coder", "qwen3_xml", "mimo")
    marker = None

    def read(self) -> Steps[None]:
        """Blocks and bare calls."""
        found = yield from self.prose(self.block, self.call)
        while found is not None:
            yield from self.calls() if found == self.block else self.one_call()
            found = yield from self.drop(self.block, self.call)
