"""Token ids to text, piece by piece.

At any time the pieces handed out, joined, are the beginning of what decoding everything at once would give. Bytes that
may still become a character are held back; U+FFFD is handed out only for bytes that nothing can complete any more, so
nothing is ever taken back. Costs the same per token however long the text is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from vkit.text.tokenizer import SequenceDecoder, Tokenizer

NUM_CONTEXT_TOKENS = 5
"""How many tokens of the prompt the fallback looks at; enough for every rule about a leading space."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence's output, whose prompt is known but not repeated.

    The prompt matters for one thing: a vocabulary that begins every text with a space of its own begins no second
    text after a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """See `Tokenizer.decode` for the two flags."""
        vocabulary = tokenizer.vocabulary
        self._texts = tokenizer.texts
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = _new_decoder("replace")
        self._is_partial = False
        self._library: _LibraryStream | None = None
        if tokenizer.sequence_decoder is not None:
            self._library = _LibraryStream(tokenizer.sequence_decoder, prompt_token_ids, skip_special_tokens)
        # Tokens after which the encoder puts a space of its own, to be taken away again.
        drops_after_added = not (skip_special_tokens or spaces_between_special_tokens)
        self._drops_space_after = frozenset[int]()
        self._is_space_due = False
        if vocabulary.has_space_prefix:
            if drops_after_added:
                self._drops_space_after = vocabulary.added_ids
            self._is_space_due = self._ends_where_space_is_due(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that becomes final with this token; often one token's text, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        if self._library is not None:
            return self._library.push(token_id)
        text = self._texts[token_id]
        if self._is_partial or self._is_space_due or not isinstance(text, str):
            return self._push_bytes(text if isinstance(text, bytes) else text.encode("utf-8"), token_id)
        if token_id in self._drops_space_after:
            self._is_space_due = True
        return text

    def extend(self, token_ids: Iterable[int]) -> str:
        """The text that becomes final with these tokens."""
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """What was held back; a character that never became whole comes out as one U+FFFD."""
        if self._library is not None:
            return self._library.finish()
        self._is_partial = False
        return self._utf8.decode(b"", final=True)

    def _push_bytes(self, data: bytes, token_id: int) -> str:
        if self._is_space_due and data:
            data = data.removeprefix(b" ")
            self._is_space_due = False
        if token_id in self._drops_space_after:
            self._is_space_due = True
        text = self._utf8.decode(data)
        self._is_partial = bool(self._utf8.getstate()[0])
        return text

    def _ends_where_space_is_due(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a token after the prompt would be the first visible one, or the first after an added token."""
        for token_id in reversed(prompt_token_ids):
            if token_id in self._drops_space_after:
                return True
            if token_id not in self._skipped and self._texts[token_id]:
                return False
        return True


class _LibraryStream:
    """Text of a sequence by decoding its last few tokens again, where tokens have no text of their own.

    Two offsets into the token list: what lies before `_read` has been handed out, and decoding starts at `_prefix`, so
    that the first of the new tokens does not count as the first of a text.
    """

    def __init__(self, decoder: SequenceDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._token_ids)

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self._advance(is_last=False)

    def finish(self) -> str:
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        old = self._decoder.decode(self._token_ids[self._prefix : self._read], self._skip)
        new = self._decoder.decode(self._token_ids[self._prefix :], self._skip)
        if len(new) <= len(old) or (new.endswith("\ufffd") and not is_last):
            return ""
        # What lies before the new prefix is never looked at again.
        self._token_ids = self._token_ids[self._read :]
        self._prefix, self._read = 0, len(self._token_ids)
        return new[len(old) :]
