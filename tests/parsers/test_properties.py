"""For any text and any cut: no parser raises, nothing is lost, and a stream gives what the whole text gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parsers.kit import FAMILIES, REASONING, streamed, vectors
from vkit.parsers.events import ParsedReply, merged
from vkit.parsers.forced import NamedCall, RequiredCalls
from vkit.parsers.reasoning_reader import Opening
from vkit.parsers.registry import reasoning_parser_for, tool_parser_for
from vkit.parsers.tool_reader import ToolParser

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
_TOKEN = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|\"[^\"]*\"|\w+|\s+|[^\w\s]")
_NOISE = [
    *"{}[]\"\\<>,:()='\n \x01",
    *(
        "é😀",
        "\\u00e9",
        "\\ud83c",
        "</think>",
        "<think>",
        "null",
        "-1",
        "1e999",
        "NaN",
        "True",
        "'a'",
        "助手：",
        "text",
    ),
]
_TRIMS = {"ernie45", "hunyuan_a13b", "llama4_pythonic", "gigachat3"}
"""Families that remove marks (or, the last, a call without arguments) from texts without calls."""


def texts(family: str) -> st.SearchStrategy[str]:
    """Outputs of the family's vectors, cut up, and mixed with each other and with noise."""
    outputs = [_TOKEN.findall(case["model_output"]) for case in vectors(f"tool_parsers/{family}.json")]
    marks = sorted({token for tokens in outputs for token in tokens})
    piece = st.one_of(
        st.sampled_from(outputs).flatmap(
            lambda tokens: st.tuples(st.integers(0, len(tokens)), st.integers(0, len(tokens))).map(
                lambda ends: "".join(tokens[: max(ends)] if min(ends) % 2 else tokens[min(ends) : max(ends)])
            )
        ),
        st.sampled_from(outputs).map("".join),
        st.sampled_from(marks),
        st.sampled_from(_NOISE),
        st.text(max_size=5),
    )
    return st.lists(piece, min_size=1, max_size=5).map("".join)


def tools_of(family: str) -> list[Any]:
    """Every tool of the family's vectors, once."""
    found = {
        tool["function"]["name"]: tool for case in vectors(f"tool_parsers/{family}.json") for tool in case["tools"]
    }
    return list(found.values())


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """The text cut at some places."""
    ends = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def parts(reply: ParsedReply) -> tuple[str, list[tuple[str, str, bool]]]:
    """A reply without identities."""
    return reply.content or "", [(call.name, call.arguments, call.is_complete) for call in reply.tool_calls]


def check(make: Callable[[], ToolParser], text: str, cuts: list[int], was_cut: bool, *, trims: bool) -> None:
    """All the properties of one text."""
    whole, one, many, some = make(), make(), make(), make()
    reply = whole.parse(text, was_cut=was_cut)
    results = [
        streamed(one, [text], was_cut=was_cut),
        streamed(many, list(text), was_cut=was_cut),
        streamed(some, pieces_of(text, cuts), was_cut=was_cut),
    ]
    assert parts(results[0]) == parts(results[1]) == parts(results[2])
    # Whether the reply counts as tool calls is the same in both modes, whatever could not be taken back.
    assert {p.has_only_complete_calls for p in (one, many, some)} == {whole.has_only_complete_calls}
    if whole.has_only_complete_calls or not results[0].tool_calls:
        assert parts(reply) == parts(results[0])
    if not reply.tool_calls and not trims:
        assert (reply.content or "") == text


def check_nothing_is_lost(make: Callable[[], ToolParser], text: str) -> None:
    """A stream that the limit cut gives every word of the text, up to the end of a call that is complete.

    What follows a complete call may be dropped: the families say so.
    """
    parser = make()
    reply = streamed(parser, list(text), was_cut=True)
    if any(call.is_complete for call in reply.tool_calls):
        return
    told = " ".join([reply.content or "", *(f"{call.name} {call.arguments}" for call in reply.tool_calls)])
    for word in re.findall(r"\bw\d+w\b", text):
        assert word in told, word


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_parser(family: str) -> None:
    parser = tool_parser_for(family)
    assert parser is not None
    tools = tools_of(family)

    @QUICK
    @given(texts(family), st.lists(st.integers(0, 10_000), max_size=6), st.booleans())
    def holds(text: str, cuts: list[int], was_cut: bool) -> None:
        check(lambda: parser(tools), text, cuts, was_cut, trims=family in _TRIMS)

    holds()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gigachat3"}))
def test_no_word_is_lost(family: str) -> None:
    """Every text and value of the vectors replaced by numbered words, and cut after every fifth character."""
    parser = tool_parser_for(family)
    assert parser is not None
    for case in vectors(f"tool_parsers/{family}.json"):
        if case["name"] not in ("one_call_mixed_types", "text_before_call", "two_parallel_calls", "truncated_call"):
            continue
        numbers = iter(range(100, 10_000))
        names = {tool["function"]["name"] for tool in case["tools"]}
        text = re.sub(
            r"(?<=[\s>\"'])(?:tea|fm|am|Oban|notes|SELECT|boats|Let|me|look|that|right|away|moment|tables)\b",
            lambda _, numbers=numbers: f"w{next(numbers)}w",
            case["model_output"],
        )
        assert names
        for end in range(1, len(text) + 1, 5):
            check_nothing_is_lost(lambda tools=case["tools"]: parser(tools), text[:end])


@pytest.mark.parametrize("kind", ["named", "required"])
def test_forced_calls(kind: str) -> None:
    tools = tools_of("hermes")

    def make() -> ToolParser:
        return NamedCall(tools, "brew") if kind == "named" else RequiredCalls(tools)

    json_text = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ).map(json.dumps)
    calls = st.lists(
        st.fixed_dictionaries({"name": st.just("brew"), "parameters": st.dictionaries(st.text(), st.integers())})
    ).map(json.dumps)

    @QUICK
    @given(st.one_of(json_text, calls, st.text()), st.lists(st.integers(0, 1000), max_size=5), st.booleans())
    def holds(text: str, cuts: list[int], was_cut: bool) -> None:
        check(make, text, cuts, was_cut, trims=True)

    holds()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(QUICK, max_examples=300)
@given(_JSON.map(json.dumps), st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["", *_NOISE])), max_size=2))
def test_json_is_a_call_when_a_json_parser_takes_it(text: str, edits: list[tuple[int, str]]) -> None:
    """Judged by the standard library's parser, but for its leniency with NaN."""
    for place, noise in edits:
        place %= len(text) + 1
        text = text[:place] + noise + text[place + 1 :]
    try:
        value = json.loads(text, parse_constant=_no_constants)
    except ValueError:
        value = None
    hermes = tool_parser_for("hermes")
    assert hermes is not None
    reply = hermes().parse(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>')
    if isinstance(value, dict):
        (call,) = reply.tool_calls
        assert json.loads(call.arguments) == value
    elif not isinstance(value, str):
        assert reply.tool_calls == [] or "}" in text
    if reply.tool_calls:
        assert isinstance(json.loads(reply.tool_calls[0].arguments), dict)


def _no_constants(name: str) -> None:
    raise ValueError(name)


# Reasoning

_THOUGHTS = st.lists(
    st.sampled_from(
        [*("<think>", "</think>", "[THINK]", "[/THINK]", "<thin", "k>", "</", "\n", " ", "why", "because", "<", "é😀")]
    ),
    max_size=8,
).map("".join)


def is_revised(name: str, text: str, opening: Opening) -> bool:
    """Whether a whole text tells what a stream could not know: the cases that the contract names."""
    if opening is not Opening.UNKNOWN:
        return False
    head = text.lstrip()
    starts = head.startswith("<think>")
    if name == "think_auto":
        return not starts and "</think>" in text
    if name in ("deepseek_r1", "deepseek_v3", "holo2"):
        first, end = text.find("<think>"), text.find("</think>")
        return not starts and first >= 0 and (end < 0 or first < end)
    return name == "olmo3" and "</think>" not in text


@pytest.mark.parametrize("opening", list(Opening))
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parser(name: str, opening: Opening) -> None:
    parser = reasoning_parser_for(name)
    assert parser is not None

    @QUICK
    @given(_THOUGHTS, st.lists(st.integers(0, 1000), max_size=5), st.booleans())
    def holds(text: str, cuts: list[int], thinking: bool) -> None:
        variables = {"thinking": thinking}
        whole = parser(opening, variables)
        reasoning, content = whole.parse(text)
        results = []
        for pieces in ([text], list(text), pieces_of(text, cuts)):
            stream = parser(opening, variables)
            events = [event for piece in pieces for event in stream.push(piece)]
            reply = merged([*events, *stream.finish()])
            results.append((reply.reasoning, reply.content, stream.has_ended))
        assert results[0] == results[1] == results[2]
        thinks = name != "deepseek_v3" or thinking
        if not (thinks and is_revised(name, text, opening)):
            assert (reasoning, content, whole.has_ended) == results[0]
        for mark in ("<think>", "</think>", "[THINK]", "[/THINK]"):
            text = text.replace(mark, "")
        told = (results[0][0] or "") + (results[0][1] or "")
        for word in ("why", "because", "é😀"):
            assert told.count(word) == text.count(word)

    holds()
