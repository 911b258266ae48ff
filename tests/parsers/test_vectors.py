"""Every vector of tool calls, reasoning and detection; the streaming ones for every cut into two and by characters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.parsers.kit import FAMILIES, REASONING, matches, same_text, streamed, two_way_splits, vectors
from vkit.parsers.events import merged
from vkit.parsers.reasoning_reader import ReasoningParser, opening_of
from vkit.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_for, tool_parser_for
from vkit.parsers.tool_reader import ToolParser


def tool_parser(name: str, case: dict[str, Any]) -> ToolParser:
    """A parser for the tools of a case."""
    parser = tool_parser_for(name)
    assert parser is not None
    return parser(case["tools"])


def tool_cases(*, streaming: bool) -> list[Any]:
    """(name, case) of every vector, aliases too."""
    cases = []
    for family in FAMILIES:
        parser = tool_parser_for(family)
        assert parser is not None
        for name in parser.names:
            for case in vectors(f"tool_parsers/{family}.json"):
                if not streaming or case.get("streaming"):
                    cases.append(pytest.param(name, case, id=f"{name}-{case['name']}"))
    return cases


def test_the_families_with_vectors_are_all_there_are() -> None:
    named = {parser.names[0] for parser in map(TOOL_PARSERS.get, TOOL_PARSERS.names())}
    assert named == set(FAMILIES)
    assert len(named) == 36
    assert len(TOOL_PARSERS.names()) == 40


@pytest.mark.parametrize(("name", "case"), tool_cases(streaming=False))
def test_whole_text(name: str, case: dict[str, Any]) -> None:
    parser = tool_parser(name, case)
    reply = parser.parse(case["model_output"])
    wanted = [case["expected"], *case.get("alternatives", [])]
    assert any(matches(reply, item) for item in wanted), reply
    for call in reply.tool_calls:
        pattern = {"mistral": r"[A-Za-z0-9]{9}", "kimi_k2": r"functions\..*:\d+"}.get(name, r"call_[0-9a-f]{24}")
        assert re.fullmatch(pattern, call.id), call


@pytest.mark.parametrize(("name", "case"), tool_cases(streaming=True))
def test_stream(name: str, case: dict[str, Any]) -> None:
    wanted = [case["expected"], *case.get("alternatives", [])]
    for pieces in two_way_splits(case["model_output"]):
        reply = streamed(tool_parser(name, case), pieces)
        assert any(matches(reply, item) for item in wanted), (pieces, reply)


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_a_complete_call_is_said_to_be_complete(name: str) -> None:
    family = TOOL_PARSERS.get(name).names[0]
    case = next(item for item in vectors(f"tool_parsers/{family}.json") if item["name"] == "one_call_mixed_types")
    whole, parts = tool_parser(name, case), tool_parser(name, case)
    reply = whole.parse(case["model_output"])
    assert all(call.is_complete for call in reply.tool_calls)
    assert all(call.is_complete for call in streamed(parts, list(case["model_output"])).tool_calls)
    assert whole.has_only_complete_calls
    assert parts.has_only_complete_calls


# Reasoning


def reasoning_parser(name: str, case: dict[str, Any]) -> ReasoningParser:
    """A parser after the prompt of a case."""
    parser = reasoning_parser_for(name)
    assert parser is not None
    opening = opening_of("<|user|>hi<|assistant|>" + case.get("prompt_suffix", ""), parser)
    return parser(opening, case.get("chat_template_kwargs"))


REASONING_CASES = [
    pytest.param(name, case, id=f"{name}-{case['name']}")
    for name in REASONING
    for case in vectors(f"reasoning/{name}.json")
]


@pytest.mark.parametrize(("name", "case"), REASONING_CASES)
def test_whole_reasoning(name: str, case: dict[str, Any]) -> None:
    reasoning, content = reasoning_parser(name, case).parse(case["model_output"])
    assert same_text(reasoning, case["expected"]["reasoning"])
    assert same_text(content, case["expected"]["content"])


@pytest.mark.parametrize(("name", "case"), REASONING_CASES)
def test_streamed_reasoning(name: str, case: dict[str, Any]) -> None:
    wanted = case.get("streaming_expected") or (case["expected"] if case.get("streaming") else None)
    results = set()
    for pieces in two_way_splits(case["model_output"]):
        parser = reasoning_parser(name, case)
        events = [event for piece in pieces for event in parser.push(piece)]
        reply = merged([*events, *parser.finish()])
        results.add((reply.reasoning, reply.content, parser.has_ended))
        if wanted is not None:
            assert same_text(reply.reasoning, wanted["reasoning"]), pieces
            assert same_text(reply.content, wanted["content"]), pieces
    assert len(results) == 1


def test_the_reasoning_parsers_with_vectors_are_all_there_are() -> None:
    assert REASONING_PARSERS.names() == REASONING


# Detection


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in vectors("detect/cases.json")])
def test_detection(case: dict[str, Any]) -> None:
    tools = tool_parser_for("auto", case["chat_template"])
    reasoning = reasoning_parser_for("auto", case["chat_template"])
    assert tools is not None
    assert tools.names[0] == case["expected_tool_parser"]
    assert (reasoning.names[0] if reasoning else None) == case["expected_reasoning_parser"]


def test_detection_without_a_template() -> None:
    tools = tool_parser_for("auto", None)
    assert tools is not None
    assert tools.names == ("hermes",)
    assert reasoning_parser_for("auto", None) is None
    assert tool_parser_for("none") is None
    assert reasoning_parser_for("none") is None


def test_unescaped_arguments() -> None:
    (case,) = (c for c in vectors("tool_parsers/glm45.json") if c["name"] == "unicode_and_escapes")
    (call,) = tool_parser("glm45", case).parse(case["model_output"]).tool_calls
    assert any(ord(char) > 127 for value in json.loads(call.arguments).values() for char in value)
    assert "\\u" not in call.arguments
