"""From a constraint to the text of a grammar in the library's own notation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkit.errors import InvalidRequest
from vkit.structured.gbnf import gbnf_to_lark, is_gbnf
from vkit.structured.messages import cause_of, clip, in_one_line, refused
from vkit.structured.schema import PreparedSchema, prepared_schema
from vkit.structured.tags import structural_tag_grammar
from vkit.types import StructuredOutputs

DEFAULT_WHITESPACE = r"[ \t]"
"""At most one blank between tokens of JSON, never a line break: a model cannot lose itself in whitespace."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar for the library. `is_json`: its strings may write / as \\/, as JSON allows."""

    text: str
    is_json: bool = False


def grammar_source(constraint: StructuredOutputs, special_texts: Mapping[str, int]) -> GrammarSource:
    """The grammar of a constraint. Faults the library has to find are found when it compiles.

    Raises:
        InvalidRequest: what cannot be enforced; the message names it.
    """
    match constraint.kind:
        case "json":
            assert constraint.json is not None
            return _json_source(prepared_schema(constraint.json, closes_objects=_closes(constraint)), constraint)
        case "json_object":
            return _json_source(PreparedSchema({"type": "object"}), constraint)
        case "regex":
            return GrammarSource(_lark_grammar(f"start: /{_lark_regex(constraint.regex or '')}/\n"))
        case "choice":
            assert constraint.choice is not None
            return GrammarSource(_lark_grammar(_choice_grammar(list(constraint.choice))))
        case "grammar":
            text = constraint.grammar or ""
            return GrammarSource(_lark_grammar(gbnf_to_lark(text) if is_gbnf(text) else text))
        case _:
            return GrammarSource(_tag_source(constraint, special_texts))


def explained(constraint: StructuredOutputs, message: str) -> InvalidRequest:
    """The refusal of a constraint that the library could not compile."""
    kind = constraint.kind
    if constraint.whitespace_pattern is not None:
        fault = _fault_of_pattern(constraint.whitespace_pattern)
        if fault is not None:
            return refused("whitespace_pattern", f"{clip(constraint.whitespace_pattern)!r}: {fault}")
    if kind == "regex":
        assert constraint.regex is not None
        return refused(
            kind, f"{clip(constraint.regex)!r}: {_fault_of_pattern(constraint.regex) or in_one_line(message)}"
        )
    if kind == "json":
        assert constraint.json is not None
        for place, pattern in prepared_schema(constraint.json).patterns:
            fault = _fault_of_pattern(pattern)
            if fault is not None:
                return refused(kind, f"pattern {clip(pattern)!r} at {place or '/'}: {fault}")
    return refused(kind, in_one_line(message))


def _closes(constraint: StructuredOutputs) -> bool:
    return constraint.disable_additional_properties


def _json_options(constraint: StructuredOutputs) -> dict[str, Any]:
    options: dict[str, Any] = {
        "coerce_one_of": True,
        "lenient": False,
        "json_allow_general_unicode_escapes": True,
    }
    if constraint.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = constraint.whitespace_pattern or DEFAULT_WHITESPACE
        if constraint.whitespace_pattern == "":
            options = {**options, "whitespace_flexible": False}
            del options["whitespace_pattern"]
    return options


def _json_source(prepared: PreparedSchema, constraint: StructuredOutputs) -> GrammarSource:
    schema = {**prepared.schema, "x-guidance": _json_options(constraint)}
    return GrammarSource(json.dumps({"grammars": [{"json_schema": schema}]}), is_json=True)


def _tag_source(constraint: StructuredOutputs, special_texts: Mapping[str, int]) -> str:
    assert constraint.structural_tag is not None

    def write_schema(schema: Any, what: str) -> str:
        prepared = prepared_schema(schema, closes_objects=_closes(constraint), what=what)
        return json.dumps({**prepared.schema, "x-guidance": _json_options(constraint)})

    return json.dumps({"grammars": structural_tag_grammar(constraint.structural_tag, write_schema, special_texts)})


def _lark_grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _choice_grammar(options: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options) + "\n"


def _lark_regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, "")


def _fault_of_pattern(pattern: str) -> str | None:
    """What the library has against a pattern taken by itself."""
    from llguidance import LLMatcher

    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    return cause_of(message) if message else None
