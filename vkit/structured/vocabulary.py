"""A tokenizer as the grammar library wants to see it: the bytes of every token, and a way to spell forced text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vkit.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLTokenizer

BACKSLASH = b"\\"
CONTROL_MARK = b"\xff"
"""No UTF-8 text holds this byte: a token whose bytes begin with it is never text."""


class TokenSource(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens: their text is not part of the output."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""


class GrammarVocabulary:
    """The tokens of one model. Safe to use from several threads once made."""

    def __init__(self, tokenizer: TokenSource, end_ids: Collection[int]) -> None:
        """`end_ids`: the tokens that end an output, allowed wherever a grammar may stop.

        Raises:
            InvalidRequest: the tokens have no bytes of their own, so no grammar can be followed.
        """
        self.size = tokenizer.vocab_size
        self.special_ids = frozenset(tokenizer.special_ids)
        self.end_ids = frozenset(end_ids)
        self._tokenizer = tokenizer
        self.token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(self.size)]
        if getattr(tokenizer, "sequence_decoder", None) is not None or not any(self.token_bytes):
            raise InvalidRequest(
                "structured_outputs: this model's tokens have no bytes of their own: its output cannot be constrained",
                param="structured_outputs",
            )
        self._by_bytes = {
            data: token_id
            for token_id, data in reversed(list(enumerate(self.token_bytes)))
            if data and token_id not in self.special_ids
        }
        self._longest = max(map(len, self._by_bytes), default=1)
        self._towards: dict[bytes, list[int]] = {}
        self.special_texts = {
            self.token_bytes[token_id].decode("utf-8", "replace"): token_id
            for token_id in sorted(self.special_ids)
            if self.token_bytes[token_id]
        }
        """Text of each control token -> its id."""

    @property
    def num_library_tokens(self) -> int:
        """Tokens the library is told of: one more than there are when none of them ends an output."""
        return self.size + (not self._ends)

    @property
    def _ends(self) -> list[int]:
        return sorted(token_id for token_id in self.end_ids if 0 <= token_id < self.size)

    @cached_property
    def json(self) -> JsonSpelling:
        """How tokens are shown to grammars of JSON."""
        return JsonSpelling(self)

    @cached_property
    def for_text(self) -> LLTokenizer:
        """The library's view of the tokens."""
        return self._to_llguidance(self.token_bytes)

    @cached_property
    def for_json(self) -> LLTokenizer:
        """The library's view of the tokens in grammars of JSON."""
        return self._to_llguidance(self.json.shown)

    def tokens_towards(self, text: bytes) -> list[int]:
        """Tokens, control tokens too, whose bytes begin `text` or begin with all of it."""
        found = self._towards.get(text)
        if found is None:
            found = self._towards[text] = [
                token_id
                for token_id, data in enumerate(self.token_bytes)
                if data and (text.startswith(data) or data.startswith(text)) and token_id not in self.end_ids
            ]
        return found

    def spell(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes join to exactly `text`: the tokenizer's own choice, or the longest match where it adds a
        space or cannot say."""
        data = text.encode() if isinstance(text, str) else text
        try:
            string = data.decode("utf-8")
        except UnicodeDecodeError:
            return self._longest_match(data)
        # Added tokens count as text unless they are control tokens: a model writes <tool_call> as the one token it is.
        for parse_special in (True, False):
            token_ids = self._tokenizer.encode(string, add_special_tokens=False, parse_special=parse_special)
            if self._spells(token_ids, data):
                return token_ids
        # Vocabularies that put a space before a text do so once: after a line break the rest is spelt as in the middle.
        token_ids = self._tokenizer.encode("\n" + string, add_special_tokens=False)
        lead = b"\n" if not token_ids or self.token_bytes[token_ids[0]][:1] == b"\n" else b" \n"
        while token_ids and lead and lead.startswith(self.token_bytes[token_ids[0]]):
            lead = lead[len(self.token_bytes[token_ids.pop(0)]) :]
        return token_ids if not lead and self._spells(token_ids, data) else self._longest_match(data)

    def _to_llguidance(self, shown: list[bytes]) -> LLTokenizer:
        import llguidance

        tokens = list(shown)
        for token_id in self.special_ids:
            tokens[token_id] = CONTROL_MARK + (self.token_bytes[token_id] or b"<%d>" % token_id)
        ends = self._ends
        if not ends:  # the library wants one
            ends = [len(tokens)]
            tokens.append(CONTROL_MARK + b"<end>")
        wrapper = llguidance.TokenizerWrapper(_Spelling(self, tokens, ends[0]))
        return llguidance.LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends)

    def _spells(self, token_ids: list[int], data: bytes) -> bool:
        return self.special_ids.isdisjoint(token_ids) and b"".join(map(self.token_bytes.__getitem__, token_ids)) == data

    def _longest_match(self, data: bytes) -> list[int]:
        """Greedy spelling; stops where no token goes on."""
        return longest_match(data, self._by_bytes, self._longest)


def longest_match(data: bytes, by_bytes: Mapping[bytes, int], longest: int) -> list[int]:
    """Tokens that spell `data`, the longest first at each place; stops where none goes on."""
    token_ids: list[int] = []
    start = 0
    while start < len(data):
        for end in range(min(len(data), start + longest), start, -1):
            token_id = by_bytes.get(data[start:end])
            if token_id is not None:
                token_ids.append(token_id)
                start = end
                break
        else:
            break
    return token_ids


class JsonSpelling:
    """The tokens as grammars of JSON are shown them: with / for the escape \\/ (see `vkit.structured.grammar`)."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.shown = list(vocabulary.token_bytes)
        words = np.zeros(-(-vocabulary.num_library_tokens // 32), dtype=np.uint32)
        self._by_bytes: dict[bytes, int] = {}
        for token_id, data in enumerate(vocabulary.token_bytes):
            if token_id in vocabulary.special_ids or not data:
                continue
            if data.startswith(b"/"):
                words[token_id // 32] |= np.uint32(1 << token_id % 32)
            if b"\\/" in data:
                self.shown[token_id] = without_escaped_slashes(data)
            if self.shown[token_id] == data:
                self._by_bytes.setdefault(data, token_id)
        self.slash_words = words.view(np.int32)
        """Bitmask of the tokens that begin with /."""
        self._longest = max(map(len, self._by_bytes), default=1)
        self.backslash_id = self._by_bytes.get(BACKSLASH, -1)
        """The token that is a lone backslash; -1 if there is none."""

    def spell(self, data: bytes) -> list[int] | None:
        """Tokens shown as exactly these bytes, or None where there are none."""
        token_ids = longest_match(data, self._by_bytes, self._longest)
        return token_ids if b"".join(map(self.shown.__getitem__, token_ids)) == data else None


def shown_to_library(data: bytes) -> tuple[bytes, bool]:
    """(JSON string content with every \\/ written as /, whether a backslash that escapes something to come was cut)."""
    shown = bytearray()
    index = 0
    while index < len(data):
        size = 2 if data[index : index + 1] == BACKSLASH else 1
        piece = data[index : index + size]
        if piece == BACKSLASH:
            return bytes(shown), True
        shown += b"/" if piece == b"\\/" else piece
        index += size
    return bytes(shown), False


def without_escaped_slashes(data: bytes) -> bytes:
    """The bytes with every \\/ written as /; a backslash at the end stays."""
    shown, is_cut = shown_to_library(data)
    return shown + BACKSLASH if is_cut else shown


class _Spelling:
    """What the library asks of a tokenizer; the attribute names are its own."""

    def __init__(self, vocabulary: GrammarVocabulary, tokens: list[bytes], end_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._spell = vocabulary.spell

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spell(text)
