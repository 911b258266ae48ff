"""A grammar that begins when the model's reasoning ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from vkit.sequence import Grammar
from vkit.structured.vocabulary import GrammarVocabulary
from vkit.types import ReasoningMarks


class _Phase(Enum):
    UNDECIDED = auto()
    """Everything so far could be the beginning of the start mark."""
    REASONING = auto()
    ANSWER = auto()


class AfterReasoning:
    """Leaves the output free up to the end mark, then follows another grammar. Implements `vkit.sequence.Grammar`.

    The marks are looked for in the bytes of the output, so it does not matter how they fall into tokens. What follows
    the end mark inside the same token belongs to the answer, except blanks, which no grammar expects.
    """

    def __init__(self, grammar: Grammar, marks: ReasoningMarks, vocabulary: GrammarVocabulary) -> None:
        """Takes ownership of the grammar, which is at its start."""
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._start = marks.start.encode() if marks.start is not None else b""
        self._end = marks.end.encode()
        self._first_phase = _Phase.UNDECIDED if self._start else _Phase.REASONING
        self._phase = self._first_phase
        self._tail = b""
        """What was written of the start mark, or the last bytes of the reasoning."""
        self._history: list[tuple[_Phase, bytes, list[int]]] = []
        """Per token: phase and tail before it, and the tokens that the grammar was given for it."""
        self._taken_back: list[list[int]] | None = None
        """Per token before the one that began the reasoning: what the grammar had been given for it until then."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over the tokens; False when one of them is not allowed."""
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
        if num_tokens > len(self._history):
            raise ValueError(f"rollback: {num_tokens} tokens, but fewer were accepted")
        if not num_tokens:
            return
        undone = self._history[-num_tokens:]
        del self._history[-num_tokens:]
        self._phase, self._tail, _ = undone[0]
        if self._taken_back is not None and len(self._history) <= len(self._taken_back):
            self._give_answer_again(self._taken_back)
            return
        num_inner = sum(len(inner) for _, _, inner in undone)
        if num_inner:
            self._grammar.rollback(num_inner)

    def fill_bitmask(self, row: Any) -> None:
        """Write the allowed ids into an int32 numpy row: all of them while the model reasons."""
        if self._phase is _Phase.REASONING:
            row.fill(-1)
            return
        if self._phase is _Phase.ANSWER or not self._tail or self._answer_may_begin_with_tail():
            self._grammar.fill_bitmask(row)
        else:
            row.fill(0)
        if self._phase is _Phase.UNDECIDED:
            self._allow_start_mark(row)

    def is_terminated(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._phase is _Phase.ANSWER and self._grammar.is_terminated()

    def forced_token(self) -> int | None:
        """The one id that may follow, where that is certain and cheap to know."""
        return self._grammar.forced_token() if self._phase is _Phase.ANSWER else None

    def reset(self) -> None:
        """Return to the start."""
        self._grammar.reset()
        self._phase, self._tail = self._first_phase, b""
        self._history.clear()
        self._taken_back = None

    def _accept(self, token_id: int) -> bool:
        before, taken_back = (self._phase, self._tail), self._taken_back
        inner = self._advance(token_id)
        if inner is None:
            self._phase, self._tail = before
            if self._taken_back is not None and self._taken_back is not taken_back:
                self._give_answer_again(self._taken_back)
            return False
        self._history.append((*before, inner))
        return True

    def _advance(self, token_id: int) -> list[int] | None:
        """The tokens that the grammar took for this one; None when it is not allowed."""
        if self._phase is _Phase.ANSWER:
            return [token_id] if self._grammar.accept_tokens([token_id]) else None
        data = self._vocabulary.token_bytes[token_id] if 0 <= token_id < self._vocabulary.size else b""
        if self._phase is _Phase.REASONING:
            return self._reason(data)
        written = self._tail + data
        if data and self._start.startswith(written) and written != self._start:
            # Nothing is known yet. The grammar follows as far as it can, in case this is the answer.
            is_taken = self._answer_may_begin_with_tail() and self._grammar.accept_tokens([token_id])
            self._tail = written
            return [token_id] if is_taken else []
        if written.startswith(self._start):
            self._take_back_answer()
            self._phase, self._tail = _Phase.REASONING, b""
            return self._reason(written[len(self._start) :])
        may_go_on = self._answer_may_begin_with_tail()
        self._phase, self._tail = _Phase.ANSWER, b""
        return [token_id] if may_go_on and self._grammar.accept_tokens([token_id]) else None

    def _reason(self, data: bytes) -> list[int] | None:
        """Look for the end mark; what follows it is given to the grammar."""
        text = self._tail + data
        place = text.find(self._end)
        if place < 0:
            self._tail = text[max(0, len(text) - len(self._end) + 1) :]
            return []
        self._phase, self._tail = _Phase.ANSWER, b""
        answer = text[place + len(self._end) :].lstrip()
        if not answer:
            return []
        token_ids = self._vocabulary.spell(answer)
        num_valid = len(self._grammar.validate_tokens(token_ids))
        if num_valid < len(token_ids):
            return None
        self._grammar.accept_tokens(token_ids)
        return token_ids

    def _answer_may_begin_with_tail(self) -> bool:
        """Whether the grammar took every token so far."""
        return all(inner for _, _, inner in self._history)

    def _take_back_answer(self) -> None:
        """The output turned out to be reasoning: the grammar starts afresh."""
        self._grammar.reset()
        self._taken_back = [inner for _, _, inner in self._history]
        self._history = [(phase, tail, []) for phase, tail, _ in self._history]

    def _give_answer_again(self, taken_back: list[list[int]]) -> None:
        """The token that began the reasoning was undone: the grammar follows what is left, as it did before."""
        self._taken_back = None
        self._grammar.reset()
        self._history = [
            (phase, tail, inner) for (phase, tail, _), inner in zip(self._history, taken_back, strict=False)
        ]
        self._grammar.accept_tokens([token_id for _, _, inner in self._history for token_id in inner])

    def _allow_start_mark(self, row: Any) -> None:
        """Add the tokens that go on with the start mark."""
        rest = self._start[len(self._tail) :]
        bits = row.view(np.uint32)
        for token_id in self._vocabulary.tokens_towards(rest):
            if token_id < 32 * len(row):
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)
