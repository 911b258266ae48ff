"""Plans as rank 0 sends them and as another rank reads them: per sequence, only what is new since it was last sent.

A reader's sequences hold what a forward pass asks for and nothing else: no text, no sampling, no bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from vkit.media import PlacedMedia
from vkit.sequence import MediaOrders, Plan, RopePositions, ScheduledSequence, Sequence, SequenceStatus, StateCopy
from vkit.types import SamplingParams

_IDLE = (SequenceStatus.PREEMPTED, SequenceStatus.FINISHED, SequenceStatus.WAITING)
_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class Birth:
    """What is said of a sequence once."""

    num_prompt_tokens: int
    media: tuple[PlacedMedia, ...]
    """Without features: those come with the order to encode them."""
    rope_positions: RopePositions | None
    position_delta: int


@dataclass(frozen=True, slots=True)
class SentShare:
    """A sequence's share of a step."""

    id: str
    start: int
    token_ids: list[int]
    """Known tokens from `start` on."""
    draft_token_ids: list[int]
    num_logits: int
    samples: bool
    num_preemptions: int
    state_row: int
    blocks: list[tuple[int, list[int]]]
    """Per cache group: how many entries of the table stay, and what follows them."""
    birth: Birth | None


@dataclass(frozen=True, slots=True)
class SentPlan:
    """A plan, in plain values."""

    step: int
    shares: list[SentShare]
    finished_ids: list[str]
    idle_ids: list[str]
    """Sequences that lost their blocks and are not part of the step."""
    state_copies: list[StateCopy]
    media: MediaOrders


@dataclass(slots=True)
class _Sent:
    """What a reader has of a sequence."""

    sequence: Sequence
    num_preemptions: int
    num_blocks: list[int] = field(default_factory=list)
    last_blocks: list[int] = field(default_factory=list)


class PlanWriter:
    """Remembers what was sent."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def write(self, plan: Plan) -> SentPlan:
        """The plan as readers of all plans so far need it. To be called when its tokens are known."""
        for sequence_id in plan.finished_ids:
            self._sent.pop(sequence_id, None)
        shares = [self._share(item) for item in plan.scheduled]
        idle: list[str] = []
        if len(self._sent) > len(shares):
            idle = [name for name, sent in self._sent.items() if sent.sequence.status in _IDLE]
        return SentPlan(plan.step, shares, plan.finished_ids, idle, plan.state_copies, plan.media)

    def _share(self, item: ScheduledSequence) -> SentShare:
        sequence = item.sequence
        sent = self._sent.get(sequence.id)
        birth = None
        if sent is None or sent.sequence is not sequence:
            sent = self._sent[sequence.id] = _Sent(sequence, sequence.num_preemptions)
            birth = _birth(sequence)
        if sent.num_preemptions != sequence.num_preemptions:
            sent.num_preemptions, sent.num_blocks, sent.last_blocks = sequence.num_preemptions, [], []
        if not sent.num_blocks:
            sent.num_blocks, sent.last_blocks = [0] * len(sequence.block_ids), [-1] * len(sequence.block_ids)
        stop = item.start + item.num_tokens - item.num_drafts
        return SentShare(
            sequence.id,
            item.start,
            sequence.token_ids[item.start : stop],
            sequence.draft_token_ids[: item.num_drafts],
            item.num_logits,
            item.samples,
            sequence.num_preemptions,
            sequence.state_row,
            [_news(sent, group, block_ids) for group, block_ids in enumerate(sequence.block_ids)],
            birth,
        )


def _birth(sequence: Sequence) -> Birth:
    bare = tuple(
        replace(placed, item=replace(placed.item, features=np.empty((0, 0), np.float32))) for placed in sequence.media
    )
    return Birth(sequence.num_prompt_tokens, bare, sequence.rope_positions, sequence.position_delta)


def _news(sent: _Sent, group: int, block_ids: list[int]) -> tuple[int, list[int]]:
    """What is new of a block table; a short one, such as that of a state, is sent anew, since any entry may change."""
    known = sent.num_blocks[group]
    if (
        len(block_ids) <= _SHORT
        or known > len(block_ids)
        or (known and block_ids[known - 1] != sent.last_blocks[group])
    ):
        known = 0
    sent.num_blocks[group] = len(block_ids)
    sent.last_blocks[group] = block_ids[-1] if block_ids else -1
    return known, block_ids[known:]


_SHORT = 16
"""Entries up to which a table is sent whole."""


class PlanReader:
    """Makes plans again of what a writer sends."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}

    def read(self, sent: SentPlan) -> Plan:
        """The plan, over this reader's own sequences."""
        self._forget(sent.finished_ids)
        shares = [self._share(share) for share in sent.shares]
        for sequence_id in sent.idle_ids:
            self._sequences[sequence_id].status = SequenceStatus.PREEMPTED
        return Plan(sent.step, shares, sent.finished_ids, sent.state_copies, media=sent.media)

    def _forget(self, ids: Iterable[str]) -> None:
        for sequence_id in ids:
            self._sequences.pop(sequence_id, None)

    def _share(self, share: SentShare) -> ScheduledSequence:
        birth = share.birth
        if birth is not None:
            self._sequences[share.id] = Sequence(
                share.id,
                [],
                birth.num_prompt_tokens,
                _NO_SAMPLING,
                0.0,
                media=birth.media,
                rope_positions=birth.rope_positions,
                position_delta=birth.position_delta,
                block_ids=[[] for _ in share.blocks],
            )
        sequence = self._sequences[share.id]
        sequence.status = SequenceStatus.RUNNING
        sequence.num_preemptions, sequence.state_row = share.num_preemptions, share.state_row
        stop = share.start + len(share.token_ids)
        sequence.token_ids.extend([0] * (stop - len(sequence.token_ids)))
        sequence.token_ids[share.start : stop] = share.token_ids
        sequence.draft_token_ids = share.draft_token_ids
        for block_ids, (known, news) in zip(sequence.block_ids, share.blocks, strict=True):
            block_ids[known:] = news
        num_drafts = len(share.draft_token_ids)
        num_tokens = len(share.token_ids) + num_drafts
        return ScheduledSequence(sequence, share.start, num_tokens, share.num_logits, share.samples, num_drafts)
