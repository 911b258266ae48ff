"""What a schema may hold: keywords enforced, brought to another form, passed over, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.structured.kit import bytes_tokenizer, follows
from vkit.errors import InvalidRequest
from vkit.structured.compiler import GrammarCompiler
from vkit.structured.schema import prepared_schema
from vkit.types import StructuredOutputs

TOKENIZER = bytes_tokenizer()


def accepts(compiler: GrammarCompiler, constraint: StructuredOutputs, text: str) -> bool:
    return follows(compiler.compile(constraint).result(), TOKENIZER, list(text.encode()))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "the keyword 'uniqueItems' cannot be enforced"),
        ({"not": {"type": "string"}}, "the keyword 'not' cannot be enforced"),
        ({"properties": {"a": {"not": {}}}}, "the keyword 'not' cannot be enforced at /properties/a"),
        ({"if": {}, "then": {}}, "the keyword 'if' cannot be enforced"),
        ({"dependentRequired": {"a": ["b"]}}, "the keyword 'dependentRequired' cannot be enforced"),
        ({"items": {"contains": {}}}, "the keyword 'contains' cannot be enforced at /items"),
        ({"propertyNames": {"pattern": "a"}}, "the keyword 'propertyNames' cannot be enforced"),
        ({"unevaluatedProperties": False}, "the keyword 'unevaluatedProperties' cannot be enforced"),
        ({"$defs": {"A": {"uniqueItems": True}}, "$ref": "#/$defs/A"}, "'uniqueItems' cannot be enforced at /$defs/A"),
        ({"requird": ["a"]}, "the keyword 'requird' cannot be enforced"),
        ({"type": "text"}, 'unknown type "text"'),
        ({"format": "credit-card"}, 'the format "credit-card" cannot be enforced'),
        ({"$ref": "https://example.org/schema"}, "only references inside the schema are followed"),
        ({"$ref": "#/$defs/Nobody"}, "refers to nothing"),
        ({"properties": {"a": 3}}, "a schema is an object or a boolean, got 3 at /properties/a"),
        ({"properties": ["a"]}, "expected an object of schemas"),
        ({"anyOf": {}}, "expected a list of schemas"),
        ({"type": "string", "pattern": "(["}, "pattern '([' at /: unclosed character class"),
        ({"patternProperties": {"(?=a)": {}}}, "pattern '(?=a)' at /patternProperties: look-around"),
        ({"type": "string", "pattern": r"\bx"}, r"pattern '\\bx' at /: lookarounds not supported"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        ({"required": ["a"], "additionalProperties": False, "type": "object"}, "required property 'a'"),
        ({"const": float("nan")}, "is no JSON number"),
        ({"const": "\ud800"}, "lone surrogate"),
        (nested(65), "nested deeper than 64 levels"),
        (False, "no output is valid"),
        ("{", "not JSON"),
        ("[1]", "a schema is an object or a boolean"),
        ('{"minimum": NaN}', "not JSON"),
    ],
)
def test_what_cannot_be_enforced_is_named(compiler: GrammarCompiler, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(StructuredOutputs(json=schema))
    assert message in str(caught.value)
    assert str(caught.value).startswith("structured_outputs: json: ")
    assert caught.value.param == "structured_outputs"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "T", "description": "d", "default": 1, "examples": [1], "$comment": "c", "type": "integer"},
        {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
        {"type": "integer", "format": "int32", "x-anything": {"not": {}}},
        {"$defs": {"Unused": {"uniqueItems": True}}, "type": "integer"},
        {"x-guidance": {"lenient": True}, "type": "integer"},
    ],
)
def test_annotations_change_nothing(compiler: GrammarCompiler, schema: Any) -> None:
    text = "[1]" if schema["type"] == "array" else "1"
    assert accepts(compiler, StructuredOutputs(json=schema), text)
    assert not accepts(compiler, StructuredOutputs(json=schema), "true")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
        ({"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}}, ['{"a":null}'], ['{"a":"x"}']),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, ["3"], ["2"]),
        ({"type": "integer", "multipleOf": 5}, ["10", "0"], ["7"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": False}, ['["a"]'], ['["a",1]']),
        (True, ["null", '{"a":[1]}'], ["nul"]),
        ('{"type": "boolean"}', ["true"], ["1"]),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3"']),
        ({"type": "string", "format": "hostname"}, ['"a.example"'], ['"-a"']),
        ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"', "1"], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "date"}, ['"9999-01-31"'], ['"0000-01-01"', '"2024-04-31"', '"2024-02-30"']),
        (
            {"type": "string", "format": "date-time", "allOf": [{"minLength": 21}]},
            ['"2024-02-29T10:00:00+01:00"'],
            ['"2023-02-29T10:00:00+01:00"', '"2024-02-29T10:00:00Z"'],
        ),
        ({"const": "a/b"}, ['"a/b"'], ['"a\\\\/b"']),
        ({"type": "string", "maxLength": 2}, ['"\\/\\/"', '"\\\\/"'], ['"\\/\\/\\/"', '"\\"']),
    ],
)
def test_keywords_mean_what_they_say(
    compiler: GrammarCompiler, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    for text in valid:
        assert accepts(compiler, StructuredOutputs(json=schema), text), text
    for text in invalid:
        assert not accepts(compiler, StructuredOutputs(json=schema), text), text
    if (
        isinstance(schema, dict)
        and "nullable" not in json.dumps(schema)
        and not isinstance(schema.get("exclusiveMinimum"), bool)
    ):
        for text in valid:
            jsonschema.Draft202012Validator({**schema, "items": {}} if "items" in schema else schema).validate(
                json.loads(text)
            )


def test_the_schema_given_is_left_alone() -> None:
    schema = {"title": "T", "properties": {"a": {"nullable": True, "type": "string"}}}
    copy = json.loads(json.dumps(schema))
    prepared_schema(schema)
    assert schema == copy


def test_references_that_go_round_are_followed_once() -> None:
    schema = {"$defs": {"N": {"properties": {"next": {"$ref": "#/$defs/N"}}, "title": "x"}}, "$ref": "#/$defs/N"}
    assert "title" not in prepared_schema(schema).schema["$defs"]["N"]


class TestWhitespace:
    SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}  # noqa: RUF012

    def test_one_blank_at_most_and_never_a_line_break(self, compiler: GrammarCompiler) -> None:
        constraint = StructuredOutputs(json=self.SCHEMA)
        for text in ('{"a":1}', '{ "a" : 1 }', '{\t"a":\t1}'):
            assert accepts(compiler, constraint, text), text
        for text in ('{  "a":1}', '{\n"a":1}', '{"a": \t1}', ' {"a":1}', '{"a":1} '):
            assert not accepts(compiler, constraint, text), text

    def test_none_at_all(self, compiler: GrammarCompiler) -> None:
        constraint = StructuredOutputs(json=self.SCHEMA, disable_any_whitespace=True)
        assert accepts(compiler, constraint, '{"a":1}')
        assert not accepts(compiler, constraint, '{"a": 1}')

    def test_of_ones_own(self, compiler: GrammarCompiler) -> None:
        constraint = StructuredOutputs(json_object=True, whitespace_pattern=r"\n")
        assert accepts(compiler, constraint, '{\n"a":1}')
        assert not accepts(compiler, constraint, '{ "a":1}')
        assert accepts(compiler, StructuredOutputs(json_object=True, whitespace_pattern=""), '{"a":1}')
        with pytest.raises(InvalidRequest, match=r"whitespace_pattern: '\[': unclosed character class"):
            compiler.check(StructuredOutputs(json_object=True, whitespace_pattern="["))


def test_additional_properties_can_be_closed(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    opened, closed = (StructuredOutputs(json=schema, disable_additional_properties=on) for on in (False, True))
    for text in ('{"z":1}', '{"a":{"z":1}}'):
        assert accepts(compiler, opened, text)
        assert not accepts(compiler, closed, text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"json_object": False}, "json_object must be true"),
        ({"choice": []}, "choice: expected a non-empty list"),
        ({"choice": "ab"}, "choice: expected a non-empty list"),
        ({"choice": ["a", 1]}, "choice: expected a non-empty list"),
        ({"regex": 3}, "regex: expected a string, got int"),
        ({"regex": "a\0"}, "regex: must not contain NUL"),
        ({"grammar": "  "}, "grammar: must not be empty"),
        ({"json": [1]}, "json: expected a JSON schema"),
        ({"structural_tag": True}, "structural_tag: expected an object"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern: has no effect on regex"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace: has no effect on choice"),
        ({"json_object": True, "disable_additional_properties": True}, "has no effect on json_object"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradicts"),
        ({"json": {}, "disable_any_whitespace": 1}, "expected true or false"),
    ],
)
def test_constraints_are_checked_when_made(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        StructuredOutputs(**values)
    assert caught.value.param == "structured_outputs"
