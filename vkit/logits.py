"""Edits of logits rows before a token is chosen: masks, biases, penalties, truncation, and processors of others.

A `RowEdits` is made once per sequence that needs one; it keeps what it needs between steps (counts, ids), so that no
step costs more for a longer output. Rows are float32 `(V,)` views, written in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vkit.sequence import Grammar, OutputTokens, Sequence
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


class Penalties:
    """Makes tokens that were already used less likely.

    repetition: x / r if x > 0 else x * r, for ids in prompt or output; then frequency: x - f * count in output; then
    presence: x - p if in output. Ids and counts are kept as they come: one update per new token.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._num_seen = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def apply(self, row: Tensor) -> None:
        """Penalise used ids."""
        self._catch_up()
        params = self._sequence.params
        used = len(self._index)
        ids = torch.from_numpy(self._ids[:used]).to(row.device)
        counts = torch.from_numpy(self._counts[:used]).to(row.device)
        values = row[ids]
        if params.repetition_penalty != 1.0:
            scaled = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            values = scaled
        values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row[ids] = values

    def _catch_up(self) -> None:
        token_ids = self._sequence.token_ids
        num_prompt = self._sequence.num_prompt_tokens
        for position in range(self._num_seen, len(token_ids)):
            self._count(token_ids[position], is_output=position >= num_prompt)
        self._num_seen = len(token_ids)

    def _count(self, token_id: int, *, is_output: bool) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += is_output


@dataclass(slots=True)
class RowEdits:
    """All edits of one sequence, in their fixed order."""

    before_penalties: list[RowEdit] = field(default_factory=list)
    """Stages 4 to 6: allowed ids, bad words, min_tokens, logit_bias, custom processors."""
    penalties: Penalties | None = None

    def __bool__(self) -> bool:
        return bool(self.before_penalties) or self.penalties is not None


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
    return edits


def mask_by_grammar(row: Tensor, grammar: Grammar, sequence: Sequence) -> None:
    """Make ids impossible that the grammar does not allow next; a finished grammar allows only the end."""
    if grammar.is_terminated():
        ends = set(sequence.stop_token_ids)
        if sequence.eos_token_id is not None:
            ends.add(sequence.eos_token_id)
        AllowedTokens(sorted(ends)).apply(row)
        return
    bitmask = np.zeros(-(-row.shape[0] // 32), dtype=np.int32)
    grammar.fill_bitmask(bitmask)
    allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: row.shape[0]].astype(np.bool_)
    row.masked_fill_(torch.from_numpy(~allowed).to(row.device), NEGATIVE_INFINITY)


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A sequence that joined the batch at row `index`. The output view grows as tokens arrive."""

    index: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: OutputTokens


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


@dataclass(frozen=True, slots=True)
class Truncation:
    """min_p, top_k and top_p of a batch of rows, one value per row; values that are off are 0, 0 and 1."""

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    max_top_k: int
    has_top_p: bool


@dataclass(frozen=True, slots=True)
class Survivors:
    """What truncation leaves of each row: values (R, C), token ids (R, C) int32; dropped and padding cells are -inf."""

    values: Tensor
    token_ids: Tensor


_CHUNK = 64


def candidates(scaled: Tensor, floor: Tensor) -> Survivors:
    """Cells of each row that reach the row's floor, in order of id. scaled (R, V), floor (R,)."""
    mask = scaled >= floor.unsqueeze(1)
    counts = mask.sum(1)
    width = int(counts.max())
    if width == scaled.shape[1]:
        ids = torch.arange(width, dtype=torch.int32, device=scaled.device)
        return Survivors(scaled.masked_fill(~mask, NEGATIVE_INFINITY), ids.expand_as(scaled))
    rows, columns = mask.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    places = torch.arange(rows.shape[0], device=scaled.device) - starts[rows]
    values = torch.full((scaled.shape[0], width), NEGATIVE_INFINITY, device=scaled.device)
    token_ids = torch.zeros((scaled.shape[0], width), dtype=torch.int32, device=scaled.device)
    values[rows, places] = scaled[rows, columns]
    token_ids[rows, places] = columns.to(torch.int32)
    return Survivors(values, token_ids)


def truncate(scaled: Tensor, largest: Tensor, rules: Truncation) -> Survivors:
    """Apply min_p, then top_k, then top_p to rows already divided by temperature, sorting only what can survive.

    scaled (R, V), largest (R,): each row's maximum. Every bound below drops only what the exact rules would drop.
    """
    min_p_floor = largest + rules.min_p.log()
    floor = min_p_floor
    if rules.max_top_k:
        floor = torch.maximum(floor, _top_k_bound(scaled, rules))
    mass = None
    if rules.has_top_p:
        mass = _mass_above(scaled, largest, min_p_floor)
        # All tokens below (1 - p) / V together hold less than 1 - p. With top_k the mass is the survivors', at least
        # that of the largest.
        total = torch.where(rules.top_k > 0, torch.ones_like(mass), mass)
        bound = largest + total.log() + ((1.0 - rules.top_p) / scaled.shape[1]).log()
        # A hair of slack: this is an optimisation, the exact rule follows.
        floor = torch.maximum(floor, bound - 1e-3)
    found = candidates(scaled, floor.to(scaled.dtype))
    values, order = found.values.sort(dim=1, descending=True, stable=True)
    token_ids = found.token_ids.gather(1, order)
    if rules.max_top_k:
        values = _keep_top_k(values, rules)
    if mass is not None:
        values = _keep_top_p(values, largest, mass, rules)
    return Survivors(values, token_ids)


def _top_k_bound(scaled: Tensor, rules: Truncation) -> Tensor:
    """A value no larger than each row's k-th largest: the k-th largest of the maxima of chunks of the row."""
    num_chunks = scaled.shape[1] // _CHUNK
    if rules.max_top_k > num_chunks:
        return torch.full_like(rules.min_p, NEGATIVE_INFINITY)
    maxima = scaled[:, : num_chunks * _CHUNK].reshape(-1, num_chunks, _CHUNK).amax(2)
    leading = maxima.topk(rules.max_top_k, dim=1).values
    bound = leading.gather(1, (rules.top_k - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    return torch.where(rules.top_k > 0, bound, NEGATIVE_INFINITY)


def _mass_above(scaled: Tensor, largest: Tensor, floor: Tensor) -> Tensor:
    """Per row: sum of exp(x - largest) over the cells that reach the floor; float64."""
    weights = (scaled - largest.unsqueeze(1)).exp_()
    weights.masked_fill_(scaled < floor.unsqueeze(1), 0.0)
    return weights.sum(1, dtype=torch.float64)


def _keep_top_k(values: Tensor, rules: Truncation) -> Tensor:
    """Drop what is smaller than the k-th of each sorted row; ties with it stay."""
    place = (rules.top_k - 1).clamp(0, values.shape[1] - 1).unsqueeze(1)
    smallest = values.gather(1, place)
    return values.masked_fill((values < smallest) & (rules.top_k > 0).unsqueeze(1), NEGATIVE_INFINITY)


def _keep_top_p(values: Tensor, largest: Tensor, mass: Tensor, rules: Truncation) -> Tensor:
    """Drop, from the small end of each sorted row, while what was dropped sums to at most 1 - p; the first stays."""
    weights = (values - largest.unsqueeze(1)).to(torch.float64).exp_()
    total = torch.where(rules.top_k > 0, weights.sum(1), mass)
    before = (weights.cumsum(1) - weights) / total.unsqueeze(1)
    dropped = before >= rules.top_p.unsqueeze(1)
    dropped &= (rules.top_p < 1.0).unsqueeze(1)
    dropped[:, 0] = False
    return values.masked_fill(dropped, NEGATIVE_INFINITY)
