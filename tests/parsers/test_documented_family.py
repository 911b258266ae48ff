"""The families in docs/parsers.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.parsers.kit import streamed, two_way_splits
from vkit.parsers.tool_reader import ToolParser

PAGE = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")


def documented(name: str) -> type[ToolParser]:
    """The class that a block of the page defines."""
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if f"class {name}(" in code)
    scope: dict[str, type[ToolParser]] = {}
    exec(block.replace("@register_tool_parser", ""), scope)
    return scope[name]


def test_a_family_of_its_own_syntax() -> None:
    arrow = documented("Arrow")
    text = 'On it.\n=> f {"a": [1, "<="]} <=\n=> g {} <= bye'
    for pieces in two_way_splits(text):
        reply = streamed(arrow(), pieces)
        assert reply.content == "On it."
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", '{"a": [1, "<="]}'), ("g", "{}")]
    assert arrow().parse("=> f {1}").content == "=> f {1}"


def test_a_family_of_shared_syntax() -> None:
    reply = documented("Longcat")().parse('<longcat_tool_call>{"name": "f", "arguments": {}}</longcat_tool_call>')
    assert [call.name for call in reply.tool_calls] == ["f"]
