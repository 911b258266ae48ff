"""Merge tables: the same ids as the library gives, and a cache in which only what is whole and ours counts."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vkit.errors import UsageError
from vkit.loaders import open_checkpoint
from vkit.text import from_gguf, merging_core, table_cache
from vkit.text.from_gguf import tokenizer_from_gguf
from vkit.text.merging_core import MergingCore
from vkit.text.tables import MergeTables, Strings
from vkit.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "text"


class Metadata(dict[str, Any]):
    """Metadata that names its content, as that of a file does."""

    def digest(self, *prefixes: str) -> str:
        chosen = sorted((key, value) for key, value in self.items() if key.startswith(prefixes))
        return hashlib.sha256(repr(chosen).encode("utf-8", "surrogateescape")).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VKIT_TOKENIZER_CACHE", raising=False)
    monkeypatch.setattr(from_gguf, "MIN_TOKENS", 0)
    return table_cache.table_folder()


@pytest.fixture(params=["bytes", "whole words", "sentencepiece", "no prefix", "no unknown", "lines"])
def source(request: pytest.FixtureRequest, byte_level: dict[str, Any], sentencepiece: dict[str, Any]) -> Metadata:
    kind, key = request.param, "tokenizer.ggml."
    if kind == "bytes":
        return Metadata(byte_level)
    if kind == "whole words":
        return Metadata({**byte_level, key + "pre": "llama-bpe", key + "merges": byte_level[key + "merges"][:-2]})
    if kind == "no prefix":
        return Metadata({**sentencepiece, key + "add_space_prefix": False})
    if kind == "no unknown":
        return Metadata({name: value for name, value in sentencepiece.items() if name != key + "unknown_token_id"})
    if kind == "lines":
        merges = ["▁ a", "a b", "b a", "ab a", "▁ ab", "▁ ▁", "▁▁ ▁▁"]
        return Metadata({**sentencepiece, key + "model": "gemma4", key + "merges": merges})
    return Metadata(sentencepiece)


def core_of(tokenizer: Tokenizer) -> MergingCore:
    core = tokenizer._encoder._core  # type: ignore[attr-defined]
    assert isinstance(core, MergingCore)
    return core


def built_and_kept(source: Mapping[str, Any]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a first start and of a second."""
    shutil.rmtree(table_cache.table_folder(), ignore_errors=True)
    first = tokenizer_from_gguf(source, architecture="llama")
    second = tokenizer_from_gguf(source, architecture="llama")
    assert not core_of(first).uses_tables
    assert core_of(second).uses_tables
    return first, second


ALPHABET = "ab ▁hellowr éÃ©x\n\t1😀" + "c,<0x>[INST]"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.one_of(st.sampled_from(ALPHABET), st.characters(exclude_categories=["Cs"])), max_size=60))
def test_tables_give_the_librarys_ids(text: str, folder: Path, source: Metadata) -> None:
    first, second = built_and_kept(source)
    for parse_special in (False, True):
        assert second.encode(text, parse_special=parse_special) == first.encode(text, parse_special=parse_special)


def test_both_say_the_same_of_the_vocabulary(folder: Path, source: Metadata) -> None:
    first, second = built_and_kept(source)
    for name in ("vocab_size", "special_ids", "eos_token_ids", "bos_token", "eos_token", "adds_bos", "chat_templates"):
        assert getattr(second, name) == getattr(first, name)
    for token_id in range(-1, first.vocab_size + 1):
        assert second.token_bytes(token_id) == first.token_bytes(token_id)
        assert second.token_piece(token_id) == first.token_piece(token_id)


def test_long_texts_and_many_texts_go_to_the_library(folder: Path, source: Metadata) -> None:
    letters = random.Random(0)
    long = "".join(letters.choice("ab\n") for _ in range(merging_core.SHORT_TEXT + 1))
    first, second = built_and_kept(source)
    assert second.encode(long) == first.encode(long)
    assert not core_of(second).uses_tables
    _, third = built_and_kept(source)
    short = "ab" * 500
    for _ in range(merging_core.MANY_CHARACTERS // len(short) + 1):
        assert third.encode(short) == first.encode(short)
    assert not core_of(third).uses_tables


@pytest.mark.parametrize("damage", ["cut", "flipped", "flipped count", "empty", "foreign", "another key", "longer"])
def test_a_damaged_entry_is_no_entry(damage: str, folder: Path, byte_level: dict[str, Any]) -> None:
    source = Metadata(byte_level)
    tokenizer_from_gguf(source, architecture="llama")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    tokenizer_from_gguf(Metadata({**byte_level, "tokenizer.ggml.add_bos_token": True}), architecture="llama")
    (other,) = set(folder.iterdir()) - {path}
    flipped = bytearray(whole)
    flipped[100 if damage == "flipped count" else -10] ^= 1
    damaged = {"cut": whole[:-1], "empty": b"", "foreign": b"#!/bin/sh\n" * 40, "another key": other.read_bytes()}
    path.write_bytes(damaged.get(damage, whole + b"\0" if damage == "longer" else bytes(flipped)))
    tokenizer = tokenizer_from_gguf(source, architecture="llama")
    assert not core_of(tokenizer).uses_tables
    assert tokenizer.encode("hello wor") == tokenizer_from_gguf(byte_level, architecture="llama").encode("hello wor")
    assert path.read_bytes() == whole, "it was not written anew"


def test_tables_that_contradict_themselves_are_refused() -> None:
    tables = MergeTables.build(["a", "b", "ab"], {"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    whole = tables.pack()
    assert MergeTables.unpack(memoryview(whole)).vocabulary() == ({"a": 0, "ab": 2, "b": 1}, [("a", "b")])
    for place in range(32, len(whole) - 4, 4):  # every number but the spelled bytes
        broken = bytearray(whole)
        broken[place + 3] = 0xFF
        try:
            found = MergeTables.unpack(memoryview(bytes(broken)))
        except ValueError:
            continue
        assert list(found.tokens) == ["a", "b", "ab"], "an offset outside went through"
        assert max(found.order) < 3
        assert max(found.results) < 3
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"too short|of another length"):
            MergeTables.unpack(memoryview(whole)[:length])


def test_strings_are_a_sequence() -> None:
    words = ["a", "", "é", "\udcff"]
    strings = MergeTables.build(words, {}, []).tokens
    assert isinstance(strings, Strings)
    assert [*strings] == strings[:] == [strings[i] for i in range(4)] == words
    with pytest.raises(IndexError):
        strings[4]


@pytest.mark.parametrize("value", ["0", "false"])
def test_it_can_be_turned_off(
    value: str, folder: Path, byte_level: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_and_kept(Metadata(byte_level))
    monkeypatch.setenv("VKIT_TOKENIZER_CACHE", value)
    changed = Metadata({**byte_level, "tokenizer.ggml.add_bos_token": True})
    for source in (Metadata(byte_level), changed):
        assert not core_of(tokenizer_from_gguf(source, architecture="llama")).uses_tables
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setenv("VKIT_TOKENIZER_CACHE", "maybe")
    with pytest.raises(UsageError, match="VKIT_TOKENIZER_CACHE: expected 1, 0, true or false"):
        tokenizer_from_gguf(changed, architecture="llama")


def test_every_version_and_vocabulary_has_its_own(
    folder: Path, byte_level: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Metadata(byte_level)
    keys = {table_cache.table_key(source)}
    keys.add(table_cache.table_key(Metadata({**byte_level, "tokenizer.ggml.pre": "gpt2"})))
    keys.add(table_cache.table_key(Metadata({**byte_level, "general.architecture": "gemma"})))
    monkeypatch.setattr(table_cache, "__version__", "9.9")
    keys.add(table_cache.table_key(source))
    assert len(keys) == 4
    assert table_cache.table_key(Metadata({**byte_level, "general.name": "x"})) in keys
    assert table_cache.table_key(dict(byte_level)) is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    folder: Path, byte_level: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    caplog.set_level(logging.INFO, "vkit.cache")
    for _ in range(2):
        tokenizer = tokenizer_from_gguf(Metadata(byte_level), architecture="llama")
        assert not core_of(tokenizer).uses_tables
    assert "the tokenizer's tables cannot be kept" in caplog.text


def test_small_vocabularies_are_not_kept(folder: Path, sentencepiece: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(from_gguf, "MIN_TOKENS", table_cache.MIN_TOKENS)
    tokenizer_from_gguf(Metadata(sentencepiece), architecture="llama")
    assert not folder.exists()


def test_the_demo_models_ids_are_llama_cpps(folder: Path, demo_path: Path) -> None:
    load_tokenizer(demo_path)
    checkpoint = open_checkpoint(demo_path)
    for case in json.loads((DATA / "demo_ids.json").read_text(encoding="utf-8"))["cases"]:
        tokenizer = load_tokenizer(checkpoint)  # a new one each time, since many texts would go to the library
        assert core_of(tokenizer).uses_tables
        assert tokenizer.encode(case["text"]) == case["plain"]
        assert tokenizer.encode(case["text"], parse_special=True) == case["special"]


def test_mapped_or_not_a_file_has_one_key(folder: Path, demo_path: Path) -> None:
    keys = {
        table_cache.table_key(open_checkpoint(demo_path, use_mmap=mapped).gguf_metadata) for mapped in (True, False)
    }
    assert len(keys) == 1
    assert None not in keys
