"""Logits to token ids and log-probabilities, in one fixed order of stages, for all rows of a step at once.

The sampler owns the logits it is given and writes into them. Rows that are plainly greedy cost one argmax.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vkit import kernels
from vkit.logits import AddedRow, BatchLogitsProcessor, BatchUpdate, RowEdits, apply_bitmask, edits_for
from vkit.randomness import draw_keys, mixed_seed
from vkit.sequence import OutputTokens, Plan, ScheduledSequence, Sequence, StepSamples
from vkit.structured.masks import FilledMasks, GrammarMasks
from vkit.types import WHOLE_VOCABULARY, Logprob, PositionLogprobs

logger = logging.getLogger("vkit.sampler")

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class _Batch:
    """Everything about a set of sampling sequences that stays the same while the set does."""

    sequences: list[Sequence]
    edits: list[tuple[int, RowEdits]] = field(default_factory=list)
    grammars: list[int] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    random: list[_RandomRows] = field(default_factory=list)
    keeps_survivors: bool = False
    is_plain: bool = False
    """Every row is greedy, and nothing is edited or asked besides."""


@dataclass(slots=True)
class _RandomRows:
    """Random rows and their parameters."""

    rows: list[int]
    sequences: list[Sequence]
    mixed_seeds: npt.NDArray[np.uint64]
    keeps_survivors: bool
    """Whether their log-probabilities are those of what is drawn from."""
    index: Tensor
    rules: kernels.DrawRules


class Sampler:
    """Chooses the next token of every sequence of a plan."""

    def __init__(
        self,
        vocab_size: int,
        *,
        logprobs_mode: str = "raw_logprobs",
        plugins: Iterable[BatchLogitsProcessor] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        """`end_ids`: every id that may end an output."""
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"Sampler: logprobs_mode {logprobs_mode!r}, expected one of {LOGPROBS_MODES}")
        self._vocab_size = vocab_size
        self._takes_logits = logprobs_mode.endswith("logits")
        self._takes_processed = logprobs_mode.startswith("processed")
        plugins = list(plugins)
        self._changing = [plugin for plugin in plugins if not plugin.is_argmax_invariant()]
        self._invariant = [plugin for plugin in plugins if plugin.is_argmax_invariant()]
        self._masks = GrammarMasks(vocab_size, end_ids)
        self._pending_masks: Future[FilledMasks] | None = None
        self._edits: dict[str, RowEdits] = {}
        self._batch = _Batch([])
        self._device = torch.device("cpu")

    @property
    def can_forbid(self) -> bool:
        """Whether a plug-in may make tokens impossible, even one that a grammar leaves as the only choice."""
        return bool(self._changing)

    def begin_masks(self, plan: Plan) -> None:
        """Start on the grammar masks of a step; `sample` of the same plan waits for them."""
        self._pending_masks = self._masks.begin(plan)

    def close(self) -> None:
        """Stop the thread that fills masks."""
        self._masks.close()

    def sample(self, logits: Tensor, plan: Plan) -> StepSamples:
        """Tokens and log-probabilities for the plan's items. logits (R, V) float32, written in place.

        Fills `prompt_logprobs` of sequences that asked for them.
        """
        for sequence_id in plan.finished_ids:
            self._edits.pop(sequence_id, None)
        count = len(plan.scheduled)
        result = StepSamples([[]] * count, [None] * count)
        items, rows = self._row_layout(logits, plan)
        if not items:
            return result
        if len(rows) != logits.shape[0]:
            logits = logits[torch.tensor(rows, device=logits.device)]
        batch = self._batch_of([plan.scheduled[index].sequence for index in items], logits.device)
        if batch.is_plain and not self._changing and not self._invariant:
            self._take_largest(logits, items, result)
        else:
            self._sample_rows(logits.float(), batch, items, plan, result)
        return result

    def _row_layout(self, logits: Tensor, plan: Plan) -> tuple[list[int], list[int]]:
        """Items that sample and their logits rows; prompt log-probabilities are taken on the way."""
        items: list[int] = []
        rows: list[int] = []
        row = 0
        for index, item in enumerate(plan.scheduled):
            if item.num_logits > 1 and item.sequence.wants_prompt_logprobs:
                self._take_prompt_logprobs(logits[row : row + item.num_logits], item)
            row += item.num_logits
            if item.samples:
                items.append(index)
                rows.append(row - 1)
            elif item.num_logits == 1 and item.sequence.wants_prompt_logprobs:
                self._take_prompt_logprobs(logits[row - 1 : row], item)
        return items, rows

    @torch.inference_mode()
    def _sample_rows(self, logits: Tensor, batch: _Batch, items: list[int], plan: Plan, result: StepSamples) -> None:
        raw = None
        if batch.logprob_rows and not self._takes_processed:
            raw = self._snapshot(logits[torch.tensor(batch.logprob_rows, device=logits.device)])
        errors = self._edit(logits, batch, plan)
        token_ids = [0] * len(items)
        largest = torch.zeros(len(items), device=logits.device)
        # Only an invariant plug-in parts what is judged from what is drawn from; else a random row is read once.
        judges_first = bool(self._invariant)
        _choose_greedily(logits, range(len(items)) if judges_first else batch.greedy, token_ids, largest)
        if judges_first:
            self._check_rows(largest.tolist(), errors, result)
            _apply_plugins(self._invariant, logits, errors)
        processed = logits.clone() if batch.keeps_survivors else None
        for group in batch.random:
            found = self._draw(logits, group, token_ids, processed)
            largest[group.index] = found
        if not judges_first:
            self._check_rows(largest.tolist(), errors, result)
        if batch.logprob_rows:
            if raw is None:
                source = processed if processed is not None else logits
                raw = self._snapshot(source[torch.tensor(batch.logprob_rows, device=logits.device)])
            logprobs = self._gather_logprobs(raw, batch, token_ids)
            for row, entry in zip(batch.logprob_rows, logprobs, strict=True):
                result.logprobs[items[row]] = [entry]
        for row, index in enumerate(items):
            result.token_ids[index] = [token_ids[row]]
        for row, error in errors.items():
            result.errors[items[row]] = error

    def _take_largest(self, logits: Tensor, items: list[int], result: StepSamples) -> None:
        """Tokens of a batch in which every row is greedy and nothing is edited or asked besides."""
        token_ids, largest = kernels.largest(logits)
        errors: dict[int, str] = {}
        self._check_rows(largest, errors, result)
        for index, token_id in zip(items, token_ids, strict=True):
            result.token_ids[index] = [token_id]
        for row, error in errors.items():
            result.errors[items[row]] = error

    # Composition

    def _batch_of(self, sequences: list[Sequence], device: torch.device) -> _Batch:
        if sequences == self._batch.sequences:
            for plugin in self._changing + self._invariant:
                plugin.update_state(None)
            return self._batch
        if self._changing or self._invariant:
            update = _batch_update(self._batch.sequences, sequences)
            for plugin in self._changing + self._invariant:
                plugin.update_state(update)
        self._device = device
        self._batch = self._new_batch(sequences)
        return self._batch

    def _new_batch(self, sequences: list[Sequence]) -> _Batch:
        batch = _Batch(sequences)
        random: dict[bool, list[int]] = {False: [], True: []}
        for row, sequence in enumerate(sequences):
            params = sequence.params
            edits = self._edits.get(sequence.id)
            if edits is None:
                edits = self._edits[sequence.id] = edits_for(sequence)
            if edits:
                batch.edits.append((row, edits))
            if sequence.grammar is not None:
                batch.grammars.append(row)
            if params.logprobs is not None or params.logprob_token_ids:
                batch.logprob_rows.append(row)
            if params.is_greedy:
                batch.greedy.append(row)
            else:
                has_logprobs = bool(batch.logprob_rows) and batch.logprob_rows[-1] == row
                random[self._takes_processed and has_logprobs].append(row)
        batch.keeps_survivors = bool(random[True])
        batch.is_plain = len(batch.greedy) == len(sequences) and not (
            batch.edits or batch.grammars or batch.logprob_rows
        )
        batch.random = [self._random_rows(sequences, rows, keeps) for keeps, rows in random.items() if rows]
        return batch

    def _random_rows(self, sequences: list[Sequence], rows: list[int], keeps_survivors: bool) -> _RandomRows:
        own = [sequences[row] for row in rows]
        params = [sequence.params for sequence in own]
        return _RandomRows(
            rows=rows,
            sequences=own,
            mixed_seeds=np.array([mixed_seed(sequence.seed) for sequence in own], dtype=np.uint64),
            keeps_survivors=keeps_survivors,
            index=torch.tensor(rows, dtype=torch.int64, device=self._device),
            rules=kernels.DrawRules.of(
                [p.temperature for p in params],
                [p.min_p for p in params],
                [p.top_k if 0 < p.top_k < self._vocab_size else 0 for p in params],
                [p.top_p for p in params],
                self._device,
            ),
        )

    # Stages

    def _edit(self, logits: Tensor, batch: _Batch, plan: Plan) -> dict[int, str]:
        """Grammar masks, then the edits that may change the argmax, penalties, the end of thinking; errors by row."""
        errors = self._mask_by_grammars(logits, batch, plan)
        for row, edits in batch.edits:
            try:
                for edit in edits.before_penalties:
                    edit.apply(logits[row])
            except Exception as error:  # a processor of the request's own: it fails that request alone
                logger.warning("logits processor of sequence %s failed: %r", batch.sequences[row].id, error)
                errors[row] = f"logits processor failed: {error!r}"
        _apply_plugins(self._changing, logits, errors)
        for row, edits in batch.edits:
            if edits.penalties is not None:
                edits.penalties.apply(logits[row])
            if edits.thinking is not None:
                edits.thinking.apply(logits[row])
        return errors

    def _mask_by_grammars(self, logits: Tensor, batch: _Batch, plan: Plan) -> dict[int, str]:
        """Apply the step's grammar masks; errors by row."""
        if not batch.grammars:
            return {}
        if self._pending_masks is None:
            self.begin_masks(plan)
        assert self._pending_masks is not None, "a batch with grammars has masks"
        masks, self._pending_masks = self._pending_masks.result(), None
        ids = [batch.sequences[row].id for row in batch.grammars]
        apply_bitmask(logits, batch.grammars, masks.words[[masks.rows[name].stop - 1 for name in ids]])
        return {row: masks.errors[name] for row, name in zip(batch.grammars, ids, strict=True) if name in masks.errors}

    @staticmethod
    def _check_rows(largest: list[float], errors: dict[int, str], result: StepSamples) -> None:
        """A row whose largest value is no number fails by itself."""
        for row, value in enumerate(largest):
            if math.isfinite(value) or row in errors:
                continue
            if value == -math.inf:
                errors[row] = "no token is allowed by the constraints on this output"
            else:
                errors[row] = "the model's logits are not finite"
                result.num_corrupted += 1

    def _draw(self, logits: Tensor, group: _RandomRows, token_ids: list[int], processed: Tensor | None) -> Tensor:
        """Choose the tokens of the group's rows at random; the rows' largest values."""
        positions = np.array([sequence.num_output_tokens for sequence in group.sequences], dtype=np.uint64)
        keys = torch.from_numpy(draw_keys(group.mixed_seeds, positions).view(np.int64)).to(logits.device)
        if group.keeps_survivors:
            assert processed is not None, "kept for such rows"
            chosen, largest, survivors = kernels.draw_with_survivors(logits, group.index, group.rules, keys)
            processed[group.index] = survivors
        else:
            chosen, largest = kernels.draw(logits, group.index, group.rules, keys)
        for row, token_id in zip(group.rows, chosen.tolist(), strict=True):
            token_ids[row] = token_id
        return largest

    # Log-probabilities

    def _snapshot(self, rows: Tensor) -> Tensor:
        return rows.float().clone() if self._takes_logits else torch.log_softmax(rows.float(), dim=-1)

    def _gather_logprobs(self, values: Tensor, batch: _Batch, token_ids: list[int]) -> list[PositionLogprobs]:
        sequences = [batch.sequences[row] for row in batch.logprob_rows]
        chosen = [token_ids[row] for row in batch.logprob_rows]
        widths = [_num_top(sequence.params.logprobs, values.shape[1]) for sequence in sequences]
        positions = position_logprobs(values, chosen, widths)
        for row, sequence in enumerate(sequences):
            if sequence.params.logprob_token_ids:
                positions[row][1:] = _scored(values[row], sequence.params.logprob_token_ids)
        return positions

    def _take_prompt_logprobs(self, logits: Tensor, item: ScheduledSequence) -> None:
        """Append what the rows of one chunk say about the prompt tokens that follow them."""
        sequence = item.sequence
        first_position = item.start + item.num_tokens - item.num_logits
        next_position = max(1, len(sequence.prompt_logprobs))
        skip = next_position - 1 - first_position
        targets = sequence.token_ids[
            next_position : min(item.start + item.num_tokens, sequence.num_prompt_tokens - 1) + 1
        ]
        if skip < 0 or not targets:
            return
        values = self._snapshot(logits[skip : skip + len(targets)])
        width = _num_top(sequence.params.prompt_logprobs, values.shape[1])
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        sequence.prompt_logprobs.extend(position_logprobs(values, targets, [width] * len(targets)))


def _choose_greedily(logits: Tensor, rows: SequenceABC[int], token_ids: list[int], largest: Tensor) -> None:
    """Write the token and the largest value of each of the rows to their places."""
    if not rows:
        return
    is_all = len(rows) == logits.shape[0]
    if is_all or logits.device.type != "cpu":
        index = torch.arange(logits.shape[0]) if is_all else torch.tensor(rows)
        index = index.to(logits.device)
        own = logits if is_all else logits[index]
        best, values_found = kernels.largest(own)
        largest[index] = torch.tensor(values_found, device=logits.device)
        for row, token_id in zip(rows, best, strict=True):
            token_ids[row] = token_id
        return
    values, found = logits.numpy(), largest.numpy()
    for row in rows:  # one by one: copying the rows would cost more than looking at them
        token_id = int(values[row].argmax())
        token_ids[row], found[row] = token_id, values[row, token_id]


def position_logprobs(values: Tensor, chosen: list[int], widths: list[int]) -> list[PositionLogprobs]:
    """For each row: the chosen token, then the `widths[row]` largest. values (R, V): log-probabilities or logits."""
    ids = torch.tensor(chosen, dtype=torch.int64, device=values.device).unsqueeze(1)
    own = values.gather(1, ids)
    ranks: list[int] = (values >= own).sum(1).tolist()
    own_values: list[float] = own.squeeze(1).tolist()
    widest = max(widths)
    top_values: list[list[float]] = [[]] * len(chosen)
    top_ids: list[list[int]] = top_values  # type: ignore[assignment]
    if widest:
        top = values.topk(widest, dim=1)
        top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return [
        [
            Logprob(token_id, own_values[row], ranks[row]),
            *(Logprob(top_ids[row][i], top_values[row][i], i + 1) for i in range(widths[row])),
        ]
        for row, token_id in enumerate(chosen)
    ]


def _scored(values: Tensor, token_ids: tuple[int, ...]) -> PositionLogprobs:
    own = values[torch.tensor(token_ids, device=values.device)]
    ranks = (values.unsqueeze(0) >= own.unsqueeze(1)).sum(1).tolist()
    return [Logprob(*entry) for entry in zip(token_ids, own.tolist(), ranks, strict=True)]


def _num_top(wanted: int | None, vocab_size: int) -> int:
    if wanted is None:
        return 0
    return vocab_size if wanted == WHOLE_VOCABULARY else min(wanted, vocab_size)


def _apply_plugins(plugins: Iterable[BatchLogitsProcessor], logits: Tensor, errors: dict[int, str]) -> None:
    """Let plug-ins edit the rows in place. One that fails ends the sequences of this step, since it edits them all."""
    for plugin in plugins:
        try:
            edited = plugin.apply(logits)
            if edited is not logits:
                logits.copy_(edited)
        except Exception as error:  # somebody else's code: the engine must outlive it
            logger.exception("logits processor %s failed", type(plugin).__name__)
            message = f"logits processor {type(plugin).__name__} failed: {error!r}"
            errors.update(dict.fromkeys(range(logits.shape[0]), message))


def _batch_update(before: list[Sequence], now: list[Sequence]) -> BatchUpdate:
    old_rows = {sequence.id: row for row, sequence in enumerate(before)}
    new_ids = {sequence.id for sequence in now}
    moved = []
    added = []
    for row, sequence in enumerate(now):
        old_row = old_rows.get(sequence.id)
        if old_row is None:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            added.append(AddedRow(row, sequence.params, prompt, OutputTokens(sequence)))
        elif old_row != row:
            moved.append((old_row, row))
    removed = [row for row, sequence in enumerate(before) if sequence.id not in new_ids]
    return BatchUpdate(len(now), removed, moved, added)
