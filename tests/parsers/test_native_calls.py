"""Forced calls in families' own syntax: whatever the constraint lets through, the parser reads as a valid call."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.parsers.kit import function
from tests.structured.kit import EOS_ID, follows
from vkit.errors import InvalidRequest
from vkit.parsers.events import ReplyContext
from vkit.parsers.output import open_parsers
from vkit.structured.compiler import GrammarCompiler
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import Vocabulary
from vkit.types import StructuredOutputs

MARKS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>']
MARKS += ["<|tool_call>", "<tool_call|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
MARKS += ["<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"]
FIRST = 258


class _Encoder:
    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            found = next((i for i, mark in enumerate(MARKS) if parse_special and rest.startswith(mark.encode())), None)
            ids.append(rest[0] if found is None else FIRST + found)
            rest = rest[1 if found is None else len(MARKS[found]) :]
        return ids


def tokenizer() -> Tokenizer:
    """Bytes, BOS, EOS, and every mark as a control token."""
    pieces = [*(f"<{value}>" for value in range(256)), "<bos>", "<eos>", *MARKS]
    special = frozenset({256, 257, *range(FIRST, FIRST + len(MARKS))})
    vocabulary = Vocabulary(
        size=len(pieces),
        piece=lambda token_id: pieces[token_id] if token_id < len(pieces) else None,
        added_ids=special,
        special_ids=special,
        spell=str.encode,
        byte_values={value: value for value in range(256)},
    )
    return Tokenizer(_Encoder(), vocabulary, bos_token_id=256, eos_token_id=EOS_ID)


TOKENIZER = tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Any:
    made = GrammarCompiler(TOKENIZER, TOKENIZER.eos_token_ids)
    yield made
    made.close()


def walk(compiler: GrammarCompiler, constraint: StructuredOutputs, seed: int, *, limit: int = 900) -> list[int]:
    """A random output that the constraint allows; marks and ends are likelier than letters, so that it ends."""
    rng = random.Random(seed)
    grammar = compiler.compile(constraint).result()
    row = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.int32)
    ids: list[int] = []
    while len(ids) < limit:
        grammar.fill_bitmask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(bits) if i < TOKENIZER.vocab_size]
        letters = [i for i in allowed if 32 <= i < 127] or [i for i in allowed if i < 256]
        others = [i for i in allowed if i >= FIRST or i == EOS_ID or i in b'"}],']
        chosen = rng.choice(others if others and (not letters or rng.random() < 0.45) else letters or allowed)
        if chosen == EOS_ID:
            return ids
        assert grammar.accept_tokens([chosen])
        ids.append(chosen)
    raise AssertionError("no end in sight")


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "ratio": {"type": "number", "minimum": 0, "maximum": 9},
        "exact": {"type": "boolean"},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "zip": {"type": "string", "pattern": "^[0-9]{3}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["n", None, 3]}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "level": {"enum": [1, 2, None]},
    },
    "required": ["days", "unit", "zip"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}, function("ping")]
FAMILIES = ["glm45", "glm47", "poolside_v1", "gemma4", "kimi_k2"]


def constraint_of(family: str, tools: Any = None, name: str | None = None, *, parallel: bool = True) -> Any:
    choice = "named" if name else "required"
    context = ReplyContext("", [], TOOLS if tools is None else tools, choice, name, parallel)
    parsers = open_parsers(family)
    constraint = parsers.forced_constraint(context)
    assert constraint is not None
    return constraint, parsers, context


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_let_through_is_a_valid_call(family: str, compiler: GrammarCompiler) -> None:
    required, parsers, context = constraint_of(family)
    num_calls = set()
    for seed in range(40):
        ids = walk(compiler, required, seed)
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        reply = parsers.open(context).parse(text, ids)
        assert reply.tool_calls, text
        assert not (reply.content or "").strip()
        num_calls.add(len(reply.tool_calls))
        assert len({call.id for call in reply.tool_calls}) == len(reply.tool_calls)
        for call in reply.tool_calls:
            assert call.name in ("get_weather", "ping")
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, TOOLS[call.name == "ping"]["function"]["parameters"])
    assert len(num_calls) > 1, "one call and several"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_where_one_is_wanted(family: str, compiler: GrammarCompiler) -> None:
    for keywords in ({"name": "get_weather"}, {"parallel": False}):
        constraint, parsers, context = constraint_of(family, **keywords)  # type: ignore[arg-type]
        for seed in range(6):
            ids = walk(compiler, constraint, seed)
            reply = parsers.open(context).parse(TOKENIZER.decode(ids, skip_special_tokens=False), ids)
            assert len(reply.tool_calls) == 1
            assert "name" not in keywords or reply.tool_calls[0].name == "get_weather"


NATIVE = {
    "glm45": "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>C</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>123</arg_value>\n</tool_call>",
    "poolside_v1": "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>unit</arg_key>"
    "<arg_value>C</arg_value><arg_key>zip</arg_key><arg_value>123</arg_value></tool_call>",
    "gemma4": '<|tool_call>call:get_weather{days:3,unit:<|"|>C<|"|>,zip:<|"|>123<|"|>}<tool_call|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0 <|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_call_begin|>functions.ping:1 <|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
}


@pytest.mark.parametrize("family", NATIVE)
def test_marks_are_the_control_tokens_and_not_their_letters(family: str, compiler: GrammarCompiler) -> None:
    constraint, _, _ = constraint_of(family)
    text = NATIVE[family]
    as_tokens = TOKENIZER.encode(text, add_special_tokens=False, parse_special=True)
    as_letters = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(as_tokens) < len(as_letters)
    assert follows(compiler.compile(constraint).result(), TOKENIZER, as_tokens)
    assert not follows(compiler.compile(constraint).result(), TOKENIZER, as_letters)
    for wrong in (text.replace("123", "12"), text.replace(">3<", ">99<").replace("days:3", "days:99")):
        ids = TOKENIZER.encode(wrong, add_special_tokens=False, parse_special=True)
        assert wrong == text or not follows(compiler.compile(constraint).result(), TOKENIZER, ids), wrong


@pytest.mark.parametrize("family", ["glm45", "poolside_v1", "gemma4"])
@pytest.mark.parametrize(
    ("properties", "more", "said"),
    [
        ({"a": {"type": "string", "format": "date"}}, {}, "parameters.a: format cannot be enforced"),
        ({"a": {"type": "string", "pattern": "x", "minLength": 2}}, {}, "parameters.a: pattern beside"),
        ({}, {"required": ["a"]}, "a is required and not described"),
        ({}, {"patternProperties": {"x": {}}}, "patternProperties cannot be enforced"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(family: str, properties: Any, more: Any, said: str) -> None:
    parameters = {"type": "object", "properties": properties, **more}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest, match=said) as caught:
        constraint_of(family, tools)
    assert caught.value.param == "tool_choice"


def test_references_are_followed(compiler: GrammarCompiler) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"$ref": "#/$defs/Q"}},
        "required": ["p", "q"],
        "$defs": {
            "P": {
                "type": "object",
                "properties": {"k": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["k"],
                "additionalProperties": False,
            },
            "Q": {"type": "string", "enum": ["a", "b"]},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for family in ("glm45", "gemma4"):
        constraint, parsers, context = constraint_of(family, tools, "f")
        for seed in range(5):
            ids = walk(compiler, constraint, seed)
            (call,) = parsers.open(context).parse(TOKENIZER.decode(ids, skip_special_tokens=False), ids).tool_calls
            jsonschema.validate(json.loads(call.arguments), parameters)
    circle = {"type": "object", "properties": {"p": {"$ref": "#"}}, "required": ["p"]}
    with pytest.raises(InvalidRequest, match="nested too deep, or in itself"):
        constraint_of("gemma4", [{"type": "function", "function": {"name": "f", "parameters": circle}}])
