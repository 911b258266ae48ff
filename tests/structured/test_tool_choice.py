"""Every vector of forced tool calls: what the constraint accepts, and how its output becomes calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.structured.kit import follows, vectors
from vkit.parsers.forced import forced_schema
from vkit.structured.compiler import GrammarCompiler
from vkit.text.tokenizer import Tokenizer
from vkit.types import StructuredOutputs

Kit = tuple[Tokenizer, GrammarCompiler]
CASES = [pytest.param(case, id=case["name"]) for case in vectors("tool_choice/cases.json")]


def named(case: dict[str, Any]) -> str | None:
    choice = case["tool_choice"]
    return choice["function"]["name"] if isinstance(choice, dict) else None


@pytest.mark.parametrize("case", CASES)
def test_the_constraint_of_a_forced_call(kit: Kit, case: dict[str, Any]) -> None:
    tokenizer, compiler = kit
    constraint = StructuredOutputs(json=forced_schema(case["tools"], named(case)))
    for text in [*case["accept"], case["model_output"]]:
        assert follows(compiler.compile(constraint).result(), tokenizer, tokenizer.encode(text)), text
    for text in case["reject"]:
        assert not follows(compiler.compile(constraint).result(), tokenizer, tokenizer.encode(text)), text


def test_one_call_at_most_where_calls_are_not_parallel(kit: Kit) -> None:
    tokenizer, compiler = kit
    case = next(case for case in vectors("tool_choice/cases.json") if case["name"] == "required_two_tools_two_calls")
    constraint = StructuredOutputs(json=forced_schema(case["tools"], parallel=False))
    two = case["accept"][1]
    one = json.dumps(json.loads(two)[:1])
    assert follows(compiler.compile(constraint).result(), tokenizer, tokenizer.encode(one))
    assert not follows(compiler.compile(constraint).result(), tokenizer, tokenizer.encode(two))
