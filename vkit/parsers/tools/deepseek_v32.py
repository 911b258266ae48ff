"""DeepSeek V3.2: DSML, tags whose parameters say whether they are strings."""

from __future__ import annotations

from vkit.parsers.registry import register_tool_parser
from vkit.parsers.scan import Steps
from vkit.parsers.schema import STRING
from vkit.parsers.xml_calls import TaggedXmlCalls, attributes_in, name_in


@register_tool_parser
class DeepseekV32(TaggedXmlCalls):
    """A block without its closing tag is content."""

    names = ("deepseek_v32",)
    marker = "<｜DSML｜function_calls>"
    marker_order = 30
    block = "<｜DSML｜function_calls>"
    block_end = "</｜DSML｜function_calls>"
    call = "<｜DSML｜invoke"
    call_end = "</｜DSML｜invoke>"
    param = "<｜DSML｜parameter"
    param_end = "</｜DSML｜parameter>"
    ends_at_next = False
    keeps_partial = False
    unwrapped = ("arguments", "input")

    def tagged_parameter(self, tool: str, tag: str) -> Steps[str]:
        """Consume a value: text as it is, or one to be converted by the schema."""
        is_string = attributes_in(tag).get("string", "true") != "false"
        return (yield from self.parameter(tool, name_in(tag), *self.value_ends, is_string=is_string))

    def convert(self, text: str, types: frozenset[str]) -> str:
        """JSON text of a value that is said to be no string: JSON when the schema knows no better."""
        return super().convert(text, types if types != STRING else frozenset({"null", "number", "boolean"}))
