"""Which bytes a token stands for. Knows nothing of how text becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WORD_START = "\u2581"
"""The sign that SentencePiece vocabularies write for a space."""


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the printable alphabet in which byte-level vocabularies are written.

    Source: the byte encoder of GPT-2: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


BYTE_OF = _byte_alphabet()


def plain_bytes(piece: str) -> bytes:
    """The bytes of a piece that is its own text. Lone surrogates stand for bytes that were not UTF-8 in the file."""
    return piece.encode("utf-8", "surrogateescape")


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a piece written in the byte alphabet; a piece with any other character is its own text."""
    try:
        return bytes(map(BYTE_OF.__getitem__, piece))
    except KeyError:
        return plain_bytes(piece)


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a piece in which spaces are written as U+2581."""
    return plain_bytes(piece.replace(WORD_START, " "))


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a model, seen from the output side."""

    size: int
    """One more than the highest id."""

    piece: Callable[[int], str | None]
    """The token as its file spells it; None for an id without token."""

    added_ids: frozenset[int]
    """Tokens whose piece is plain text: control tokens and those a user may write."""

    special_ids: frozenset[int]
    """The tokens among `added_ids` that `skip_special_tokens` leaves out."""

    spell: Callable[[str], bytes] | None
    """Bytes of an ordinary piece; None where only the tokenizer library can tell, from the whole sequence."""

    byte_values: Mapping[int, int] = field(default_factory=dict)
    """The tokens that stand for a single byte, and which."""

    has_space_prefix: bool = False
    """Whether encoding puts a space before the text (and after each added token) that decoding takes away."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; nothing for an id without token, such as a padded row of the model."""
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if token_id in self.added_ids:
            return plain_bytes(piece)
        value = self.byte_values.get(token_id)
        if value is not None:
            return bytes((value,))
        return plain_bytes(piece) if self.spell is None else self.spell(piece)
