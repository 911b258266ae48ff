"""What drafts tokens: one protocol for all ways of it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from vkit.sequence import Plan, Sequence, StepSamples


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses at the tokens that follow a sequence."""

    token_ids: list[int] = field(default_factory=list)
    probs: Any = None
    """What each was drawn from, a float32 tensor (drafts, V); None where nothing was drawn."""


class Proposer(Protocol):
    """Guesses at what follows. What it says never changes an output, only how many steps that takes."""

    @property
    def max_drafts(self) -> int:
        """Most drafts for one sequence."""

    @property
    def num_lookahead(self) -> int:
        """Cache slots it writes beyond the tokens of a step."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether it needs what the model made of the tokens before: the last cached block is then computed again."""

    def observe(self, plan: Plan, samples: StepSamples) -> None:
        """Take in a step that was run and sampled and is not booked yet: its sequences still own their blocks."""

    def propose(self, sequence: Sequence) -> Drafts:
        """Drafts for a sequence that was booked and goes on; none where nothing seems likely."""

    def book(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn how drafts fared."""

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Drop what is kept for sequences that ended."""
