"""A corpus of texts in one file, one per line: what `vkit tokenize` reads and prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vkit.errors import UsageError
from vkit.text.tokenizer import Tokenizer

_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\"}
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)


def parse_corpus(content: str) -> list[str]:
    """The entries of a corpus: its lines, without those that start with `#`, with `\\n \\r \\t \\\\` unescaped.

    An empty line is the empty string. Only a line feed ends a line.

    Raises:
        UsageError: another escape, or no line feed at the end; the message names the line.
    """
    *lines, rest = content.split("\n")
    if rest or not lines:
        raise UsageError("corpus: the file must end with a newline", remedy="its last line may have been cut off")
    numbered = enumerate(lines, start=1)
    return [_unescape(line, number) for number, line in numbered if not line.startswith("#")]


def encode_corpus(tokenizer: Tokenizer, content: str) -> Iterator[list[int]]:
    """Token ids of each entry, without BOS and EOS; special tokens written in an entry are plain text.

    Raises:
        UsageError: see `parse_corpus`; before the first entry is encoded.
    """
    entries = parse_corpus(content)
    return (tokenizer.encode(entry, add_special_tokens=False) for entry in entries)


def format_ids(token_ids: Sequence[int]) -> str:
    """One line of output: ids separated by spaces, or EMPTY."""
    return " ".join(map(str, token_ids)) or "EMPTY"


def _unescape(line: str, number: int) -> str:
    def replacement(match: re.Match[str]) -> str:
        try:
            return _ESCAPES[match[0]]
        except KeyError:
            given = match[0] if match[1] else "a lone backslash at the end"
            raise UsageError(
                f"corpus line {number}: unknown escape {given}", remedy=r"the escapes are \n \r \t \\"
            ) from None

    return _ESCAPE.sub(replacement, line)
