"""How drafts fared since an engine began. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from vkit.metrics import DraftCounters


@dataclass(slots=True)
class DraftStats:
    """Counts over all sequences."""

    max_drafts: int
    num_drafts: int = 0
    """Verifications: a sequence with drafts in a step counts once."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    _reported: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.accepted_per_position = [0] * self.max_drafts

    def book(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verification."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def publish(self, counters: DraftCounters) -> None:
        """Bring the metrics up to date."""
        counters.drafts.value = self.num_drafts
        counters.draft_tokens.value = self.num_draft_tokens
        counters.accepted_tokens.value = self.num_accepted_tokens
        for position, count in enumerate(self.accepted_per_position):
            counters.accepted_per_position.by_label[str(position)] = count

    def take_report(self) -> str | None:
        """A line on what was verified since the last one; None where nothing was."""
        counts = (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens)
        drafts, tokens, accepted = (new - old for new, old in zip(counts, self._reported, strict=True))
        self._reported = counts
        if not drafts:
            return None
        return (
            f"speculation: {accepted} drafts accepted of {tokens} ({100 * accepted / tokens:.1f} %),"
            f" mean acceptance length {1 + accepted / drafts:.2f}"
        )
