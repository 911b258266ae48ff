"""Host state of one running sequence, and the plan of one step. No torch, no text.

A sequence is one output of one request: a request with n outputs makes n sequences. Prefill, chunked prefill, decode,
verification and resumption are one operation: a step gives a sequence some tokens so that `num_computed_tokens`
catches up with `num_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from vkit.media import MediaInput, PlacedMedia
from vkit.thinking import ThinkingBudget
from vkit.types import FinishReason, PositionLogprobs, SamplingParams

RopePositions: TypeAlias = NDArray[np.int64]
"""(3, T): position in time, row and column of every prompt token."""


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    WAITING_FOR_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Grammar(Protocol):
    """A constraint on one sequence's output, advanced token by token."""

    def accept_tokens(self, token_ids: SequenceABC[int]) -> bool:
        """Advance over the tokens; False when one of them is not allowed."""

    def validate_tokens(self, token_ids: SequenceABC[int]) -> list[int]:
        """The longest prefix that could be accepted; the state does not change."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def fill_bitmask(self, row: Any) -> None:
        """Write the allowed ids into an int32 numpy row of ceil(V / 32) words: bit i of word w is id 32 w + i."""

    def is_terminated(self) -> bool:
        """Whether nothing but the end may follow."""

    def forced_token(self) -> int | None:
        """The one id that may follow, where there is only one and the output may not end here; else None.

        None may also mean that finding out would cost too much.
        """

    def reset(self) -> None:
        """Return to the start."""


class AdapterRef(Protocol):
    """A low-rank adapter as the host knows it."""

    @property
    def name(self) -> str:
        """What requests call it."""

    @property
    def key(self) -> str:
        """What keys and values computed with it depend on: the name and a digest of the weights."""


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
    eos_token_id: int | None = None
    """The primary end of sequence; ends generation unless params.ignore_eos."""
    stop_token_ids: frozenset[int] = frozenset()
    """Further ids that end generation; ending on one reports it as the stop reason."""
    max_total_tokens: int = 0
    """Prompt plus output may not exceed this (max_model_len and max_tokens already applied)."""
    cache_salt: str | None = None
    seed: int = 0
    """Key of this sequence's random draws; chosen at admission when the request named none."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """params.bad_words as token ids."""
    reads_prefix_cache: bool = True
    adapter: AdapterRef | None = None
    """The low-rank adapter it runs with."""
    wants_all_rows: bool = False
    """Whether every prompt position's row is wanted of the model, not only the last."""
    embedding: list[float] | None = None
    """What an engine that embeds made of the prompt."""
    thinking: ThinkingBudget | None = None
    """How long the model may reason."""
    grammar: Grammar | None = None
    media: tuple[PlacedMedia, ...] = ()
    """Images, videos and sound, at their places in the prompt."""
    rope_positions: RopePositions | None = None
    """For prompts in which they are not simply 0, 1, 2, ..."""
    position_delta: int = 0
    """What the position of a token after the prompt is more than its index (at most 0)."""
    pending_grammar: Future[Grammar] | None = None
    """Compilation in progress; the sequence waits in WAITING_FOR_GRAMMAR until it is done."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose cache entries exist or are planned; advances when the plan is made."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    num_output_placeholders: int = 0
    """Sampled positions whose token id has not come back yet (asynchronous scheduling)."""
    num_in_flight: int = 0
    """Plans that name this sequence and are not committed yet; its blocks outlive them."""
    num_external_tokens: int = 0
    """Of the computed tokens, those that a cache connector brought."""
    external_source: str = "external_unspecified"
    """The tier they came from, one of metrics.CACHED_SOURCES."""
    is_loading: bool = False
    """Whether the bytes of external tokens are not yet known to be in the blocks."""
    skips_external: bool = False
    """Whether a cache connector is not to be asked any more."""
    void_step: int = 0
    """Results of plans up to this step are void: they were computed from entries that never arrived."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the client said to the cache connector."""
    kv_transfer_reply: dict[str, Any] | None = None
    """What the cache connector says to the client."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses at the tokens that follow, to be verified by the next step; they are no part of token_ids."""
    num_verifications: int = 0
    """Steps that verified drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts verified so far, and those of them that turned out right."""
    state_row: int = 0
    """Which entry of a STATE group's table holds the current state: each token of a verification leaves its own."""
    block_ids: list[list[int]] = field(default_factory=list)
    """One block table per cache group; 0 stands for a block that is no longer needed."""
    num_released_blocks: list[int] = field(default_factory=list)
    """Per group: leading table entries already given back (sliding windows)."""
    num_registered_blocks: list[int] = field(default_factory=list)
    """Per group: leading table entries that need no further look by the prefix cache."""
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    """Filled from the front, one entry per prompt position; the first is None."""
    repetition_runs: list[int] = field(default_factory=list)
    """Per pattern size: how many tokens at the tail equal the one a pattern length before."""
    queued_time: float = 0.0
    """Arrival or last preemption."""
    first_scheduled_time: float | None = None
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
    def num_tokens_with_drafts(self) -> int:
        """Tokens the next step may run up to: known ones, drafts and placeholders."""
        return len(self.token_ids) + len(self.draft_token_ids) + self.num_output_placeholders

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def is_caught_up(self) -> bool:
        """Whether all known tokens but the last are computed, so that the next step brings a new one."""
        return self.num_computed_tokens == len(self.token_ids) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions remain whose log-probabilities were asked for."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens


@contextmanager
def with_drafts(sequence: Sequence, num_drafts: int) -> Iterator[None]:
    """While inside, the sequence's first drafts count as output, as they will if they are accepted."""
    if not num_drafts:
        yield
        return
    token_ids = sequence.token_ids
    num_known = len(token_ids)
    token_ids.extend(sequence.draft_token_ids[:num_drafts])
    try:
        yield
    finally:
        del token_ids[num_known:]


class OutputTokens(SequenceABC[int]):
    """Read-only view of a sequence's output tokens: nothing is copied, whatever the length."""

    __slots__ = ("_start", "_token_ids")

    def __init__(self, sequence: Sequence) -> None:
        self._token_ids = sequence.token_ids
        self._start = sequence.num_prompt_tokens

    def __len__(self) -> int:
        return len(self._token_ids) - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"output token {index} of {length}")
        return self._token_ids[self._start + (index if index >= 0 else index + length)]

    def __iter__(self) -> Iterator[int]:
        for i in range(self._start, len(self._token_ids)):
            yield self._token_ids[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceABC) and len(self) == len(other) and all(map(int.__eq__, self, other))

    def __repr__(self) -> str:
        return repr(list(self))


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


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Before the step runs, the state in block `source` is copied to block `target` (group of kind STATE)."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class MediaOrders:
    """What a step does about encoded media before it runs: first the clearing, then the freeing, then the encoding."""

    encode: list[MediaInput] = field(default_factory=list)
    free: list[bytes] = field(default_factory=list)
    """Digests of items to forget."""
    clears: bool = False
    """Forget all of them first."""


@dataclass(slots=True)
class Plan:
    """What one step runs, in row order. Logits rows follow the same order."""

    step: int
    scheduled: list[ScheduledSequence]
    finished_ids: list[str] = field(default_factory=list)
    """Sequences that ended since the last plan: their state rows may be dropped."""
    state_copies: list[StateCopy] = field(default_factory=list)
    """To be done in this order, before anything of the step is written."""
    connector_meta: Any = None
    """What the cache connector's worker half loads and stores with this step."""
    media: MediaOrders = field(default_factory=MediaOrders)

    @property
    def num_tokens(self) -> int:
        """Tokens the forward pass runs."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(slots=True)
class StepSamples:
    """What the sampler made of one plan's logits; lists run parallel to `plan.scheduled`."""

    token_ids: list[list[int]]
    """Accepted tokens per item; empty where the item does not sample."""
    logprobs: list[list[PositionLogprobs] | None]
    """One entry per token where log-probabilities were asked for."""
    complete: set[int] = field(default_factory=set)
    """Indices of items whose sequence is done without a token: its embedding is made."""
    errors: dict[int, str] = field(default_factory=dict)
    """Item index -> what went wrong with this row alone."""
    num_corrupted: int = 0
    """Rows whose logits held NaN or infinity."""


@dataclass(slots=True)
class SequenceUpdate:
    """What one step changed for one sequence: new tokens, or its end, or both."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    num_drafts: int = 0
    """Drafts that the step verified."""
    num_accepted: int = 0
