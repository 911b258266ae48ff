"""Drafting with a model: what runs after each step of the target, over the same block tables.

A drafter keeps keys and values in layers of its own beside the target's, under the same blocks, so that whatever
happens to a sequence's blocks (prefix reuse, preemption) happens to both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch, BatchBuilder
from vkit.kernels.draw_rules import DrawRules
from vkit.sequence import Plan, ScheduledSequence, Sequence, StepSamples
from vkit.speculation.proposer import Drafts
from vkit.speculation.verification import draft_key


@dataclass(slots=True)
class ObservedStep:
    """A step of the target that was run and sampled, and is not booked yet."""

    items: list[ScheduledSequence]
    emitted: list[list[int]]
    """Tokens that each item got."""
    batch: Batch
    hidden: Tensor
    """(T, H) after the target's final norm; empty for a drafter that needs none."""
    taps: list[Tensor]
    """(T, H) each: the stream after the layers the drafter asked for."""

    def num_computed(self, index: int) -> int:
        """Tokens of an item that stay computed after this step."""
        item = self.items[index]
        rejected = item.num_drafts + 1 - len(self.emitted[index]) if item.num_drafts else 0
        return item.start + item.num_tokens - rejected

    def following_ids(self, index: int) -> list[int]:
        """The id after each of an item's tokens; anything after drafts that were rejected."""
        item = self.items[index]
        token_ids = item.sequence.token_ids
        known = token_ids[item.start + 1 : item.start + 1 + item.num_tokens]
        return (known + self.emitted[index] + [0] * item.num_tokens)[: item.num_tokens]


class Drafter(Protocol):
    """Makes drafts from a step of the target."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it wants the target's hidden states."""

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers of the target whose streams it wants."""

    def draft(self, step: ObservedStep, builder: BatchBuilder) -> list[Drafts]:
        """Drafts for each item, none for one that does not sample; and whatever later steps need is kept."""


class DraftSource(Protocol):
    """Where a proposer gets drafts from: a model in memory, with its drafter."""

    def draft(self, plan: Plan, samples: StepSamples) -> list[Drafts]:
        """Drafts for each item of the step that was run last."""


class ModelProposer:
    """Offers the drafts of a model. They are made before a step is booked, while its sequences own their blocks."""

    def __init__(self, source: DraftSource, *, max_drafts: int, num_lookahead: int, needs_hidden_states: bool) -> None:
        self.max_drafts = max_drafts
        self.num_lookahead = num_lookahead
        self.needs_hidden_states = needs_hidden_states
        self._source = source
        self._waiting: dict[str, tuple[int, Drafts]] = {}
        """Per sequence the number of tokens it will have had when its drafts were made, and the drafts."""

    def observe(self, plan: Plan, samples: StepSamples) -> None:
        """Make drafts."""
        self._waiting.clear()
        drafts = self._source.draft(plan, samples)
        for item, emitted, own in zip(plan.scheduled, samples.token_ids, drafts, strict=True):
            self._waiting[item.sequence.id] = len(item.sequence.token_ids) + len(emitted), own

    def propose(self, sequence: Sequence) -> Drafts:
        """The drafts made, unless something else was appended since."""
        num_tokens, drafts = self._waiting.pop(sequence.id, (-1, Drafts()))
        return drafts if num_tokens == len(sequence.token_ids) else Drafts()

    def book(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Nothing: the number of drafts is fixed."""

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Nothing is kept beyond a step."""


@dataclass(slots=True)
class Growing:
    """One sequence's drafts in the making."""

    index: int
    """Of its item."""
    sequence: Sequence
    position: int
    """Of the last known token, whose successor is the first draft."""
    num_wanted: int
    num_outputs: int
    """Output tokens after the step."""
    token_ids: list[int]
    probs: list[Tensor]

    @property
    def is_drawn(self) -> bool:
        """Whether its drafts can be drawn at random."""
        return not self.sequence.params.is_greedy


def growing(step: ObservedStep, builder: BatchBuilder, max_drafts: int, *, num_slots_more: int = 0) -> list[Growing]:
    """The sequences that can have drafts: those that sample, and have slots and a future.

    Drafts take a slot each, from the last known token's on, and `num_slots_more`.
    """
    found = []
    for index, (item, emitted) in enumerate(zip(step.items, step.emitted, strict=True)):
        sequence = item.sequence
        if not item.samples or not emitted or sequence.is_finished:
            continue
        num_tokens = len(sequence.token_ids) + len(emitted)
        num_slots = builder.capacity(sequence) - num_tokens + 1 - num_slots_more
        room = min(num_slots, sequence.max_total_tokens - num_tokens - 1)
        if room > 0:
            outputs = num_tokens - sequence.num_prompt_tokens
            found.append(Growing(index, sequence, num_tokens - 1, min(room, max_drafts), outputs, [], []))
    return found


def extend(rows: list[Growing], logits: Tensor, *, is_probabilistic: bool) -> None:
    """Give each row its next draft, by its logits (R, V) float32: the most likely, or drawn at its temperature."""
    chosen = logits.argmax(dim=1).tolist()
    drawn = [place for place, row in enumerate(rows) if is_probabilistic and row.is_drawn]
    if drawn:
        own = [rows[place] for place in drawn]
        temperatures = [row.sequence.params.temperature for row in own]
        off = [0] * len(own)
        rules = DrawRules.of(temperatures, [0.0] * len(own), off, [1.0] * len(own), logits.device)
        keys = np.array([draft_key(row.sequence, row.num_outputs + len(row.token_ids)) for row in own], np.int64)
        index = torch.tensor(drawn, device=logits.device)
        ids, _ = kernels.draw(logits, index, rules, torch.from_numpy(keys).to(logits.device))
        probs = torch.softmax(logits[index] / rules.temperatures.unsqueeze(1), dim=1)
        for place, token_id, row_probs in zip(drawn, ids.tolist(), probs, strict=True):
            chosen[place] = token_id
            rows[place].probs.append(row_probs)
    for row, token_id in zip(rows, chosen, strict=True):
        row.token_ids.append(token_id)


def finished_drafts(rows: list[Growing], num_items: int) -> list[Drafts]:
    """The drafts by item."""
    drafts = [Drafts() for _ in range(num_items)]
    for row in rows:
        drafts[row.index] = Drafts(row.token_ids, torch.stack(row.probs) if row.probs else None)
    return drafts
