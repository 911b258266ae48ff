"""Edits of logits rows before a token is chosen: masks, biases, penalties, and processors of others.

A `RowEdits` is made once per sequence that needs one; it keeps what it needs between steps (counts, ids), so that no
step costs more for a longer output. Rows are float32 `(V,)` views, written in place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vkit import kernels
from vkit.sequence import OutputTokens, Sequence
from vkit.thinking import ThinkingBudget, ThinkingCounter
from vkit.types import LogitsProcessor, SamplingParams

NEGATIVE_INFINITY = -math.inf


class RowEdit(Protocol):
    """One edit of one sequence's row."""

    def apply(self, row: Tensor) -> None:
        """Edit the row (V,) in place for the next token."""


class AllowedTokens:
    """Everything but the given ids becomes impossible."""

    def __init__(self, token_ids: SequenceABC[int]) -> None:
        self._ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64)

    def apply(self, row: Tensor) -> None:
        """Keep the allowed ids."""
        self._ids = self._ids.to(row.device)
        kept = row[self._ids]
        row.fill_(NEGATIVE_INFINITY)
        row[self._ids] = kept


class BadWords:
    """The last id of a word becomes impossible when the output ends with the ids before it."""

    def __init__(self, words: SequenceABC[tuple[int, ...]], sequence: Sequence) -> None:
        self._words = words
        self._output = OutputTokens(sequence)

    def apply(self, row: Tensor) -> None:
        """Forbid what would complete a word."""
        for word in self._words:
            *prefix, last = word
            if len(prefix) <= len(self._output) and self._output[len(self._output) - len(prefix) :] == prefix:
                row[last] = NEGATIVE_INFINITY


class MinTokens:
    """Ids that end the output are impossible while it is too short."""

    def __init__(self, sequence: Sequence) -> None:
        ids = set(sequence.stop_token_ids)
        if sequence.eos_token_id is not None and not sequence.params.ignore_eos:
            ids.add(sequence.eos_token_id)
        self._ids = torch.tensor(sorted(ids), dtype=torch.int64)
        self._sequence = sequence

    def apply(self, row: Tensor) -> None:
        """Forbid the end until min_tokens outputs exist."""
        if self._sequence.num_output_tokens < self._sequence.params.min_tokens:
            self._ids = self._ids.to(row.device)
            row[self._ids] = NEGATIVE_INFINITY


class LogitBias:
    """Adds a constant to some ids."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = torch.tensor(list(bias), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, row: Tensor) -> None:
        """Add the bias."""
        self._ids, self._values = self._ids.to(row.device), self._values.to(row.device)
        row[self._ids] += self._values


class Custom:
    """A callable that came with the request."""

    def __init__(self, processor: LogitsProcessor, sequence: Sequence) -> None:
        self._processor = processor
        self._output = OutputTokens(sequence)

    def apply(self, row: Tensor) -> None:
        """Let it edit the row."""
        self._processor(self._output, row)


class UsedTokens(NamedTuple):
    """What one row's penalties are about."""

    ids: npt.NDArray[np.int64]
    """(n,): of prompt and output."""
    counts: npt.NDArray[np.float32]
    """(n,): how often each is in the output."""
    penalties: tuple[float, float, float]
    """Repetition, frequency, presence."""


class Penalties:
    """Which tokens a sequence has used, and how much less likely that makes them: see `kernels.penalise`.

    Ids and counts are kept as they come: one update per new token.
    """

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.params
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._sequence = sequence
        self._num_seen = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def used(self, num_drafts: int = 0) -> UsedTokens:
        """The used ids and their counts. The last `num_drafts` tokens are drafts: they count in this row alone."""
        num_known = len(self._sequence.token_ids) - num_drafts
        self._catch_up(num_known)
        num_ids = len(self._index)
        drafts = self._sequence.token_ids[num_known:]
        for token_id in drafts:
            self._count(token_id, is_output=True)
        used = len(self._index)
        found = UsedTokens(self._ids[:used].copy(), self._counts[:used].copy(), self._penalties)
        for token_id in drafts:
            self._counts[self._index[token_id]] -= 1
        while len(self._index) > num_ids:
            self._index.popitem()
        return found

    def _catch_up(self, num_known: int) -> None:
        token_ids = self._sequence.token_ids
        num_prompt = self._sequence.num_prompt_tokens
        for position in range(self._num_seen, num_known):
            self._count(token_ids[position], is_output=position >= num_prompt)
        self._num_seen = num_known

    def _count(self, token_id: int, *, is_output: bool) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += is_output


class EndOfThinking:
    """Leaves one token possible, whatever else was forbidden, once the model has reasoned as long as it may."""

    def __init__(self, budget: ThinkingBudget, sequence: Sequence) -> None:
        self._counter = ThinkingCounter(budget, OutputTokens(sequence))

    def apply(self, row: Tensor, num_drafts: int = 0) -> None:
        """Force the next token of the end mark, if it is due. With drafts at its end, the output is read on a copy."""
        counter = copy.copy(self._counter) if num_drafts else self._counter
        forced = counter.forced_id()
        if forced is None:
            return
        value = float(row[forced])
        row.fill_(NEGATIVE_INFINITY)
        row[forced] = 0.0 if value == NEGATIVE_INFINITY else value


@dataclass(slots=True)
class RowEdits:
    """All edits of one sequence, in their fixed order."""

    before_penalties: list[RowEdit] = field(default_factory=list)
    """Stages 4 to 6: allowed ids, bad words, min_tokens, logit_bias, custom processors."""
    penalties: Penalties | None = None
    thinking: EndOfThinking | None = None
    """After everything that could forbid the end of reasoning."""

    def __bool__(self) -> bool:
        return bool(self.before_penalties) or self.penalties is not None or self.thinking is not None


def edits_for(sequence: Sequence) -> RowEdits:
    """The edits a sequence's parameters ask for."""
    params = sequence.params
    edits = RowEdits()
    if params.allowed_token_ids is not None:
        edits.before_penalties.append(AllowedTokens(params.allowed_token_ids))
    if sequence.bad_word_ids:
        edits.before_penalties.append(BadWords(sequence.bad_word_ids, sequence))
    if params.min_tokens:
        edits.before_penalties.append(MinTokens(sequence))
    if params.logit_bias:
        edits.before_penalties.append(LogitBias(dict(params.logit_bias)))
    edits.before_penalties.extend(Custom(processor, sequence) for processor in params.logits_processors)
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        edits.penalties = Penalties(sequence)
    if sequence.thinking is not None:
        edits.thinking = EndOfThinking(sequence.thinking, sequence)
    return edits


def penalise(logits: Tensor, rows: SequenceABC[int], used: SequenceABC[UsedTokens]) -> None:
    """Make the used tokens of some rows less likely. logits (R, V) is written in place."""
    device = logits.device
    kernels.penalise(
        logits,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.from_numpy(np.concatenate([own.ids for own in used])).to(device),
        torch.from_numpy(np.concatenate([own.counts for own in used])).to(device),
        torch.from_numpy(np.repeat(np.arange(len(used), dtype=np.int32), [len(own.ids) for own in used])).to(device),
        torch.tensor([own.penalties for own in used], dtype=torch.float32, device=device),
    )


_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), math.inf, NEGATIVE_INFINITY
).astype(np.float32)
"""Byte of a mask -> the largest value each of its eight ids may keep: (256, 8)."""


def apply_bitmask(logits: Tensor, rows: SequenceABC[int], words: np.ndarray) -> None:
    """Make ids impossible whose bit is not set. words (len(rows), ceil(V / 32)) int32: bit i of word w is id 32 w + i.

    logits (R, V) is written in place, in the given rows.
    """
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        for row, own in zip(rows, words, strict=True):
            # On this thread alone: torch would wake its threads for every row, 0.1 ms that become 5 on a busy machine.
            # A table and a minimum take 11 us for 49,152 ids where a masked copy takes 40 to 200 (one AVX2 core, 2026).
            values = logits[row].numpy()
            ceilings = _CEILINGS.take(own.view(np.uint8), axis=0).reshape(-1)[:vocab_size]
            np.minimum(values, ceilings, out=values)
        return
    index = torch.tensor(list(rows), dtype=torch.int64, device=logits.device)
    kernels.mask_tokens(logits, index, torch.from_numpy(np.ascontiguousarray(words)).to(logits.device))


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A sequence that joined the batch at row `index`. The output view grows as tokens arrive.

    A row that verifies drafts is one of its own, added anew in every step: its output ends with the drafts before it.
    """

    index: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: SequenceABC[int]


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the rows of this step differ from those of the step before. Apply removed, then moved, then added."""

    batch_size: int
    removed: list[int]
    moved: list[tuple[int, int]]
    """(row before, row now)."""
    added: list[AddedRow]


@runtime_checkable
class BatchLogitsProcessor(Protocol):
    """A plug-in that edits the rows of all sequences of a step at once. Constructed with the vocabulary size."""

    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token always stays the same; if so greedy rows need not run it."""

    def update_state(self, update: BatchUpdate | None) -> None:
        """Called before every `apply`; None when the same sequences sit in the same rows as before."""

    def apply(self, logits: Tensor) -> Tensor:
        """Edited logits (R, V); may be the same tensor."""


BatchLogitsProcessorFactory = Callable[[int], BatchLogitsProcessor]
"""vocab_size -> processor. A factory with `validate_params(params)` is asked about each request first."""
