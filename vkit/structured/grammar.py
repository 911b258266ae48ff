"""The grammar of one sequence, over a matcher of the llguidance library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vkit.structured.vocabulary import BACKSLASH, GrammarVocabulary, shown_to_library

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarError(Exception):
    """A grammar met a limit of its library while it was followed; only its own sequence is concerned."""


class TokenGrammar:
    """A grammar that the library follows as it is. Implements `vkit.sequence.Grammar`."""

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        """Takes ownership of the matcher."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._is_ended = False
        """Whether an end token was accepted. The library never sees those."""
        self._words = np.zeros(-(-vocabulary.num_library_tokens // 32), dtype=np.int32)

    @property
    def fault(self) -> str | None:
        """Which limit of the library this grammar has met, if any."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def fork(self) -> TokenGrammar:
        """An independent copy in the same state."""
        copy = type(self)(self._matcher.deep_copy(), self._vocabulary)
        copy._is_ended = self._is_ended
        return copy

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over the tokens; False at the first that is not allowed, which and after which nothing is taken."""
        return all(self._accept(token_id) for token_id in token_ids)

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that could be accepted; the state does not change."""
        valid: list[int] = []
        for token_id in token_ids:
            if not self._accept(token_id):
                break
            valid.append(token_id)
        self.rollback(len(valid))
        return valid

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._undo(num_tokens)

    def fill_bitmask(self, row: Any) -> None:
        """Write the allowed ids into an int32 numpy row of any width: bit i of word w is id 32 w + i.

        Raises:
            GrammarError: the grammar is too costly to follow from here.
        """
        row.fill(0)
        bits = row.view(np.uint32)
        if self.is_terminated():
            for token_id in self._vocabulary.end_ids:
                if token_id < 32 * len(row):
                    bits[token_id // 32] |= np.uint32(1 << token_id % 32)
            return
        words = self._mask()
        width = min(len(words), len(row))
        row[:width] = words[:width]
        last, bit = divmod(self._vocabulary.size, 32)
        if last < width:  # the library may know one token more than the vocabulary has
            bits[last] &= np.uint32((1 << bit) - 1)

    def is_terminated(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._is_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._is_ended or self._matcher.is_accepting()

    def forced_token(self) -> int | None:
        """The one id that may follow, where there is only one and the output may not end here; else None.

        The library spells text that is certain to follow with the tokenizer's own tokens, and its masks then hold the
        first of them alone: asking for those tokens costs less than a mask.
        """
        if self.is_terminated() or self._matcher.is_accepting():
            return None
        forced = self._matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def reset(self) -> None:
        """Return to the start."""
        self._is_ended = False
        self._matcher.reset()

    def _accept(self, token_id: int) -> bool:
        if self._is_ended or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.end_ids:
            self._is_ended = self.is_accepting()
            return self._is_ended
        return self._take(token_id)

    def _take(self, token_id: int) -> bool:
        """Advance over one token that is no end."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _undo(self, num_tokens: int) -> None:
        """Take back tokens that are no ends."""
        if not self._matcher.rollback(num_tokens):
            raise ValueError(f"rollback: {num_tokens} tokens, but fewer were accepted")

    def _mask(self) -> Any:
        """The words of the library's mask, of its own width; valid until the next call."""
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        return words


class JsonGrammar(TokenGrammar):
    """A grammar of JSON whose strings may write / as \\/.

    JSON allows that escape and the library does not. So the library is shown / wherever the output has \\/, and a
    backslash at the end of a token is held back until the next token says what it escapes.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        super().__init__(matcher, vocabulary)
        self._spelling = vocabulary.json
        self._is_holding = False
        self._taken: list[tuple[int, bool]] = []
        """Per token: how many the library was given for it, and whether a backslash was held before it."""

    def fork(self) -> JsonGrammar:
        """An independent copy in the same state."""
        copy = super().fork()
        assert isinstance(copy, JsonGrammar)
        copy._is_holding, copy._taken = self._is_holding, list(self._taken)
        return copy

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return not self._is_holding and super().is_accepting()

    def forced_token(self) -> int | None:
        """The one id that may follow, where that is certain and cheap to know."""
        return None if self._is_holding else super().forced_token()

    def reset(self) -> None:
        """Return to the start."""
        super().reset()
        self._is_holding = False
        self._taken.clear()

    def _take(self, token_id: int) -> bool:
        was_holding = self._is_holding
        data = self._vocabulary.token_bytes[token_id]
        if was_holding or BACKSLASH in data:
            shown, holds = shown_to_library(BACKSLASH + data if was_holding else data)
        else:
            shown, holds = data, False
        token_ids = [token_id] if not (was_holding or holds) else self._spelling.spell(shown)
        if token_ids is None or not self._consume(token_ids, holds):
            return False
        self._is_holding = holds
        self._taken.append((len(token_ids), was_holding))
        return True

    def _consume(self, token_ids: list[int], holds: bool) -> bool:
        """Give the library tokens; all, or none when one of them or a backslash held after them is not allowed."""
        matcher = self._matcher
        if holds and matcher.validate_tokens([*token_ids, self._spelling.backslash_id]) != len(token_ids) + 1:
            return False
        num_taken = matcher.try_consume_tokens(token_ids) if token_ids else 0
        if num_taken == len(token_ids):
            return True
        if num_taken:
            matcher.rollback(num_taken)
        return False

    def _undo(self, num_tokens: int) -> None:
        if num_tokens > len(self._taken):
            raise ValueError(f"rollback: {num_tokens} tokens, but fewer were accepted")
        undone = self._taken[-num_tokens:]
        del self._taken[-num_tokens:]
        self._is_holding = undone[0][1]
        num_inner = sum(count for count, _ in undone)
        if num_inner:
            super()._undo(num_inner)

    def _mask(self) -> Any:
        if not self._is_holding:
            return super()._mask()
        slashes = super()._mask() & self._spelling.slash_words
        self._matcher.try_consume_tokens([self._spelling.backslash_id])
        try:
            return super()._mask() | slashes
        finally:
            self._matcher.rollback(1)
