"""Prompt lookup: what followed the last few tokens where they occurred before. No model, no torch.

Source: Saxena 2023, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vkit.sequence import Plan, Sequence, StepSamples
from vkit.speculation.pace import Pace
from vkit.speculation.proposer import Drafts


class NgramIndex:
    """Finds the earliest occurrence of the longest n-gram that the tokens end with.

    For every position it keeps how many tokens up to there equal the last ones of the whole text (at most the longest
    n-gram). A new token lengthens those matches that it continues and ends the others: one pass per token, whatever the
    length of n-grams.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens = np.zeros(256, np.int64)
        self._matches = np.zeros(257, np.int32)
        """[i + 1]: tokens up to position i that equal the last ones; [0] is 0 and stays so."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens."""
        first, count = self._count, self._count + len(token_ids)
        if count > len(self._tokens):
            size = max(count, 2 * len(self._tokens))
            self._tokens = np.concatenate([self._tokens[:first], np.zeros(size - first, np.int64)])
            self._matches = np.concatenate([self._matches[: first + 1], np.zeros(size - first, np.int32)])
        self._tokens[first:count] = token_ids
        if count - first > self._longest:  # matches are no longer than what is looked at
            first = count - self._longest
            self._matches[:] = 0
        for end in range(first, count):
            self._append(end)
        self._count = count

    def _append(self, end: int) -> None:
        """Bring the matches from the text before `end` to the text that includes it."""
        same = self._tokens[:end] == self._tokens[end]
        longer = np.minimum(self._matches[:end] + 1, self._longest)
        np.multiply(longer, same, out=self._matches[1 : end + 1])

    def follow(self, num_wanted: int) -> list[int]:
        """Up to that many tokens that followed the n-gram; none where no n-gram long enough occurred before."""
        if self._count < 2 or num_wanted < 1:
            return []
        # The last position is the n-gram itself.
        matches = self._matches[1 : self._count]
        place = int(matches.argmax())
        if matches[place] < self._shortest:
            return []
        found: list[int] = self._tokens[place + 1 : min(self._count, place + 1 + num_wanted)].tolist()
        return found

    def tail(self, num_wanted: int) -> NDArray[np.int64]:
        """The last tokens, at most that many."""
        return self._tokens[max(0, self._count - num_wanted) : self._count]

    def find(self, shortest: int, num_wanted: int, max_places: int) -> tuple[int, list[list[int]]]:
        """Length of the longest match of the text's end, and what followed: rows of that many, latest first.

        Rows are those of the latest matches of that length; -1 stands after the end of the text. Length 0 and no rows
        where no match is as long as `shortest`.
        """
        matches = self._matches[1 : self._count]
        length = int(matches.max(initial=0))
        if length < shortest:
            return 0, []
        ends = np.flatnonzero(matches == length)[: -max_places - 1 : -1]
        after = ends[:, None] + np.arange(1, num_wanted + 1)
        known = self._tokens[np.minimum(after, self._count - 1)]
        rows: list[list[int]] = np.where(after < self._count, known, -1).tolist()
        return length, rows


@dataclass(slots=True)
class _Followed:
    """One sequence."""

    index: NgramIndex
    pace: Pace


@dataclass(slots=True)
class NgramProposer:
    """Drafts from each sequence's own tokens."""

    max_drafts: int
    shortest: int
    longest: int
    num_lookahead: int = 0
    needs_hidden_states: bool = False
    _followed: dict[str, _Followed] = field(default_factory=dict)

    def observe(self, plan: Plan, samples: StepSamples) -> None:
        """Nothing: tokens are read once they are booked."""

    def propose(self, sequence: Sequence) -> Drafts:
        """What followed the longest n-gram at the sequence's end, where it occurred first."""
        followed = self._followed.get(sequence.id)
        if followed is None:
            followed = _Followed(NgramIndex(self.shortest, self.longest), Pace(self.max_drafts))
            self._followed[sequence.id] = followed
        num_wanted = followed.pace.num_drafts(len(sequence.token_ids))
        if not num_wanted:
            return Drafts()
        followed.index.extend(sequence.token_ids[len(followed.index) :])
        return Drafts(followed.index.follow(num_wanted))

    def book(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Adapt the sequence's pace."""
        followed = self._followed.get(sequence.id)
        if followed is not None:
            followed.pace.book(len(sequence.token_ids), num_drafts, num_accepted)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Drop the indices of sequences that ended."""
        for sequence_id in sequence_ids:
            self._followed.pop(sequence_id, None)
