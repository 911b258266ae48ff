"""What was said in earlier answers, indexed by its last few tokens, in bounded memory. No model, no torch.

Answers lie one after the other in a ring of tokens, each after a mark that equals no token. Every place is linked with
the latest earlier one whose last few tokens have the same hash, as in a Lempel-Ziv coder, so that adding a token and
forgetting one cost the same however many are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 20
"""Tokens kept of all answers: a power of two. With their links some 40 bytes each, taken as they come."""
ANCHORS = (8, 3)
"""Numbers of last tokens that are hashed, longest first: the long one finds what many short matches would hide."""
MAX_PLACES = 32
"""Latest places looked at for each of them."""
_MARK = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class EarlierOutputs:
    """Finds where the tokens that a text ends with were said before."""

    def __init__(self, max_outputs: int, longest: int, max_tokens: int = MAX_TOKENS) -> None:
        """An index of up to `max_outputs` answers that tells matches of up to `longest` tokens apart."""
        self._max_outputs, self._longest = max_outputs, longest
        self._anchors = sorted({min(anchor, longest) for anchor in ANCHORS}, reverse=True)
        self._mask = max_tokens - 1
        assert max_tokens & self._mask == 0, "positions are cut to places by a mask"
        # Pages of zeros take no memory before they are written.
        self._tokens = np.zeros(max_tokens, np.int64)
        self._previous = {anchor: np.zeros(max_tokens, np.int64) for anchor in self._anchors}
        self._latest = {anchor: np.zeros(max_tokens, np.int64) for anchor in self._anchors}
        """By hash: the latest position; 0 where there is none, as positions begin at 1."""
        self._shift = np.uint64(64 - max_tokens.bit_length() + 1)
        self._starts: deque[int] = deque()
        self._oldest = self._end = 1
        """Positions that are kept: from the oldest up to the end, which is the next one's."""

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes held when full, whatever was added."""
        links = [*self._previous.values(), *self._latest.values()]
        return self._tokens.nbytes + sum(array.nbytes for array in links)

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep an answer; the oldest go. Of one that is longer than half of the ring, its end is kept."""
        if not token_ids or not self._max_outputs:
            return
        new = np.array([_MARK, *token_ids[-(len(self._tokens) // 2) :]], np.int64)
        self._starts.append(self._end)
        first, self._end = self._end, self._end + len(new)
        while len(self._starts) > self._max_outputs or self._starts[0] <= self._end - len(self._tokens):
            self._starts.popleft()
        self._oldest = self._starts[0]
        self._tokens[np.arange(first, self._end) & self._mask] = new
        for anchor in self._anchors:
            self._link(anchor, first + anchor, new[1:])

    def _link(self, anchor: int, position: int, token_ids: NDArray[np.int64]) -> None:
        """Link the places of an answer, of which the first with `anchor` tokens up to it is at `position`."""
        hashes = self._hashes(token_ids, anchor)
        if not len(hashes):
            return
        order = np.argsort(hashes, kind="stable")
        hashes, positions = hashes[order], position + order
        is_same = hashes[1:] == hashes[:-1]
        links = self._latest[anchor][hashes]
        links[1:][is_same] = positions[:-1][is_same]
        self._previous[anchor][positions & self._mask] = links
        is_last = np.append(~is_same, True)
        self._latest[anchor][hashes[is_last]] = positions[is_last]

    def _hashes(self, token_ids: NDArray[np.int64], anchor: int) -> NDArray[np.int64]:
        """Hash of each run of that many tokens, by its end."""
        count = max(0, len(token_ids) - anchor + 1)
        found = np.zeros(count, np.uint64)
        for place in range(anchor if count else 0):
            found = (found + token_ids[place : place + count].astype(np.uint64)) * _FACTOR
        return (found >> self._shift).astype(np.int64)

    def find(self, tail: NDArray[np.int64], shortest: int, num_wanted: int) -> tuple[int, list[list[int]]]:
        """Length of the longest match of the tail's end, and what followed: rows of that many, latest first.

        Rows are those of the latest matches of that length; -1 stands after the end of an answer. Length 0 and no rows
        where no match is as long as `shortest` and as the shortest run that is hashed.
        """
        for anchor in self._anchors:
            if len(tail) < anchor:
                continue
            ends = self._places(tail, anchor)
            if len(ends):
                lengths = self._lengths(tail, ends)
                length = int(lengths.max())
                if length >= max(shortest, anchor):
                    after = ends[lengths == length][:, None] + np.arange(1, num_wanted + 1)
                    rows = np.where(after < self._end, self._tokens[after & self._mask], _MARK)
                    return length, rows.tolist()
            if anchor <= shortest:
                break  # what a shorter run finds beside these is too short
        return 0, []

    def _places(self, tail: NDArray[np.int64], anchor: int) -> NDArray[np.int64]:
        """Positions whose last `anchor` tokens may be those of the tail, latest first."""
        found: list[int] = []
        previous = self._previous[anchor]
        position = int(self._latest[anchor][self._hashes(tail[-anchor:], anchor)[0]])
        while position >= self._oldest and len(found) < MAX_PLACES:
            found.append(position)
            position = int(previous[position & self._mask])
        return np.array(found, np.int64)

    def _lengths(self, tail: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens up to each position equal the tail's last ones."""
        reach = np.arange(min(self._longest, len(tail)))
        before = ends[:, None] - reach
        is_same = (self._tokens[before & self._mask] == tail[::-1][reach]) & (before >= self._oldest)
        lengths: NDArray[np.int64] = np.logical_and.accumulate(is_same, axis=1).sum(axis=1)
        return lengths
