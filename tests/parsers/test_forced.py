"""Vectors of forced choices: what the constraint accepts, and how output becomes calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parsers.kit import function, matches, streamed, two_way_splits, vectors
from tests.structured.kit import bytes_tokenizer, follows
from vkit.parsers.events import ReplyContext
from vkit.parsers.forced import NamedCall, RequiredCalls, forced_schema
from vkit.parsers.output import open_parsers
from vkit.structured.compiler import GrammarCompiler
from vkit.types import StructuredOutputs

CASES = [pytest.param(case, id=case["name"]) for case in vectors("tool_choice/cases.json")]


def name_of(case: dict[str, Any]) -> str | None:
    """The named tool, if the choice names one."""
    choice = case["tool_choice"]
    return None if choice == "required" else choice["function"]["name"]


@pytest.fixture(scope="module")
def grammars() -> Any:
    """Whether a text is accepted by a constraint."""
    tokenizer = bytes_tokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)

    def accepts(constraint: StructuredOutputs, text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return follows(compiler.compile(constraint).result(), tokenizer, ids)

    yield accepts
    compiler.close()


@pytest.mark.parametrize("case", CASES)
def test_the_schema_accepts_what_is_a_call(case: dict[str, Any], grammars: Any) -> None:
    constraint = StructuredOutputs(json=forced_schema(case["tools"], name_of(case)))
    for text in case["accept"]:
        assert grammars(constraint, text), text
    for text in case["reject"]:
        assert not grammars(constraint, text), text


@pytest.mark.parametrize("case", CASES)
def test_the_schema_is_judged_by_another_validator(case: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import json

    validator = jsonschema.Draft202012Validator(forced_schema(case["tools"], name_of(case)))
    assert all(validator.is_valid(json.loads(text)) for text in case["accept"])
    for text in case["reject"]:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        assert not validator.is_valid(value), text


@pytest.mark.parametrize("case", CASES)
def test_output_becomes_calls(case: dict[str, Any]) -> None:
    name = name_of(case)
    for pieces in two_way_splits(case["model_output"]):
        parser = NamedCall(case["tools"], name) if name else RequiredCalls(case["tools"])
        reply = streamed(parser, pieces)
        assert matches(reply, case["expected"]), pieces
        assert reply.content is None
        assert parser.has_only_complete_calls
    context = ReplyContext("", [], case["tools"], "named" if name else "required", name)
    parsers = open_parsers("xlam")
    assert matches(parsers.open(context).parse(case["model_output"]), case["expected"])


def test_definitions_of_two_tools_do_not_meet() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        made = function(name, x={"$ref": "#/$defs/X"}, again={"$ref": "#"})
        made["function"]["parameters"]["$defs"] = {"X": {"type": kind}}
        return made

    schema = forced_schema([tool("a", "integer"), tool("b", "string")])
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    good = [{"name": "a", "parameters": {"x": 1, "again": {"x": 2}}}, {"name": "b", "parameters": {"x": "y"}}]
    assert validator.is_valid(good)
    assert not validator.is_valid([{"name": "a", "parameters": {"x": "y"}}])
    assert not validator.is_valid([{"name": "b", "parameters": {"again": {"x": 1}}}])


def test_one_call_when_they_may_not_be_parallel() -> None:
    schema = forced_schema([function("a")], parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "deepseek_v3", "deepseek_v31", "mistral", "kimi_k2"])
def test_tags_are_a_constraint_the_compiler_takes(family: str, grammars: Any) -> None:
    tools = [function("f", a={"type": "integer"}), function("g")]
    parsers = open_parsers(family)
    assert parsers.tool_parser is not None
    tags = parsers.tool_parser.native_tags("f")
    assert tags is not None
    before, after = parsers.tool_parser.native_block
    text = f'{before}{tags[0]}{{"a":1}}{tags[1]}{after}'
    for choice, name in (("named", "f"), ("required", None)):
        context = ReplyContext("", [], tools, choice, name)
        constraint = parsers.forced_constraint(context)
        assert constraint is not None
        assert grammars(constraint, text)
        assert not grammars(constraint, text.replace("1", '"x"', 1) if family != "kimi_k2" else text[1:])
        assert not grammars(constraint, "no call")
        (call,) = parsers.open(context).parse(text).tool_calls
        assert (call.name, call.arguments) == ("f", '{"a":1}')
