"""How many drafts a sequence is worth right now. No torch.

A verified token costs a fraction of a step and a wrong one gains nothing, so a drafter whose guesses come free widens
while they are right and sits out longer and longer while they are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WIDTH = 3
"""Drafts to begin with: with the sampled token a tile of four rows, which costs little more than one row."""
LONGEST_WAIT = 64
"""Tokens: what a wrong guess costs is then below one percent of the time between two of them."""


@dataclass(slots=True)
class Pace:
    """The width and the waiting of one sequence."""

    max_drafts: int
    width: int = 0
    num_misses: int = 0
    """Verifications in a row in which nothing was right."""
    silent_until: int = 0
    """Number of tokens below which nothing is drafted."""

    def __post_init__(self) -> None:
        self.width = min(FIRST_WIDTH, self.max_drafts)

    def num_drafts(self, num_tokens: int) -> int:
        """Drafts to propose to a sequence of this many tokens."""
        return self.width if num_tokens >= self.silent_until else 0

    def book(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verification that left the sequence with `num_tokens` tokens."""
        if num_accepted == 0:
            self.num_misses += 1
            self.width = min(FIRST_WIDTH, self.max_drafts)
            self.silent_until = num_tokens + min(LONGEST_WAIT, 2**self.num_misses)
            return
        self.silent_until = 0
        self.num_misses = 0 if 2 * num_accepted >= num_drafts else max(0, self.num_misses - 1)
        if num_accepted == num_drafts:
            self.width = min(self.max_drafts, 2 * self.width)
        elif num_drafts > FIRST_WIDTH:
            self.width = max(FIRST_WIDTH, num_accepted)
