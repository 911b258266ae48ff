"""Structural tags: free text with sections that follow a constraint, in both forms, control tokens included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.structured.kit import BOS_ID, allowed, bytes_tokenizer, follows
from vkit.errors import InvalidRequest
from vkit.structured.compiler import GrammarCompiler
from vkit.types import StructuredOutputs

TOKENIZER = bytes_tokenizer()
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": POINT}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def structural(node: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": node})


def accepts(compiler: GrammarCompiler, constraint: StructuredOutputs, text: str) -> bool:
    return follows(compiler.compile(constraint).result(), TOKENIZER, list(text.encode()))


def triggered(**values: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", SCHEMA, "</f>"), tag("<f=b>", NUMBER, "</f>"), tag("[n]", NUMBER, "")]
    return {"type": "triggered_tags", "triggers": ["<f=", "[n]"], "tags": tags, **values}


@pytest.mark.parametrize(
    ("node", "valid", "invalid"),
    [
        ({"type": "const_string", "value": 'a"\\é\n'}, ['a"\\é\n'], ["a", ""]),
        (SCHEMA, ['{"x": 1}'], ['{"x":  1}', "{}"]),
        ({"type": "any_text"}, ["", "anything\nat all 日本"], []),
        (NUMBER, ["12"], ["", "a"]),
        ({"type": "regex", "pattern": "a/b"}, ["a/b"], ["a"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root? ")"'}, ["(())"], ["(()"]),
        ({"type": "grammar", "grammar": 'start: "x" NUM\nNUM: /[0-9]+/'}, ["x1"], ["x"]),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, NUMBER]}, ["n=1"], ["n=", "1"]),
        ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]}, ["1", "none"], ["non"]),
        (tag("<a>", SCHEMA, "</a>"), ['<a>{"x":1}</a>'], ['{"x":1}', '<a>{"x":1}']),
        (tag("", SCHEMA, ""), ['{"x":1}'], ["{}"]),
        (tag("<t>", {"type": "any_text"}, "</t>"), ["<t></t>", "<t>a < b</t>"], ["<t>a", "<t>a</t>b"]),
        (
            {"type": "sequence", "elements": [tag("<t>", {"type": "any_text"}, "</t>"), NUMBER]},
            ["<t>x</t>1"],
            ["<t>x</t>", "<t></t>x</t>1"],
        ),
        (
            triggered(),
            ["", "free [ <f", '<f=a>{"x":1}</f> and [n]12 too', "<f=b>1</f><f=b>2</f>"],
            ["<f=c>", "[n]", "[n]x"],
        ),
        (triggered(at_least_one=True), ["hm <f=b>1</f>.", "[n]1"], ["", "free"]),
        (triggered(stop_after_first=True), ["", "free", "x<f=b>1</f>"], ["<f=b>1</f>x"]),
        (triggered(at_least_one=True, stop_after_first=True), ["x[n]1"], ["", "x", "[n]1x"]),
        (
            {"type": "tags_with_separator", "tags": [tag("<", NUMBER, ">"), tag("(", SCHEMA, ")")], "separator": ", "},
            ["", "<1>", '<1>, ({"x":2}), <3>'],
            ["<1>,", "<1><2>", "x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<", NUMBER, ">")], "separator": "", "at_least_one": True},
            ["<1>", "<1><2>"],
            [""],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<", NUMBER, ">")], "separator": "", "stop_after_first": True},
            ["", "<1>"],
            ["<1><2>"],
        ),
    ],
)
def test_nodes(compiler: GrammarCompiler, node: Any, valid: list[str], invalid: list[str]) -> None:
    constraint = structural(node)
    for text in valid:
        assert accepts(compiler, constraint, text), text
    for text in invalid:
        assert not accepts(compiler, constraint, text), text


def test_the_older_form(compiler: GrammarCompiler) -> None:
    structures = [{"begin": "<f=a>", "schema": POINT, "end": "</f>"}, {"begin": "<f=b>", "end": "</f>"}]
    for given in (
        {"type": "structural_tag", "structures": structures, "triggers": ["<f="]},
        '{"type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],'
        ' "triggers": ["<f"]}',
    ):
        constraint = StructuredOutputs(structural_tag=given)
        assert accepts(compiler, constraint, "say nothing")
        assert not accepts(compiler, constraint, "<f=a>nothing</f>")
    assert accepts(compiler, StructuredOutputs(structural_tag=given), "so <f=a>12</f> it is")


def test_modifiers_reach_the_schemas(compiler: GrammarCompiler) -> None:
    loose = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {}}}}
    node = {"type": "structural_tag", "format": tag("<", loose, ">")}
    constraint = StructuredOutputs(structural_tag=node, disable_any_whitespace=True, disable_additional_properties=True)
    assert accepts(compiler, constraint, '<{"x":1}>')
    assert not accepts(compiler, constraint, '<{"x": 1}>')
    assert not accepts(compiler, constraint, '<{"z":1}>')


def test_control_tokens_stand_for_their_text() -> None:
    tokenizer = bytes_tokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)  # token 256 is the control token "<bos>"
    lone = structural(tag("<bos>!", NUMBER, "<bos>"))
    assert follows(compiler.compile(lone).result(), tokenizer, [BOS_ID, ord("!"), ord("1"), BOS_ID])
    assert not follows(compiler.compile(lone).result(), tokenizer, list(b"<bos>!1<bos>"))
    assert not follows(compiler.compile(lone).result(), tokenizer, [BOS_ID, *b"!1<bos>"])
    node = {"type": "triggered_tags", "triggers": ["<bos>"], "tags": [tag("<bos>n", NUMBER, ";")]}
    for head in ([BOS_ID], list(b"<bos>"), [*b"text", BOS_ID]):
        grammar = compiler.compile(structural(node)).result()
        assert grammar.accept_tokens(head)
        assert allowed(grammar, tokenizer.vocab_size) == {ord("n")}
        assert follows(grammar, tokenizer, list(b"n12;"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "x"}, "structural_tag: type: expected 'structural_tag'"),
        ("{", "structural_tag: not JSON"),
        ("[]", "structural_tag: expected an object"),
        ({"type": "structural_tag", "format": {"type": "poem"}}, "format: expected an object whose type is one of"),
        ({"type": "structural_tag", "format": [1]}, "format: expected an object whose type is one of"),
        ({"type": "structural_tag", "format": {"type": "regex"}}, "format: regex needs pattern"),
        ({"type": "structural_tag", "format": {"type": "any_text", "max": 3}}, "format: unknown field 'max'"),
        ({"type": "structural_tag", "format": NUMBER, "triggers": []}, "unknown field 'triggers'"),
        ({"type": "structural_tag", "format": tag("a", {"type": "regex", "pattern": "(["}, "b")}, "regex"),
        (
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}},
            "structural_tag: format.json_schema: the keyword 'not' cannot be enforced",
        ),
        (
            {"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= ("}},
            "grammar: line 1, column 10",
        ),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}},
            "any_text must be followed by fixed text",
        ),
        (
            {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "any_text"}, NUMBER]}},
            "any_text must be followed by fixed text",
        ),
        ({"type": "structural_tag", "format": triggered(triggers=["<f="])}, "format.tags.2: begins with none of"),
        ({"type": "structural_tag", "format": triggered(triggers=["<f=", "[n]", "{"])}, "no tag begins with '{'"),
        ({"type": "structural_tag", "format": triggered(triggers=[""])}, "a trigger must not be empty"),
        ({"type": "structural_tag", "format": triggered(at_least_one=1)}, "at_least_one: expected true or false"),
        ({"type": "structural_tag", "structures": [], "triggers": ["<"]}, "structures: expected a non-empty list"),
        ({"type": "structural_tag", "structures": [{"begin": "<"}], "triggers": ["<"]}, "structures.0: expected an"),
    ],
)
def test_refusals_name_the_place(compiler: GrammarCompiler, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(StructuredOutputs(structural_tag=given))
    assert message in str(caught.value)
    assert caught.value.param == "structured_outputs"
