"""Work grows with the length of the text, not with its square: counted in calls, since a busy machine has no clock.

`benchmarks/parsers.py` times the same texts, and so sees what a single call does to a long buffer.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from tests.parsers.kit import function
from vkit.parsers.registry import tool_parser_for

TOOLS = [function("f", a={"type": "string"}, n={"type": "array"})]
TEXTS = {
    "prose": ("hermes", "one word <b> and another. "),
    "blanks": ("hermes", "\n \t"),
    "name": ("hermes", '<tool_call>{"name": "|x'),
    "skipped": ("hermes", '<tool_call>{"x": [|["a", 1, {"b": null}], '),
    "arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "|text \\n'),
    "string": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n|text <\n"),
    "buffered": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n[|1, <2"),
    "python name": ("pythonic", "[|f"),
    "python number": ("pythonic", "[f(a=|1"),
    "python string": ("pythonic", "[f(a='|te\\'xt"),
    "echo": ("lfm2", "<|tool_call_start|>[f()]<|tool_call_end|>|again "),
    "block": ("minicpm5", '<function name="f"><param name="a">|text < '),
    "verbatim": ("mistral", "[TOOL_CALLS]f{|[] "),
}


def num_calls(family: str, head: str, body: str, num: int) -> int:
    """Calls of Python and C functions for a text of `num` characters, read in pieces of four."""
    parser = tool_parser_for(family)
    assert parser is not None
    text = head + body * (num // len(body))
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    reader = parser(TOOLS)
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        for piece in pieces:
            reader.push(piece)
        reader.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", TEXTS)
def test_linear(name: str) -> None:
    family, text = TEXTS[name]
    head, _, body = text.rpartition("|")
    short, long = num_calls(family, head, body, 1_000), num_calls(family, head, body, 16_000)
    assert short > 2 * 1_000 / 4, "every piece is read"
    assert long < 24 * short, "16 times the text takes about 16 times the calls, not 256"
