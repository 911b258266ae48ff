"""Following a grammar: masks, acceptance, rollback, forced tokens, ends; drafts; reasoning that comes first."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.structured.kit import EOS_ID, allowed, bytes_tokenizer, follows, may_end
from vkit.errors import InvalidRequest
from vkit.sequence import Grammar
from vkit.structured.compiler import GrammarCompiler
from vkit.structured.grammar import JsonGrammar, TokenGrammar
from vkit.structured.masks import fill_rows
from vkit.structured.vocabulary import GrammarVocabulary, shown_to_library
from vkit.text.tokenizer import Tokenizer
from vkit.types import ReasoningMarks, StructuredOutputs

Kit = tuple[Tokenizer, GrammarCompiler]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"items": {"enum": ["ab", "abc"]}}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Any] = {
    "json": {"json": PERSON},
    "compact": {"json": PERSON, "disable_any_whitespace": True},
    "object": {"json_object": True},
    "regex": {"regex": "(日本|ab+c?|é){1,3}x?"},
    "choice": {"choice": ["a", "ab", "日本語", "日本"]},
    "gbnf": {"grammar": 'root ::= "(" root? ")" | [a-cé]+'},
    "lark": {"grammar": 'start: item ("," item)*\nitem: /[a-z]+/ ":" /[0-9]+/'},
}


def start(compiler: GrammarCompiler, **constraint: Any) -> Grammar:
    return compiler.compile(StructuredOutputs(**constraint)).result()


def random_walk(grammar: Grammar, tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Allowed tokens, short ones first, until the end or `length`."""
    walked: list[int] = []
    for _ in range(length):
        ids = sorted(allowed(grammar, tokenizer.vocab_size) - tokenizer.eos_token_ids)
        if not ids:
            break
        token_id = rng.choice(ids)
        assert grammar.accept_tokens([token_id]), token_id
        walked.append(token_id)
    return walked


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_mask_holds_only_what_is_accepted(kit: Kit, name: str) -> None:
    tokenizer, compiler = kit
    rng = random.Random(name)
    for _ in range(4):
        grammar = start(compiler, **CONSTRAINTS[name])
        for _ in range(12):
            ids = sorted(allowed(grammar, tokenizer.vocab_size))
            for token_id in ids if len(ids) < 40 else rng.sample(ids, 40):
                assert grammar.validate_tokens([token_id]) == [token_id], tokenizer.token_bytes(token_id)
            forced = grammar.forced_token()
            assert forced is None or ids == [forced], "a forced token is the only one the mask holds"
            if not random_walk(grammar, tokenizer, rng, 1):
                break


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_rollback_restores_every_state(kit: Kit, name: str) -> None:
    tokenizer, compiler = kit
    rng = random.Random(name)
    grammar = start(compiler, **CONSTRAINTS[name])
    masks = [allowed(grammar, tokenizer.vocab_size)]
    walked: list[int] = []
    for _ in range(60):
        if walked and rng.random() < 0.4:
            count = rng.randint(1, len(walked))
            grammar.rollback(count)
            del walked[-count:], masks[-count:]
        else:
            step = random_walk(grammar, tokenizer, rng, 1)
            walked += step
            masks += [allowed(grammar, tokenizer.vocab_size)] * len(step)
        assert allowed(grammar, tokenizer.vocab_size) == masks[-1]
    grammar.reset()
    assert allowed(grammar, tokenizer.vocab_size) == masks[0]
    with pytest.raises(ValueError, match="rollback: 1 tokens"):
        grammar.rollback(1)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_jumping_takes_the_way_the_masks_leave(kit: Kit, name: str) -> None:
    tokenizer, compiler = kit
    for seed in range(5):
        plain, jumping = start(compiler, **CONSTRAINTS[name]), start(compiler, **CONSTRAINTS[name])
        written: list[list[int]] = [[], []]
        for index, grammar in enumerate((plain, jumping)):
            rng = random.Random(seed)
            while len(written[index]) < 25:
                ids = sorted(allowed(grammar, tokenizer.vocab_size) - tokenizer.eos_token_ids)
                forced = grammar.forced_token() if index else None
                if not ids:
                    break
                # One draw per choice that is one, so that both walks see the same chances.
                token_id = forced if forced is not None else ids[0] if len(ids) == 1 else rng.choice(ids)
                assert grammar.accept_tokens([token_id])
                written[index].append(token_id)
        assert written[0] == written[1]


def test_the_end(compiler: GrammarCompiler) -> None:
    tokenizer = bytes_tokenizer()
    grammar = start(compiler, choice=["a", "ab"])
    assert not grammar.accept_tokens([EOS_ID])
    assert grammar.accept_tokens([97])
    assert may_end(grammar, tokenizer)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([EOS_ID])
    assert grammar.is_terminated()
    assert allowed(grammar, 258) == {EOS_ID}
    assert not grammar.accept_tokens([98])
    grammar.rollback(1)
    assert grammar.accept_tokens([98])
    assert grammar.is_terminated()
    assert allowed(grammar, 258) == {EOS_ID}
    assert grammar.forced_token() is None
    grammar.rollback(2)
    assert grammar.validate_tokens([97, 98, EOS_ID, 97]) == [97, 98, EOS_ID]
    assert not grammar.is_terminated(), "validation changes nothing"


def test_refused_tokens_leave_the_grammar_where_it_was(kit: Kit) -> None:
    tokenizer, compiler = kit
    for name in CONSTRAINTS:
        grammar = start(compiler, **CONSTRAINTS[name])
        before = allowed(grammar, tokenizer.vocab_size)
        bad = next(i for i in range(tokenizer.vocab_size) if not grammar.validate_tokens([i]))
        for token_id in (bad, -1, tokenizer.vocab_size, 10**9):
            assert not grammar.accept_tokens([token_id])
        assert allowed(grammar, tokenizer.vocab_size) == before


@pytest.mark.parametrize("width", [8, 9, 20])
def test_rows_of_any_width(compiler: GrammarCompiler, width: int) -> None:
    grammar = start(compiler, regex="[ab]*")
    row = np.full(width, -1, dtype=np.int32)
    grammar.fill_bitmask(row)
    found = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    assert found == {97, 98} | ({EOS_ID} if width > 8 else set())


def test_a_vocabulary_without_an_end_allows_none() -> None:
    tokenizer = bytes_tokenizer()
    compiler = GrammarCompiler(tokenizer, ())
    grammar = start(compiler, choice=["a", "ab"])
    grammar.accept_tokens([97])
    assert allowed(grammar, tokenizer.vocab_size) == {98}
    grammar.accept_tokens([98])
    assert grammar.is_terminated()
    assert allowed(grammar, tokenizer.vocab_size) == set()


def test_every_end_token_ends(compiler: GrammarCompiler) -> None:
    grammar = start(GrammarCompiler(bytes_tokenizer(), (EOS_ID, 256)), regex="a*")
    assert {EOS_ID, 256} <= allowed(grammar, 258)
    assert grammar.accept_tokens([256])
    assert grammar.is_terminated()


class TestEscapedSlashes:
    @pytest.mark.parametrize(
        ("data", "shown", "is_cut"),
        [
            (b"ab", b"ab", False),
            (rb"a\/b", b"a/b", False),
            (rb"a\\/b", rb"a\\/b", False),
            (rb"\\\/", rb"\\/", False),
            (b"a\\", b"a", True),
            (b"a\\\\", b"a\\\\", False),
            (rb"\n\/", rb"\n/", False),
        ],
    )
    def test_what_the_library_sees(self, data: bytes, shown: bytes, is_cut: bool) -> None:
        assert shown_to_library(data) == (shown, is_cut)

    @pytest.mark.parametrize("text", [r"\/", r"a\/b\/\/", r"\\/", r"\\\/", r"\"\/", "/\\u0041\\/"])
    def test_they_are_json(self, kit: Kit, text: str) -> None:
        tokenizer, compiler = kit
        document = f'{{"a":"{text}"}}'
        json.loads(document)
        grammar = start(compiler, json_object=True)
        assert isinstance(grammar, JsonGrammar)
        assert follows(grammar, tokenizer, tokenizer.encode(document, add_special_tokens=False))

    def test_masks_after_a_backslash(self, compiler: GrammarCompiler) -> None:
        grammar = start(compiler, json_object=True)
        assert grammar.accept_tokens(list(b'{"a":"x\\'))
        assert allowed(grammar, 258) == set(b'"\\/bfnrtu')
        assert not may_end(grammar, bytes_tokenizer())
        assert grammar.forced_token() is None
        assert not grammar.accept_tokens(b"q")
        assert grammar.accept_tokens(b"/")
        grammar.rollback(2)
        assert grammar.accept_tokens(list(b'"}'))
        assert grammar.is_terminated()

    def test_a_vocabulary_without_a_backslash_goes_without(self) -> None:
        class NoBackslash:
            vocab_size = 256
            special_ids = frozenset[int]()

            def token_bytes(self, token_id: int) -> bytes:
                return b"" if token_id == ord("\\") else bytes([token_id])

            def encode(self, text: str, **_: Any) -> list[int]:
                return list(text.encode())

        grammar = start(GrammarCompiler(NoBackslash(), ()), json_object=True)
        assert type(grammar) is TokenGrammar
        assert grammar.accept_tokens(list(b'{"a":1}'))


class TestDrafts:
    def test_each_row_says_what_may_follow_its_draft(self, compiler: GrammarCompiler) -> None:
        grammar = start(compiler, regex="ab[cd]e")
        words = np.zeros((4, 9), dtype=np.int32)
        fill_rows(grammar, list(b"abc"), words)
        assert [_ids(row) for row in words] == [{97}, {98}, {99, 100}, {101}]
        assert allowed(grammar, 258) == {97}, "the grammar stays where it was"

    def test_rows_after_a_refused_draft_allow_everything(self, compiler: GrammarCompiler) -> None:
        grammar = start(compiler, regex="ab[cd]e")
        words = np.zeros((4, 9), dtype=np.int32)
        fill_rows(grammar, list(b"axc"), words)
        assert [_ids(row) for row in words[:2]] == [{97}, {98}]
        assert (words[2:] == -1).all()
        assert allowed(grammar, 258) == {97}

    def test_drafts_past_the_end(self, compiler: GrammarCompiler) -> None:
        grammar = start(compiler, regex="ab")
        words = np.zeros((4, 9), dtype=np.int32)
        fill_rows(grammar, [97, 98, EOS_ID], words)
        assert [_ids(row) for row in words] == [{97}, {98}, {EOS_ID}, {EOS_ID}]
        assert grammar.validate_tokens(list(b"abx")) == list(b"ab")


def _ids(row: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


class TestReasoning:
    MERGES = (b"</think>", b"</", b"think", b">\n\n", b"><", b'>{"', b"<think>", b"<th", b">1")

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return bytes_tokenizer(self.MERGES)

    @pytest.fixture
    def begin(self, tokenizer: Tokenizer) -> Iterator[Callable[..., Grammar]]:
        compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)

        def make(start_mark: str | None = None, **constraint: Any) -> Grammar:
            marks = ReasoningMarks("</think>", start_mark)
            return start(compiler, begins_after=marks, **(constraint or {"regex": "[0-9]+"}))

        yield make
        compiler.close()

    @pytest.mark.parametrize("text", ["</think>12", "any text, 5 < 6 </thin</think>7", "é</think>1"])
    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_the_grammar_begins_after_the_mark(
        self, tokenizer: Tokenizer, begin: Any, text: str, as_bytes: bool
    ) -> None:
        token_ids = list(text.encode()) if as_bytes else tokenizer.encode(text)
        assert follows(begin(), tokenizer, token_ids)

    def test_blanks_after_the_mark(self, tokenizer: Tokenizer, begin: Any) -> None:
        pieces = [tokenizer.encode(piece)[0] for piece in ("</", "think", ">\n\n", "1")]
        assert follows(begin(), tokenizer, pieces), "in the token of the mark they are no answer"
        assert not begin().accept_tokens(tokenizer.encode("</think>\n1")), "in a token of their own they would be"

    def test_while_it_reasons_all_is_allowed_and_nothing_ends(self, tokenizer: Tokenizer, begin: Any) -> None:
        grammar = begin()
        for token_id in tokenizer.encode("1 2 { think"):
            assert allowed(grammar, tokenizer.vocab_size) >= set(range(tokenizer.vocab_size))
            assert grammar.accept_tokens([token_id])
            assert grammar.forced_token() is None
            assert not grammar.is_terminated()
        assert grammar.accept_tokens(tokenizer.encode("</think>"))
        assert allowed(grammar, tokenizer.vocab_size) == set(b"0123456789")

    def test_what_follows_the_mark_in_one_token_is_the_answer(self, tokenizer: Tokenizer, begin: Any) -> None:
        pieces = [tokenizer.encode(piece)[0] for piece in ("</", "think", ">1")]
        grammar = begin()
        assert follows(grammar, tokenizer, pieces)
        other = begin()
        bad = [tokenizer.encode(piece)[0] for piece in ("</", "think", "><")]
        assert other.accept_tokens(bad[:2])
        assert not other.accept_tokens(bad[2:])
        assert other.accept_tokens(tokenizer.encode("x</think>1")), "a refused token leaves it reasoning"

    @pytest.mark.parametrize("name", ["regex", "json"])
    def test_rollback_across_the_mark(self, tokenizer: Tokenizer, begin: Any, name: str) -> None:
        grammar = begin(**CONSTRAINTS[name])
        answer = "ab" if name == "regex" else '{"name": "x", "age": 1}'
        token_ids = tokenizer.encode(f"<think> ab</think>{answer}")
        masks = []
        for token_id in token_ids:
            masks.append(allowed(grammar, tokenizer.vocab_size))
            assert grammar.accept_tokens([token_id])
        for mask in reversed(masks):
            grammar.rollback(1)
            assert allowed(grammar, tokenizer.vocab_size) == mask
        assert grammar.validate_tokens(token_ids) == token_ids
        grammar.reset()
        assert follows(grammar, tokenizer, token_ids)

    def test_rollback_across_a_start_mark_in_pieces(self, tokenizer: Tokenizer, begin: Any) -> None:
        """The answer's grammar took the mark's beginning for an answer: it does so again once the mark is undone."""
        grammar = begin("<think>", regex="<[a-z]+>[0-9]")
        token_ids = [*b"<think>", *b"free"]
        masks = []
        for token_id in token_ids:
            masks.append(allowed(grammar, tokenizer.vocab_size))
            assert grammar.accept_tokens([token_id])
        for mask in reversed(masks[6:]):
            grammar.rollback(1)
            assert allowed(grammar, tokenizer.vocab_size) == mask
        assert grammar.validate_tokens(list(b">free</think><a>1")) == list(b">free</think><a>1")
        assert follows(grammar, tokenizer, list(b"ing>1")), "it was an answer after all"

    def test_an_output_that_may_begin_with_reasoning(self, tokenizer: Tokenizer, begin: Any) -> None:
        for text in ("<think>free</think>12", "12", "<think></think>1"):
            assert follows(begin("<think>"), tokenizer, tokenizer.encode(text)), text
        assert follows(begin("<think>"), tokenizer, list(b"<think>free</think>12"))
        for text in ("free", "<thin>12", "<thi", "</think>12"):
            assert not follows(begin("<think>"), tokenizer, tokenizer.encode(text)), text
            assert not follows(begin("<think>"), tokenizer, list(text.encode())), text

    def test_undecided_masks(self, tokenizer: Tokenizer, begin: Any) -> None:
        grammar = begin("<think>")
        mark_beginnings = {tokenizer.encode(piece)[0] for piece in ("<think>", "<th", "<")}
        assert allowed(grammar, tokenizer.vocab_size) == set(b"0123456789") | mark_beginnings
        assert grammar.accept_tokens(b"<")
        assert allowed(grammar, tokenizer.vocab_size) == {ord("t")} | {tokenizer.encode("think")[0]}

    def test_a_grammar_that_begins_like_the_mark(self, tokenizer: Tokenizer, begin: Any) -> None:
        for text in ("<t1>", "<think>hm</think><t2>", "<thing"):
            ok = text != "<thing"
            assert follows(begin("<think>", regex="<t[0-9]>"), tokenizer, list(text.encode())) == ok, text

    def test_marks_are_texts(self) -> None:
        for marks in ({"end": ""}, {"end": "x", "start": ""}, {"end": 3}):
            with pytest.raises(InvalidRequest, match="begins_after"):
                ReasoningMarks(**marks)  # type: ignore[arg-type]


def test_spelling_forced_text() -> None:
    class Spaced:
        """Puts a space before every text, as many vocabularies do; its pieces are words."""

        vocab_size = 260
        special_ids = frozenset({257})
        pieces = {256: b" abc", 257: b"<s>", 258: b"abc", 259: b"\n"}  # noqa: RUF012

        def token_bytes(self, token_id: int) -> bytes:
            return self.pieces.get(token_id, bytes([token_id % 256]))

        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
            data = b" " + text.encode()
            ids = []
            while data:
                token_id = next(i for i in (256, 258, data[0]) if data.startswith(self.token_bytes(i)))
                ids.append(token_id)
                data = data[len(self.token_bytes(token_id)) :]
            return ids

    vocabulary = GrammarVocabulary(Spaced(), ())
    assert vocabulary.spell("abcx") == [258, ord("x")]
    assert vocabulary.spell(b"\xc3") == [0xC3]
    assert vocabulary.spell(" abc") == [256]


def test_tokens_without_bytes_are_refused() -> None:
    class Opaque:
        vocab_size = 3
        special_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            return b""

        def encode(self, text: str, **_: Any) -> list[int]:
            return []

    with pytest.raises(InvalidRequest, match="cannot be constrained"):
        GrammarCompiler(Opaque(), ()).check(StructuredOutputs(regex="a"))
