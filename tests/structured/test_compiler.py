"""Compilation: away from the caller, once per constraint, never kept when it failed; a missing library is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.structured.kit import allowed, bytes_tokenizer
from vkit import check_constraint
from vkit.errors import InvalidRequest, MissingExtra
from vkit.structured import compiler as module
from vkit.structured.compiler import GrammarCompiler, cache_key
from vkit.types import ReasoningMarks, StructuredOutputs


@pytest.fixture
def fresh() -> Iterator[GrammarCompiler]:
    tokenizer = bytes_tokenizer()
    made = GrammarCompiler(tokenizer, tokenizer.eos_token_ids, cache_size=2)
    yield made
    made.close()


def test_every_sequence_has_a_grammar_of_its_own(fresh: GrammarCompiler) -> None:
    constraint = StructuredOutputs(regex="ab")
    one, two = (fresh.compile(constraint).result() for _ in range(2))
    assert one.accept_tokens(b"a")
    assert allowed(one, 258) == {98}
    assert allowed(two, 258) == {97}
    assert fresh.num_compiled == 1


def test_what_makes_constraints_the_same(fresh: GrammarCompiler) -> None:
    marks = ReasoningMarks("</think>")
    assert cache_key(StructuredOutputs(regex="a")) == cache_key(StructuredOutputs(regex="a", begins_after=marks))
    different = [
        StructuredOutputs(regex="a"),
        StructuredOutputs(grammar="a"),
        StructuredOutputs(json={"a": 1, "b": 2}),
        StructuredOutputs(json={"b": 2, "a": 1}),
        StructuredOutputs(json=True),
        StructuredOutputs(json="true"),
        StructuredOutputs(json_object=True),
        StructuredOutputs(json_object=True, disable_any_whitespace=True),
        StructuredOutputs(json_object=True, whitespace_pattern=" "),
        StructuredOutputs(json=True, disable_additional_properties=True),
    ]
    assert len({cache_key(constraint) for constraint in different}) == len(different)


def test_the_cache_keeps_the_latest(fresh: GrammarCompiler) -> None:
    for pattern in ("a", "b", "a", "c", "a", "b"):
        fresh.check(StructuredOutputs(regex=pattern))
    assert fresh.num_compiled == 4


def test_failures_are_told_every_time_and_not_kept(fresh: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed"):
            fresh.check(StructuredOutputs(regex="["))
        future = fresh.compile(StructuredOutputs(regex="["))
        assert isinstance(future.exception(timeout=30), InvalidRequest)
    assert not fresh._cache
    fresh.check(StructuredOutputs(regex="a"))


def test_the_caller_is_not_kept_waiting(fresh: GrammarCompiler, monkeypatch: Any) -> None:
    gate = threading.Event()
    source = module.grammar_source

    def slow(constraint: StructuredOutputs, special_texts: Any) -> Any:
        assert threading.current_thread().name.startswith("vkit-grammar")
        assert gate.wait(30)
        return source(constraint, special_texts)

    monkeypatch.setattr(module, "grammar_source", slow)
    futures = [fresh.compile(StructuredOutputs(regex="a")) for _ in range(3)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert len({id(future.result(30)) for future in futures}) == 3
    assert fresh.num_compiled == 1


def test_a_missing_library_is_named(fresh: GrammarCompiler, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"'structured'.*pip install 'vkit\[structured\]'"):
        fresh.check(StructuredOutputs(regex="a"))
    with pytest.raises(MissingExtra, match="structured"):
        check_constraint(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("bad", [{"regex": "["}, {"json": {"not": {}}}, {"grammar": "root ::= ("}, {"json": False}])
def test_constraints_are_checked_before_there_is_a_model(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        check_constraint(StructuredOutputs(**bad))
    check_constraint(StructuredOutputs(grammar="start: <|tool|> /a/"))


def test_what_nothing_can_satisfy_is_refused(fresh: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="regex"):
        fresh.check(StructuredOutputs(regex="[^\\s\\S]"))


def test_what_is_too_large_to_follow_is_refused_before_the_first_token(fresh: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="regex: it is too large to follow"):
        fresh.check(StructuredOutputs(regex="(a{1000}){1000}"))


@pytest.mark.parametrize("constraint", [{"json": {"$ref": "#"}}, {"grammar": "root ::= root root"}])
def test_what_only_refers_to_itself_is_refused_in_words(fresh: GrammarCompiler, constraint: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="it refers to itself without an end"):
        fresh.check(StructuredOutputs(**constraint))
