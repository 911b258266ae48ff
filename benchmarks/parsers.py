"""Times tool-call parsers over texts that could make them read their buffer again and again.

Prints, per text, milliseconds for 4,000 and 64,000 characters in pieces of four, and their ratio: 16 where work grows
with the length, 256 where it grows with its square.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from vkit.parsers.registry import tool_parser_for

SIZES = (4_000, 64_000)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "array"}}},
        },
    }
]
TEXTS = {
    "prose": ("hermes", "", "one word <b> and another. "),
    "skipped": ("hermes", '<tool_call>{"x": [', '["a", 1, {"b": null}], '),
    "arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "text \\n"),
    "string": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n", "text <\n"),
    "buffered": ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n[", "1, <2"),
    "python string": ("pythonic", "[f(a='", "te\\'xt"),
    "block": ("minicpm5", '<function name="f"><param name="a">', "text < "),
    "verbatim": ("mistral", "[TOOL_CALLS]f{", "[] "),
}
"""Name -> family, beginning, what repeats."""


def seconds(family: str, head: str, body: str, num: int) -> float:
    """Processor time of the shortest of three runs."""
    parser = tool_parser_for(family)
    assert parser is not None
    text = head + body * (num // len(body))
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    times = []
    for _ in range(3):
        reader = parser(TOOLS)
        start = time.thread_time()
        for piece in pieces:
            reader.push(piece)
        reader.finish()
        times.append(time.thread_time() - start)
    return min(times)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    found = {name: [seconds(*text, num) * 1e3 for num in SIZES] for name, text in TEXTS.items()}
    if chosen.json:
        print(json.dumps({name: {"ms": times, "ratio": times[1] / times[0]} for name, times in found.items()}))
        return 0
    for name, (short, long) in found.items():
        print(f"{name:14} {short:8.1f} ms {long:8.1f} ms {long / short:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
