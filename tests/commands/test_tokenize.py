"""`vkit tokenize`: the corpus format and the exact output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Run = Callable[..., Any]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A byte-level tokenizer: 256 bytes and one merge, `ab`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    vocabulary["ab"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenize(vkit_run: Run, tokenizer_file: Path, tmp_path: Path) -> Run:
    def run(corpus: bytes) -> Any:
        (tmp_path / "corpus.txt").write_bytes(corpus)
        return vkit_run("tokenize", str(tokenizer_file), str(tmp_path / "corpus.txt"))

    return run


def ids_of(tokenizer_file: Path, text: str) -> str:
    return " ".join(map(str, Tokenizer.from_file(str(tokenizer_file)).encode(text).ids))


def test_one_line_per_entry(tokenize: Run, tokenizer_file: Path) -> None:
    result = tokenize("# skipped\nabc\n\n é😀 \na\\n\\t\\r\\\\b\nx\ry\n #kept\n".encode())
    assert result.status == 0
    expected = ["abc", "", " é😀 ", "a\n\t\r\\b", "x\ry", " #kept"]
    assert result.stdout.split("\n") == [*(ids_of(tokenizer_file, text) or "EMPTY" for text in expected), ""]
    assert result.stdout.split("\n")[1] == "EMPTY"


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        (b"a\nb", ["newline"]),
        (b"a\nb\\q\n", ["2", "\\q"]),
        (b"a\\\n", ["1", "backslash"]),
        (b"a\xff\n", ["UTF-8"]),
    ],
)
def test_a_bad_corpus_prints_nothing(tokenize: Run, corpus: bytes, words: list[str]) -> None:
    result = tokenize(corpus)
    assert (result.status, result.stdout) == (2, "")
    for word in words:
        assert word in result.error


@pytest.mark.parametrize("args", [[], ["one"], ["one", "two", "three"]])
def test_wrong_argument_count(vkit_run: Run, args: list[str]) -> None:
    assert vkit_run("tokenize", *args).status == 2


def test_missing_files(vkit_run: Run, tokenizer_file: Path) -> None:
    (tokenizer_file.parent / "c").write_text("a\n")
    assert "no/such" in vkit_run("tokenize", "no/such", str(tokenizer_file.parent / "c")).error
    assert "no/such" in vkit_run("tokenize", str(tokenizer_file), "no/such").error


def test_a_damaged_tokenizer_is_named(vkit_run: Run, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.gguf"):
        (tmp_path / name).write_text("{")
        (tmp_path / "c").write_text("a\n")
        result = vkit_run("tokenize", str(tmp_path / name), str(tmp_path / "c"))
        assert result.status != 0
        assert name in result.error
