from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkit.errors import CheckpointError, ModelLoadError
from vkit.text.from_gguf import tokenizer_from_gguf
from vkit.text.pretokenizers import PATTERNS, patterns_for
from vkit.text.settings import parse_settings
from vkit.text.tokenizer import Tokenizer, load_tokenizer

PREFIX = "tokenizer.ggml."
DATA = Path(__file__).resolve().parents[1] / "data" / "text"


def build(metadata: Mapping[str, Any], architecture: str = "llama", **extra: Any) -> Tokenizer:
    return tokenizer_from_gguf({**metadata, **extra}, architecture=architecture)


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((DATA / "demo_ids.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) >= 200
    return cases


class TestDemoModel:
    """Equality with llama.cpp's ids, recorded by tests/judges/record_llamacpp.py."""

    @pytest.mark.parametrize("key", ["plain", "special"])
    def test_ids_equal_llama_cpp(self, demo_tokenizer: Tokenizer, cases: list[dict[str, Any]], key: str) -> None:
        for case in cases:
            ids = demo_tokenizer.encode(case["text"], parse_special=key == "special")
            assert ids == case[key], case["text"]

    def test_prompts_of_the_greedy_record(self, demo_tokenizer: Tokenizer) -> None:
        record = json.loads((DATA.parent / "demo_greedy.json").read_text(encoding="utf-8"))
        for case in record["cases"]:
            ids = demo_tokenizer.encode(case["prompt"], parse_special=case["parse_special"])
            assert ids == case["prompt_token_ids"]

    def test_decoding_gives_the_text_back(self, demo_tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
        for case in cases:
            assert demo_tokenizer.decode(case["plain"]) == case["text"]
            assert demo_tokenizer.decode(case["special"], skip_special_tokens=False) == case["text"]

    def test_facts(self, demo_tokenizer: Tokenizer) -> None:
        assert demo_tokenizer.vocab_size == 49152
        assert (demo_tokenizer.bos_token, demo_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert not demo_tokenizer.adds_bos
        assert demo_tokenizer.eos_token_ids == {0, 2}
        assert "<|im_start|>" in demo_tokenizer.chat_templates["default"]

    def test_it_loads_from_its_path(self, demo_path: Path) -> None:
        assert load_tokenizer(demo_path).encode("Hello") == load_tokenizer(str(demo_path)).encode("Hello")

    def test_text_never_makes_control_tokens(self, demo_tokenizer: Tokenizer) -> None:
        check_text_never_makes_control_tokens(demo_tokenizer)


def check_text_never_makes_control_tokens(tokenizer: Tokenizer) -> None:
    control = tokenizer.special_ids
    for token_id in control:
        text = tokenizer.token_piece(token_id)
        for wrapped in (text, f"a{text}", f"{text}b", f" {text} ", f"{text}{text}", f"<{text}>"):
            ids = tokenizer.encode(wrapped, add_special_tokens=False)
            assert control.isdisjoint(ids), wrapped
            assert token_id in tokenizer.encode(wrapped, parse_special=True), wrapped


class TestByteLevel:
    def test_control_tokens_need_parse_special(self, byte_level_tokenizer: Tokenizer) -> None:
        control = byte_level_tokenizer.special_ids
        for token_id in control:
            text = byte_level_tokenizer.token_piece(token_id)
            assert control.isdisjoint(byte_level_tokenizer.encode(f"x{text}y"))
            assert token_id in byte_level_tokenizer.encode(f"x{text}y", parse_special=True)

    def test_even_one_that_merges_could_reach(self, byte_level_tokenizer: Tokenizer) -> None:
        assert [byte_level_tokenizer.token_piece(i) for i in byte_level_tokenizer.encode("hello")] == ["hell", "o"]

    @given(st.text(alphabet="helo <s>/|im_end<tool>é[PAD0]", max_size=30))
    @settings(max_examples=200)
    def test_no_text_makes_control_tokens_and_all_text_comes_back(
        self, byte_level_tokenizer: Tokenizer, text: str
    ) -> None:
        ids = byte_level_tokenizer.encode(text)
        assert byte_level_tokenizer.special_ids.isdisjoint(ids)
        assert byte_level_tokenizer.decode(ids) == text
        special = byte_level_tokenizer.encode(text, parse_special=True)
        assert byte_level_tokenizer.decode(special, skip_special_tokens=False) == text

    def test_user_defined_tokens_always_count_longest_first(self, byte_level_tokenizer: Tokenizer) -> None:
        pieces = [byte_level_tokenizer.token_piece(i) for i in byte_level_tokenizer.encode("a<tool>      b")]
        assert pieces == ["a", "<tool>", "    ", "  ", "b"]

    def test_a_user_defined_character_is_no_byte(self, byte_level_tokenizer: Tokenizer) -> None:
        user_defined = byte_level_tokenizer.encode("é")
        assert byte_level_tokenizer.decode(user_defined) == "é"
        assert user_defined[0] in byte_level_tokenizer.vocabulary.added_ids
        # The byte 0xE9 begins many Chinese characters and must still be written by its own token.
        assert byte_level_tokenizer.decode(byte_level_tokenizer.encode("鱼")) == "鱼"

    def test_unused_tokens_never_count(self, byte_level_tokenizer: Tokenizer) -> None:
        ids = byte_level_tokenizer.encode("[PAD0]", parse_special=True)
        assert len(ids) == 6

    def test_a_token_that_is_no_text_keeps_its_bytes(self, byte_level_tokenizer: Tokenizer) -> None:
        broken = next(
            i for i in range(byte_level_tokenizer.vocab_size) if byte_level_tokenizer.token_piece(i) == "\udcff\udcfe"
        )
        assert byte_level_tokenizer.token_bytes(broken) == b"\xff\xfe"
        assert byte_level_tokenizer.decode([broken]) == "\ufffd\ufffd"

    def test_numpy_arrays_do(self, byte_level: dict[str, Any]) -> None:
        byte_level[PREFIX + "token_type"] = np.array(byte_level[PREFIX + "token_type"], dtype=np.int32)
        assert build(byte_level).encode("hell") == build(byte_level).encode("hell")

    def test_without_types_every_token_is_ordinary(self, byte_level: dict[str, Any]) -> None:
        del byte_level[PREFIX + "token_type"]
        assert build(byte_level).special_ids == frozenset()


def naive_sentencepiece(metadata: Mapping[str, Any], text: str) -> list[int]:
    """SentencePiece's rule read out loud: merge the best adjacent pair, leftmost among equals, until none is left."""
    tokens, types = metadata[PREFIX + "tokens"], metadata[PREFIX + "token_type"]
    scores = metadata[PREFIX + "scores"]
    normal = {text: i for i, text in enumerate(tokens) if types[i] == 1}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(-scores[normal[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in normal]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [normal[symbol]] if symbol in normal else [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


_built: dict[int, Tokenizer] = {}


def cached_build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, built once for all examples of a property test."""
    return _built.setdefault(id(metadata), _built.get(id(metadata)) or build(metadata))


class TestSentencePiece:
    @given(text=st.text(alphabet="abc é▁x😀\n", max_size=24))
    @settings(max_examples=300)
    def test_equals_the_rule(self, sentencepiece_source: Mapping[str, Any], text: str) -> None:
        tokenizer = cached_build(sentencepiece_source)
        assert tokenizer.encode(text, add_special_tokens=False) == naive_sentencepiece(sentencepiece_source, text)

    @given(st.text(alphabet="abc éx😀\n ", max_size=24))
    def test_text_comes_back(self, sentencepiece_tokenizer: Tokenizer, text: str) -> None:
        assert sentencepiece_tokenizer.decode(sentencepiece_tokenizer.encode(text)) == text

    def test_a_space_after_each_special_token(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ids = sentencepiece_tokenizer.encode("ab[INST]ab", add_special_tokens=False)
        assert [sentencepiece_tokenizer.token_piece(i) for i in ids] == ["▁ab", "[INST]", "▁ab"]

    def test_without_prefix(self, sentencepiece: dict[str, Any]) -> None:
        for tokenizer in (build(sentencepiece, **{PREFIX + "add_space_prefix": False}), build(sentencepiece, "gemma3")):
            ids = tokenizer.encode("ab a", add_special_tokens=False)
            assert [tokenizer.token_piece(i) for i in ids] == ["ab", "▁a"]
            assert tokenizer.decode(ids) == "ab a"
            assert tokenizer.decode(ids[1:]) == " a"

    def test_the_empty_text_has_no_tokens(self, sentencepiece_tokenizer: Tokenizer) -> None:
        assert sentencepiece_tokenizer.encode("", add_special_tokens=False) == []
        assert sentencepiece_tokenizer.encode("") == [1]

    def test_byte_tokens_written_as_text_are_text(self, sentencepiece_tokenizer: Tokenizer) -> None:
        ids = sentencepiece_tokenizer.encode("<0x41>", add_special_tokens=False, parse_special=True)
        assert sentencepiece_tokenizer.decode(ids) == "<0x41>"

    def test_control_tokens(self, sentencepiece_tokenizer: Tokenizer) -> None:
        check_text_never_makes_control_tokens(sentencepiece_tokenizer)

    def test_phi3_swallows_space_after_its_tokens(self, sentencepiece: dict[str, Any]) -> None:
        sentencepiece[PREFIX + "tokens"] += ["<|user|>", "<|endoftext|>"]
        sentencepiece[PREFIX + "token_type"] += [3, 3]
        sentencepiece[PREFIX + "scores"] += [0.0, 0.0]
        text = "<|user|>\n ab<|endoftext|>\nab"
        swallowed = build(sentencepiece, "phi3").encode(text, add_special_tokens=False, parse_special=True)
        kept = build(sentencepiece, "llama").encode(text, add_special_tokens=False, parse_special=True)
        tokenizer = build(sentencepiece)
        assert tokenizer.decode(swallowed, skip_special_tokens=False) == "<|user|> ab<|endoftext|> \nab"
        assert tokenizer.decode(kept, skip_special_tokens=False) == "<|user|> \n ab<|endoftext|> \nab"


class TestBosAndEos:
    @pytest.mark.parametrize(
        ("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
    )
    def test_default_by_pre_tokenizer(self, byte_level: dict[str, Any], pre: str, adds: bool) -> None:
        assert build(byte_level, **{PREFIX + "pre": pre}).adds_bos is adds

    def test_flags_win(self, byte_level: dict[str, Any]) -> None:
        tokenizer = build(byte_level, **{PREFIX + "add_bos_token": True, PREFIX + "add_eos_token": True})
        ids = tokenizer.encode("o")
        assert ids == [tokenizer.bos_token_id, 111, tokenizer.eos_token_id]
        assert tokenizer.encode("o", add_special_tokens=False) == [111]

    def test_pitfall_12_one_bos(self, byte_level: dict[str, Any]) -> None:
        adds = build(byte_level, **{PREFIX + "add_bos_token": True})
        assert adds.encode("<s>o", parse_special=True) == [adds.bos_token_id, 111]
        assert adds.encode("<s><s>o", parse_special=True) == [adds.bos_token_id, adds.bos_token_id, 111]
        assert adds.encode("<s>o")[:2] == [adds.bos_token_id, ord("<")]  # written by a user: text, and not the BOS
        leaves = build(byte_level, **{PREFIX + "add_bos_token": False})
        assert leaves.encode("<s>o", parse_special=True) == [leaves.bos_token_id, 111]
        assert leaves.encode("o") == [111]

    def test_end_tokens(self, byte_level: dict[str, Any], sentencepiece: dict[str, Any]) -> None:
        names = {byte: i for i, byte in enumerate(byte_level[PREFIX + "tokens"])}
        assert build(byte_level).eos_token_ids == {names["</s>"], names["<|im_end|>"]}
        ordinary = {**byte_level, PREFIX + "token_type": [1] * len(byte_level[PREFIX + "tokens"])}
        assert build(ordinary).eos_token_ids == {names["</s>"]}  # an ordinary token of that text ends nothing
        assert build(byte_level, **{PREFIX + "eot_token_id": 5}).eos_token_ids >= {5}
        assert 2 in build(sentencepiece).eos_token_ids

    def test_end_is_no_end_beside_return(self, byte_level: dict[str, Any]) -> None:
        for text in ("<|end|>", "<|return|>"):
            byte_level[PREFIX + "tokens"].append(text)
            byte_level[PREFIX + "token_type"].append(3)
        ids = build(byte_level).eos_token_ids
        assert len(byte_level[PREFIX + "tokens"]) - 1 in ids
        assert len(byte_level[PREFIX + "tokens"]) - 2 not in ids

    def test_settings_win_over_the_file(self, byte_level: dict[str, Any]) -> None:
        settings = parse_settings({"eos_token": "<|im_end|>", "add_bos_token": True, "chat_template": "T"}, "x")
        tokenizer = tokenizer_from_gguf(byte_level, architecture="llama", settings=settings)
        assert (tokenizer.eos_token, tokenizer.adds_bos, tokenizer.chat_templates["default"]) == (
            "<|im_end|>",
            True,
            "T",
        )


def test_chat_templates_by_name(byte_level: dict[str, Any]) -> None:
    extra = {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert build(byte_level, **extra).chat_templates == {"default": "A", "tool_use": "B"}


class TestRefusals:
    @pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "none", "something"])
    def test_unsupported_models_by_name(self, byte_level: dict[str, Any], model: str) -> None:
        with pytest.raises(ModelLoadError, match=f"'{model}' is not supported"):
            build(byte_level, **{PREFIX + "model": model})

    @pytest.mark.parametrize("key", ["model", "tokens", "merges"])
    def test_missing_keys(self, byte_level: dict[str, Any], key: str) -> None:
        del byte_level[PREFIX + key]
        with pytest.raises(CheckpointError, match=key):
            build(byte_level)

    @pytest.mark.parametrize("key", ["scores", "token_type"])
    def test_missing_keys_of_sentencepiece(self, sentencepiece: dict[str, Any], key: str) -> None:
        del sentencepiece[PREFIX + key]
        with pytest.raises(CheckpointError, match=key):
            build(sentencepiece)

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("token_type", [1], "1 entries for"),
            ("eos_token_id", 10**6, "1000000"),
            ("merges", ["ab"], "not two tokens"),
            ("merges", ["a b c"], "not two tokens"),
        ],
    )
    def test_contradictions(self, byte_level: dict[str, Any], key: str, value: object, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            build(byte_level, **{PREFIX + key: value})


class TestPreTokenizers:
    def test_every_pattern_compiles(self) -> None:
        from tokenizers import Regex, pre_tokenizers

        assert len(PATTERNS) >= 40
        for patterns in set(PATTERNS.values()):
            for pattern in patterns:
                pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str("Ab1 c's\n\n 你好 ...")

    @pytest.mark.parametrize("name", [None, "never-heard-of"])
    def test_unknown_names_warn(self, name: str | None, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert patterns_for(name) == PATTERNS["gpt-2"]
        assert "pre-tokenizer" in caplog.text

    @pytest.mark.parametrize(
        ("name", "text", "pieces"),
        [
            ("gpt-2", "It's 12345 a  b", ["It", "'s", " 12345", " a", " ", " b"]),
            ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
            ("qwen2", "a 12\r\n", ["a", " ", "1", "2", "\r\n"]),
            ("qwen35", "a\u0301b", ["a\u0301b"]),
            ("starcoder", "a 12", ["a", " ", "1", "2"]),
            ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
            ("deepseek-v3", "1234你好ab", ["123", "4", "你好", "ab"]),
            ("tekken", "helloWorld/\n", ["hello", "World", "/\n"]),
            ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
            ("kimi-k2", "hello你好World's", ["hello", "你好", "World's"]),
            ("laguna", "a\n\nb 1", ["a", "\n\n", "b", " ", "1"]),
            ("bloom", "a, b.c", ["a", ",", " b", ".", "c"]),
        ],
    )
    def test_pieces(self, name: str, text: str, pieces: list[str]) -> None:
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
        found = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
        assert [piece for piece, _ in found] == pieces
