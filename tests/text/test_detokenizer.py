from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkit.text.detokenizer import Detokenizer
from vkit.text.tokenizer import Tokenizer

KINDS = ("byte_level_tokenizer", "sentencepiece_tokenizer", "golden_tokenizer")


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, **flags: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], **flags)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150)
def test_pieces_joined_equal_decoding_at_once(kind: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    # Ids beyond the vocabulary too: a model may have padded rows.
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    whole = tokenizer.decode(token_ids, **flags)
    pieces = pieces_of(tokenizer, token_ids, **flags)
    assert "".join(pieces) == whole
    # Every prefix of the stream is a prefix of the text: nothing is taken back.
    end = 0
    for piece in pieces:
        assert whole.startswith(piece, end)
        end += len(piece)


def test_one_space_is_dropped_even_if_it_is_all_of_a_token(sentencepiece_tokenizer: Tokenizer) -> None:
    space = next(i for i in range(sentencepiece_tokenizer.vocab_size) if sentencepiece_tokenizer.token_bytes(i) == b" ")
    word = next(
        i for i in range(sentencepiece_tokenizer.vocab_size) if sentencepiece_tokenizer.token_bytes(i) == b" ab"
    )
    flags = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert sentencepiece_tokenizer.decode([space, word], **flags) == " ab"
    assert "".join(pieces_of(sentencepiece_tokenizer, [space, word], **flags)) == " ab"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100)
def test_a_prompt_before_it_changes_only_the_space_at_the_start(
    kind: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    prompt, output = data.draw(ids), data.draw(ids)
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    before = tokenizer.decode(prompt, **flags)
    if "\ufffd" in before or "\ufffd" in tokenizer.decode(prompt + output, **flags):
        return  # characters cut at the border belong to neither side
    after = "".join(pieces_of(tokenizer, output, prompt, **flags))
    assert before + after == tokenizer.decode(prompt + output, **flags)


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_whole_texts_never_show_a_replacement_character(golden_tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(golden_tokenizer, list(text.encode()))
    special = {248, 249, 250, 251, 252, 253, 254, 255}
    assert special.isdisjoint(text.encode())
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


class TestPitfall3:
    """Characters split over tokens."""

    def test_each_byte_its_own_token(self, golden_tokenizer: Tokenizer) -> None:
        pieces = pieces_of(golden_tokenizer, list("é😀".encode()))
        assert pieces == ["", "é", "", "", "", "😀", ""]

    def test_a_word_with_a_space_after_a_half_character(self, sentencepiece_tokenizer: Tokenizer) -> None:
        byte = {value: token_id for token_id, value in sentencepiece_tokenizer.vocabulary.byte_values.items()}
        word = sentencepiece_tokenizer.vocabulary.piece
        spaced = next(i for i in range(sentencepiece_tokenizer.vocab_size) if word(i) == "▁a")
        halves = [byte[b] for b in "é".encode()]
        # The half character alone shows nothing; the word is no reason to guess at it early.
        assert pieces_of(sentencepiece_tokenizer, [spaced, halves[0]])[:2] == ["a", ""]
        assert pieces_of(sentencepiece_tokenizer, [spaced, *halves, spaced]) == ["a", "", "é", " a", ""]
        # Once nothing can complete it, it is one U+FFFD, and the word follows.
        assert pieces_of(sentencepiece_tokenizer, [spaced, halves[0], spaced]) == ["a", "", "\ufffd a", ""]

    def test_a_special_token_between_two_halves(self, golden_tokenizer: Tokenizer) -> None:
        assert pieces_of(golden_tokenizer, [0xC3, 249, 0xA9]) == ["", "", "é", ""]

    def test_cut_after_two_of_four_bytes(self, golden_tokenizer: Tokenizer) -> None:
        cut = list("a😀".encode())[:3]
        assert pieces_of(golden_tokenizer, cut) == ["a", "", "", "\ufffd"]
        assert golden_tokenizer.decode(cut) == "a\ufffd"

    def test_finish_twice_adds_nothing(self, golden_tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(golden_tokenizer)
        detokenizer.push(0xF0)
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == ""


def test_special_tokens_are_left_out_or_kept(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("hell<s><tool> wor", add_special_tokens=False, parse_special=True)
    assert "".join(pieces_of(byte_level_tokenizer, ids)) == "hell<tool> wor"
    assert "".join(pieces_of(byte_level_tokenizer, ids, skip_special_tokens=False)) == "hell<s><tool> wor"


class TestLeadingSpace:
    def test_the_first_text_loses_the_encoders_space(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ids = sentencepiece_tokenizer.encode("ab ab", add_special_tokens=False)
        assert "".join(pieces_of(sentencepiece_tokenizer, ids)) == "ab ab"
        assert "".join(pieces_of(sentencepiece_tokenizer, ids, [1])) == "ab ab"  # BOS is no text

    def test_after_a_prompt_it_is_a_real_space(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ids = sentencepiece_tokenizer.encode("ab", add_special_tokens=False)
        assert "".join(pieces_of(sentencepiece_tokenizer, ids, [1, *ids])) == " ab"

    def test_after_special_tokens_it_follows_the_flag(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ids = sentencepiece_tokenizer.encode("ab[INST]ab</s>ab", add_special_tokens=False, parse_special=True)
        kept = pieces_of(sentencepiece_tokenizer, ids, skip_special_tokens=False)
        assert "".join(kept) == "ab[INST] ab</s> ab"
        tight = pieces_of(sentencepiece_tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert "".join(tight) == "ab[INST]ab</s>ab"


class TestWithoutTokenBytes:
    """Vocabularies that only decode as a whole take the other path."""

    def test_takes_that_path(self, wordpiece_tokenizer: Tokenizer) -> None:
        assert wordpiece_tokenizer.sequence_decoder is not None

    def test_words_and_their_endings(self, wordpiece_tokenizer: Tokenizer) -> None:
        ids = wordpiece_tokenizer.encode("hello playing worlds é.")
        assert wordpiece_tokenizer.decode(ids) == "hello playing worlds é ."
        assert pieces_of(wordpiece_tokenizer, ids) == ["hello", " play", "ing", " world", "s", " é", " .", ""]

    def test_after_a_prompt(self, wordpiece_tokenizer: Tokenizer) -> None:
        ids = wordpiece_tokenizer.encode("hello playing")
        assert "".join(pieces_of(wordpiece_tokenizer, ids[1:], ids[:1])) == " playing"

    @given(st.lists(st.integers(0, 7), max_size=20))
    def test_pieces_joined_equal_decoding_at_once(self, wordpiece_tokenizer: Tokenizer, token_ids: list[int]) -> None:
        assert "".join(pieces_of(wordpiece_tokenizer, token_ids)) == wordpiece_tokenizer.decode(token_ids)


def test_cost_per_token_does_not_grow(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("The quick brown fox jumps over the lazy dog — 你好 😀. " * 400)
    detokenizer = Detokenizer(demo_tokenizer)
    half = len(ids) // 2
    times = []
    for part in (ids[:half], ids[half:]):
        start = time.process_time()
        for token_id in part:
            detokenizer.push(token_id)
        times.append(time.process_time() - start)
    assert times[1] < 4 * times[0] + 0.1
