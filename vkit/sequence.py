"""Host state of one running sequence, and the plan of one step. No torch, no text.

A sequence is one output of one request: a request with n outputs makes n sequences. Prefill, chunked prefill, decode,
verification and resumption are one operation: a step gives a sequence some tokens so that `num_computed_tokens`
catches up with `num_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from vkit.types import FinishReason, SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    WAITING_FOR_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence inside the engine core."""

    id: str
    """Unique inside the engine; the caller's own id lives in the front end."""
    token_ids: list[int]
    """Prompt, then output; grows by append only (a placeholder is never stored here)."""
    num_prompt_tokens: int
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end generation unless params.ignore_eos."""
    max_total_tokens: int = 0
    """Prompt plus output may not exceed this (max_model_len and max_tokens already applied)."""
    cache_salt: str | None = None

    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose cache entries exist or are planned; advances when the plan is made."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    num_output_placeholders: int = 0
    """Sampled positions whose token id has not come back yet (asynchronous scheduling)."""
    draft_token_ids: list[int] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)
    """One block table per cache group."""
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of one step: positions start .. start + num_tokens - 1."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    """Logits rows wanted, for the last `num_logits` of the positions: 0 for a chunk that ends inside the prompt, 1 for
    an ordinary sample, 1 + drafts for verification, all of them for prompt log-probabilities."""
    samples: bool
    """Whether the last row yields a token."""
    num_drafts: int = 0
    """The last num_drafts of the tokens are drafts (sequence.draft_token_ids), not yet part of token_ids."""


@dataclass(slots=True)
class Plan:
    """What one step runs, in row order. Logits rows follow the same order."""

    step: int
    scheduled: list[ScheduledSequence]
    finished_ids: list[str] = field(default_factory=list)
    """Sequences that ended since the last plan: their state rows may be dropped."""

    @property
    def num_tokens(self) -> int:
        """Tokens the forward pass runs."""
        return sum(item.num_tokens for item in self.scheduled)
