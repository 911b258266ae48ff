"""Suffix decoding: the likeliest continuation of a text's longest suffix that was said before. No model, no torch.

What a suffix tree over the request's own tokens and over earlier answers would say, asked of two indices that need no
tree: occurrences of the suffix are the tree's node, and what followed them are the counts of its children.

Source: Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vkit.sequence import Plan, Sequence, StepSamples
from vkit.speculation.earlier import EarlierOutputs
from vkit.speculation.ngram import NgramIndex
from vkit.speculation.pace import Pace
from vkit.speculation.proposer import Drafts
from vkit.speculative_config import SuffixSettings

MAX_OWN_PLACES = 64
"""Latest occurrences in a request's own tokens that have a say."""
SHORTEST_MATCH = 3
"""Tokens: of 46 drafts after one token 1 was right, of 86 after two in prose 15 (SmolLM2-135M)."""


def likeliest(rows: list[list[int]], max_drafts: int, min_prob: float) -> tuple[list[int], float]:
    """The path that most rows take, and how many of its tokens are expected to stand.

    The probability of a token is the share of all rows that agree up to it; the path ends before one below `min_prob`.
    Among equals the row that stands first decides. -1 ends a row.
    """
    found: list[int] = []
    expected = 0.0
    num_rows = len(rows)
    for place in range(max_drafts):
        counts = Counter(row[place] for row in rows)
        counts.pop(-1, None)
        if not counts:
            break
        token_id, count = counts.most_common(1)[0]
        if count < min_prob * num_rows:
            break
        found.append(token_id)
        expected += count / num_rows
        rows = [row for row in rows if row[place] == token_id]
    return found, expected


@dataclass(slots=True)
class _Followed:
    """One sequence."""

    sequence: Sequence
    index: NgramIndex
    pace: Pace
    length: int = 0
    """Of the match that the last drafts came from."""
    failed_length: int = 0
    """Longest match that misled since drafts stood last."""


@dataclass(slots=True)
class SuffixProposer:
    """Drafts from each sequence's own tokens and from the outputs of those that ended."""

    max_drafts: int
    settings: SuffixSettings
    num_lookahead: int = 0
    needs_hidden_states: bool = False
    shortest: int = field(init=False)
    longest: int = field(init=False)
    """Longest match told apart: a longer one would leave the tree no depth for as many drafts."""
    earlier: EarlierOutputs = field(init=False)
    _followed: dict[str, _Followed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        depth, factor = self.settings.max_tree_depth, self.settings.max_spec_factor
        self.max_drafts = min(self.max_drafts, depth - 1)
        # Drafts are at most factor * match and depth - match: most where both are one.
        self.longest = max(1, depth - min(self.max_drafts, int(depth * factor / (1 + factor))))
        self.shortest = min(SHORTEST_MATCH, self.longest)
        self.earlier = EarlierOutputs(self.settings.max_cached_requests, self.longest)

    def observe(self, plan: Plan, samples: StepSamples) -> None:
        """Nothing: tokens are read once they are booked."""

    def propose(self, sequence: Sequence) -> Drafts:
        """What most likely follows the sequence's longest suffix that occurred before."""
        followed = self._followed.get(sequence.id)
        if followed is None:
            followed = _Followed(sequence, NgramIndex(1, self.longest), Pace(self.max_drafts))
            self._followed[sequence.id] = followed
        num_wanted, shortest = followed.pace.num_drafts(len(sequence.token_ids)), self.shortest
        if not num_wanted:
            # After misses only a match far longer than those that misled is worth a guess.
            num_wanted, shortest = followed.pace.width, 2 * followed.failed_length
            if shortest > self.longest:
                return Drafts()
        followed.index.extend(sequence.token_ids[len(followed.index) :])
        return Drafts(self._draft(followed, shortest, num_wanted))

    def _draft(self, followed: _Followed, shortest: int, num_wanted: int) -> list[int]:
        """The likelier of what the own tokens and earlier outputs say."""
        index = followed.index
        found = [index.find(shortest, num_wanted, MAX_OWN_PLACES)]
        if len(self.earlier) and followed.sequence.cache_salt is None:
            found.append(self.earlier.find(index.tail(self.longest), shortest, num_wanted))
        best: list[int] = []
        most = 0.0
        for length, rows in found:
            room = min(num_wanted, int(self.settings.max_spec_factor * length), self.settings.max_tree_depth - length)
            token_ids, expected = likeliest(rows, room, self.settings.min_token_prob)
            if expected > most:
                best, most, followed.length = token_ids, expected, length
        return best

    def book(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Adapt the sequence's pace."""
        followed = self._followed.get(sequence.id)
        if followed is not None:
            followed.pace.book(len(sequence.token_ids), num_drafts, num_accepted)
            followed.failed_length = 0 if num_accepted else max(followed.failed_length, followed.length)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Drop the indices of sequences that ended; their outputs are kept, unless they are a tenant's own."""
        for sequence_id in sequence_ids:
            followed = self._followed.pop(sequence_id, None)
            if followed is not None and followed.sequence.cache_salt is None:
                sequence = followed.sequence
                self.earlier.add(sequence.token_ids[sequence.num_prompt_tokens :])
