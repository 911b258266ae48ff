"""Types of text arguments, Python literals and cut JSON, judged by the standard library."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkit.parsers.partial_json import completed
from vkit.parsers.python_values import decoded, literal_json
from vkit.parsers.schema import ToolSchemas, coerced

TOOL = {
    "type": "function",
    "function": {
        "name": "t",
        "parameters": {
            "type": "object",
            "properties": {
                "alias": {"type": "int64"},
                "several": {"type": ["integer", "null"]},
                "enum": {"enum": [1, "a", None]},
                "any": {"anyOf": [{"type": "string"}, {"allOf": [{"type": "dict"}]}]},
                "ref": {"$ref": "#/$defs/N"},
                "circle": {"$ref": "#/$defs/C"},
                "nothing": {},
                "odd": {"type": 7},
            },
            "required": ["alias"],
            "$defs": {"N": {"type": "number"}, "C": {"$ref": "#/$defs/C"}},
        },
    },
}


@pytest.mark.parametrize(
    ("parameter", "types"),
    [
        ("alias", {"integer"}),
        ("several", {"integer", "null"}),
        ("enum", {"integer", "string", "null"}),
        ("any", {"string", "object"}),
        ("ref", {"number"}),
        ("circle", {"string"}),
        ("nothing", {"string"}),
        ("odd", {"string"}),
        ("unknown", {"string"}),
    ],
)
def test_types_of_a_parameter(parameter: str, types: set[str]) -> None:
    schemas = ToolSchemas([TOOL])
    assert schemas.types("t", parameter) == types
    assert schemas.types("other", parameter) == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("007", {"string"}, "007"),
        ("null", {"string", "null"}, None),
        ("none", {"string", "null"}, "none"),
        (" 42 ", {"integer"}, 42),
        ("42.0", {"integer", "number"}, 42),
        ("4.5", {"number"}, 4.5),
        ("inf", {"number"}, "inf"),
        ("NaN", {"number"}, "NaN"),
        ("TRUE", {"boolean"}, True),
        ("0", {"boolean"}, False),
        ("1", {"boolean", "integer"}, 1),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("[1]", {"object"}, [1]),
        ("x", {"integer"}, "x"),
        ("1e999", {"object"}, "1e999"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("tag", {"made-up"}, "tag"),
    ],
)
def test_coercion(text: str, types: set[str], value: Any) -> None:
    assert json.loads(coerced(text, frozenset(types))) == value


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("'a'", {"string"}, "'a'"),
        ("'a'", {"array"}, "a"),
        ("[1, 'b', None, True]", {"array"}, [1, "b", None, True]),
        ("null", {"string", "null"}, None),
        ("(1, 2)", {"array"}, "(1, 2)"),
        ("f(x)", {"array"}, "f(x)"),
    ],
)
def test_decoding(text: str, types: set[str], value: Any) -> None:
    assert json.loads(decoded(text, frozenset(types))) == value


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(_VALUES)
def test_python_literals_are_read_back(value: Any) -> None:
    assert ast.literal_eval(repr(value)) == value
    assert json.loads(literal_json(repr(value))) == value


@pytest.mark.parametrize(
    "text", [r"'\x41\u00e9\U0001F30A\n\t\\\'\"'", r'"\d\a"', "'a\\\nb'", "1_000", "-2.5e3", ".5", "5."]
)
def test_python_escapes_and_numbers(text: str) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert json.loads(literal_json(text)) == ast.literal_eval(text)


@pytest.mark.parametrize(
    "text",
    ["", "(1,)", "{1}", "{1: 2}", "f()", "x", "1 + 2", "'a' 'b'", "[1, ,2]", "[,]", "'a", "1e999", r"'\xZZ'", "--1"],
)
def test_what_json_cannot_hold(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        literal_json(text)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_json_is_completed_wherever_it_is_cut(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for end in range(1, len(text) + 1):
        found = json.loads(completed(text[:end]))
        assert isinstance(found, dict)
        assert set(found) <= set(value)
    assert json.loads(completed(text)) == value
