"""Vectors of parsers, how results are compared with them, and streams cut in every way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vkit.parsers.events import ParsedReply, merged
from vkit.parsers.tool_reader import ToolParser

SHARED = Path(__file__).parents[2] / ".." / "shared"

FAMILIES = sorted(file.stem for file in (SHARED / "vectors" / "tool_parsers").glob("*.json"))
REASONING = sorted(file.stem for file in (SHARED / "vectors" / "reasoning").glob("*.json"))


def vectors(name: str) -> list[Any]:
    """The cases of one file of vectors."""
    cases: list[Any] = json.loads((SHARED / "vectors" / name).read_text(encoding="utf-8"))
    return cases


def two_way_splits(text: str) -> Iterator[list[str]]:
    """One piece, single characters, and every cut into two."""
    yield [text]
    yield list(text)
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]


def streamed(parser: ToolParser, pieces: Sequence[str], *, was_cut: bool = False) -> ParsedReply:
    """What the deltas of a stream add up to."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish(was_cut=was_cut)])


def same(found: object, wanted: object) -> bool:
    """Whether two JSON values are equal; numbers by value, booleans are no numbers."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in found)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


def same_text(found: str | None, wanted: str | None) -> bool:
    """Whether two texts are equal but for white space around them; null is empty."""
    return (found or "").strip() == (wanted or "").strip()


def matches(reply: ParsedReply, expected: dict[str, Any]) -> bool:
    """Whether a reply is what a case of vectors/tool_parsers expects."""
    wanted = expected["tool_calls"]
    if not same_text(reply.content, expected["content"]) or len(reply.tool_calls) != len(wanted):
        return False
    for call, want in zip(reply.tool_calls, wanted, strict=True):
        if call.name != want["name"] or call.id != want.get("id", call.id):
            return False
        if "arguments_raw" in want:
            if call.arguments != want["arguments_raw"]:
                return False
        elif not same(json.loads(call.arguments), want["arguments"]):
            return False
    return True


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
