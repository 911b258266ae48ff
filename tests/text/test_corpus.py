from __future__ import annotations

import pytest

from vkit.errors import UsageError
from vkit.text.corpus import encode_corpus, format_ids, parse_corpus
from vkit.text.tokenizer import Tokenizer


def test_lines_comments_and_escapes() -> None:
    content = "plain\n# a comment\n\n" + "a\\nb\\tc\\r\\\\n\n #kept\n"
    assert parse_corpus(content) == ["plain", "", "a\nb\tc\r\\n", " #kept"]


def test_only_a_line_feed_ends_a_line() -> None:
    assert parse_corpus("a\r\nb\u2028c\x0cd\n") == ["a\r", "b\u2028c\x0cd"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("abc", "end with a newline"),
        ("", "end with a newline"),
        ("ok\nbad \\q\n", r"line 2: unknown escape \q"),
        ("bad \\\n", "line 1: unknown escape a lone backslash"),
        ("# skipped \\q\n\\#\n", r"line 2: unknown escape \#"),
    ],
)
def test_refusals_name_the_line(content: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_corpus(content)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_encoding_adds_no_special_tokens_and_writes_empty(sentencepiece_tokenizer: Tokenizer) -> None:
    assert sentencepiece_tokenizer.adds_bos
    lines = [format_ids(ids) for ids in encode_corpus(sentencepiece_tokenizer, "ab\n\n#x\n<s>\n")]
    assert lines[1] == "EMPTY"
    assert lines[0].split() == [str(i) for i in sentencepiece_tokenizer.encode("ab", add_special_tokens=False)]
    assert len(lines) == 3
    assert "1" not in lines[2].split()


def test_a_bad_corpus_is_refused_before_the_first_entry(golden_tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError):
        encode_corpus(golden_tokenizer, "fine\n\\x\n")
