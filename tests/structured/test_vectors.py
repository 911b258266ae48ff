"""Every vector of structured output, as bytes and as tokens of several vocabularies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.structured.kit import allowed, constraint_of, follows, may_end, vectors
from vkit.structured.compiler import GrammarCompiler
from vkit.text.tokenizer import Tokenizer

Kit = tuple[Tokenizer, GrammarCompiler]
FILES = ("json_schema", "json_object", "regex", "choice", "gbnf", "lark")
CASES = [
    pytest.param(case, id=f"{name}-{case['name']}") for name in FILES for case in vectors(f"structured/{name}.json")
]


@pytest.mark.parametrize("case", CASES)
def test_text_is_accepted_or_rejected(kit: Kit, case: dict[str, Any]) -> None:
    tokenizer, compiler = kit
    constraint = constraint_of(case)
    for text in case["accept"]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert follows(compiler.compile(constraint).result(), tokenizer, token_ids), text
    for text in case["reject"]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert not follows(compiler.compile(constraint).result(), tokenizer, token_ids), text


@pytest.mark.parametrize("case", CASES)
def test_masks_say_what_is_accepted(
    compilers: dict[str, GrammarCompiler], tokenizers: dict[str, Tokenizer], case: dict[str, Any]
) -> None:
    tokenizer, compiler = tokenizers["bytes"], compilers["bytes"]
    for text in case["accept"] + case["reject"]:
        grammar = compiler.compile(constraint_of(case)).result()
        is_alive = True
        for byte in text.encode():
            by_mask = byte in allowed(grammar, tokenizer.vocab_size)
            is_alive = grammar.accept_tokens([byte])
            assert is_alive == by_mask, (text, byte)
            if not is_alive:
                break
        assert (is_alive and may_end(grammar, tokenizer)) == (text in case["accept"]), text
