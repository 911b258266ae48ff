"""Work grows with the length of the text, not with its square."""

from __future__ import annotations

import time

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


def seconds(family: str, head: str, body: str, num: int) -> float:
    """Shortest of three runs, in pieces of four characters."""
    parser = tool_parser_for(family)
    assert parser is not None
    text = head + body * (num // len(body))
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    times = []
    for _ in range(3):
        reader = parser(TOOLS)
        start = time.perf_counter()
        for piece in pieces:
            reader.push(piece)
        reader.finish()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("name", TEXTS)
def test_linear(name: str) -> None:
    family, text = TEXTS[name]
    head, _, body = text.rpartition("|")
    short, long = seconds(family, head, body, 4_000), seconds(family, head, body, 64_000)
    assert long < 100 * short, "16 times the text may take about 16 times as long, not 256"
