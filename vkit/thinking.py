"""How long a model may reason: tokens between the marks are counted, and at the limit the end mark is forced.

Leaves all tensors to the caller. Marks are looked for in the bytes of the output, so it does not matter how they fall
into tokens; the end mark is forced as the tokenizer spells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from vkit.errors import InvalidRequest
from vkit.types import ReasoningMarks


class TokenSpelling(Protocol):
    """The part of a tokenizer that a budget needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on one request's reasoning. Shared by its sequences, each of which counts for itself."""

    limit: int
    """Most tokens between the marks."""
    marks: ReasoningMarks
    end_token_ids: tuple[int, ...]
    """What is forced."""
    tokenizer: TokenSpelling


def thinking_budget(limit: int, marks: ReasoningMarks, tokenizer: TokenSpelling) -> ThinkingBudget:
    """The budget, once it is clear that the end mark can be forced.

    Raises:
        InvalidRequest: the tokenizer cannot spell the end mark.
    """
    token_ids = tuple(tokenizer.encode(marks.end, add_special_tokens=False, parse_special=True))
    if marks.end.encode() not in b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids):
        raise InvalidRequest(
            f"thinking_token_budget: this model's tokens cannot spell {marks.end!r}, which ends reasoning",
            param="thinking_token_budget",
        )
    return ThinkingBudget(limit, marks, token_ids, tokenizer)


class _Phase(Enum):
    UNDECIDED = auto()
    """Reasoning has not begun, and still may."""
    REASONING = auto()
    ENDED = auto()


class ThinkingCounter:
    """Follows one output and says when the end of reasoning is due. Reads each token once."""

    def __init__(self, budget: ThinkingBudget, output: Sequence[int]) -> None:
        """`output` grows; nothing is ever taken from it."""
        self._budget = budget
        self._output = output
        self._start = (budget.marks.start or "").encode()
        self._repeated = (budget.marks.repeated or "").encode()
        self._end = budget.marks.end.encode()
        self._phase = _Phase.UNDECIDED if self._start else _Phase.REASONING
        self._num_read = 0
        self._num_thoughts = 0
        self._first_thought = 0
        """Place of the first token of reasoning in the output."""
        self._head: bytes | None = b""
        """Bytes so far, while they may be the beginning of the start mark."""
        self._tail = b""
        """The last bytes of the reasoning, which may be the beginning of the end mark."""

    def forced_id(self) -> int | None:
        """The token that has to come next; None while the model may choose."""
        for position in range(self._num_read, len(self._output)):
            self._read(self._budget.tokenizer.token_bytes(self._output[position]), position)
        self._num_read = len(self._output)
        if self._phase is not _Phase.REASONING or self._num_thoughts < self._budget.limit:
            return None
        return self._budget.end_token_ids[self._num_written()]

    def _num_written(self) -> int:
        """How many tokens of the end mark the output ends with."""
        end = self._budget.end_token_ids
        most = min(len(end) - 1, len(self._output) - self._first_thought)
        for num in range(most, 0, -1):
            if tuple(self._output[len(self._output) - num :]) == end[:num]:
                return num
        return 0

    def _read(self, data: bytes, position: int) -> None:
        if self._phase is _Phase.UNDECIDED:
            self._look_for_start(data, position)
        elif self._phase is _Phase.REASONING:
            self._num_thoughts += 1
            if self._head is not None and self._repeated:
                self._skip_repeated(data, position)
            self._look_for_end(data)

    def _look_for_start(self, data: bytes, position: int) -> None:
        head = (self._head or b"") + data
        if self._budget.marks.may_start_late:
            place = head.find(self._start)
            self._head = head[max(0, len(head) - len(self._start) + 1) :]
        else:
            head = head.lstrip()
            place = 0 if head.startswith(self._start) else -1
            self._head = head
            if place < 0 and not self._start.startswith(head):
                self._phase = _Phase.ENDED
        if place >= 0:
            self._begin(head[place + len(self._start) :], position)

    def _begin(self, thoughts: bytes, position: int) -> None:
        """Reasoning began in this token; `thoughts` is what of it came after the mark."""
        self._phase = _Phase.REASONING
        self._head = None
        self._num_thoughts = bool(thoughts)
        self._first_thought = position + (not thoughts)
        self._tail = b""
        self._look_for_end(thoughts)

    def _skip_repeated(self, data: bytes, position: int) -> None:
        """A start mark at the head of reasoning that had begun without it is no thought."""
        head = (self._head or b"") + data
        written = head.lstrip()
        self._head = head if self._repeated.startswith(written) and written != self._repeated else None
        if written.startswith(self._repeated):
            self._num_thoughts = int(written != self._repeated)
            self._first_thought = position + (written == self._repeated)

    def _look_for_end(self, data: bytes) -> None:
        text = self._tail + data
        if self._end in text:
            self._phase = _Phase.ENDED
        self._tail = text[max(0, len(text) - len(self._end) + 1) :]
