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
from vkit.logits import AddedRow, BatchLogitsProcessor, BatchUpdate, RowEdits, apply_bitmask, edits_for, penalise
from vkit.randomness import draw_keys, mixed_seed
from vkit.sampled import PendingSamples, Readback, SampledTokens
from vkit.sequence import OutputTokens, Plan, ScheduledSequence, Sequence, StepSamples, with_drafts
from vkit.speculation.verification import num_accepted, verify_drawn
from vkit.staging import Staging
from vkit.structured.masks import FilledMasks, GrammarMasks
from vkit.token_logprobs import num_top, position_logprobs, scored_ids
from vkit.types import PositionLogprobs

logger = logging.getLogger("vkit.sampler")

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class _Batch:
    """Everything about a set of rows that stays the same while the set does."""

    sequences: list[Sequence]
    """Of each row; one that has drafts verified has several."""
    num_drafts: list[int]
    """Per row, how many of its sequence's drafts come before the token it yields."""
    edits: list[tuple[int, RowEdits]] = field(default_factory=list)
    grammars: list[int] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    random: list[_RandomRows] = field(default_factory=list)
    keeps_survivors: bool = False
    is_plain: bool = False
    """Every row is greedy, and nothing is edited or asked besides."""
    needs_host: bool = False
    """Some row is edited by what the host knows of its output, or is asked more of than its token."""


@dataclass(slots=True)
class _RandomRows:
    """Random rows and their parameters."""

    rows: list[int]
    sequences: list[Sequence]
    num_drafts: npt.NDArray[np.int64]
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
        self.draft_probs: dict[str, Tensor] = {}
        """Per sequence whose drafts were drawn at random: what from, (drafts, V) float32 probabilities."""
        self._edits: dict[str, RowEdits] = {}
        self._batch = _Batch([], [])
        self._device = torch.device("cpu")
        self._staging: Staging | None = None
        self._readback: Readback | None = None

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
        if items:
            if len(rows) != logits.shape[0]:
                logits = logits[torch.tensor(rows, device=logits.device)]
            batch = self._batch_of([plan.scheduled[index] for index in items], logits.device)
            if batch.is_plain and not self._changing and not self._invariant:
                self._take_largest(logits, items, plan, result)
            else:
                self._sample_rows(logits.float(), batch, items, plan, result)
        self.draft_probs.clear()
        return result

    def can_defer(self, plan: Plan) -> bool:
        """Whether the tokens of this plan can stay on the device: `begin` serves it then, else `sample` alone."""
        if self._changing or self._invariant or self.draft_probs:
            return False
        if any(item.num_logits and item.sequence.wants_prompt_logprobs for item in plan.scheduled):
            return False
        sequences = [item.sequence for item in plan.scheduled if item.samples]
        if sequences == self._batch.sequences:
            return not self._batch.needs_host
        return not any(item.num_drafts for item in plan.scheduled) and not any(map(self._needs_host, sequences))

    def _needs_host(self, sequence: Sequence) -> bool:
        """Whether choosing its token takes what the host knows of its output, or more than the token is asked for."""
        params = sequence.params
        edits = self._edits.get(sequence.id)
        if edits is None:
            edits = self._edits[sequence.id] = edits_for(sequence)
        return (
            bool(edits) or sequence.grammar is not None or params.logprobs is not None or bool(params.logprob_token_ids)
        )

    @torch.inference_mode()
    def begin(self, logits: Tensor, plan: Plan) -> PendingSamples:
        """Choose tokens on the device, without waiting for it. For plans that `can_defer`; logits (R, V) float32."""
        for sequence_id in plan.finished_ids:
            self._edits.pop(sequence_id, None)
        if self._staging is None or self._readback is None:
            self._staging, self._readback = Staging(logits.device), Readback(logits.device)
        items, rows = self._row_layout(logits, plan)
        scheduled = [plan.scheduled[index] for index in items]
        if len(rows) != logits.shape[0]:
            logits = logits.index_select(0, *self._staging.upload([np.array(rows, np.int64)]))
        batch = self._batch_of(scheduled, logits.device)
        ids, largest = kernels.largest_rows(logits)
        for group in batch.random:
            # Where the token will stand, which the host knows although it may not know the one before.
            own = [scheduled[row] for row in group.rows]
            places = [item.start + item.num_tokens - item.sequence.num_prompt_tokens for item in own]
            found_keys = draw_keys(group.mixed_seeds, np.array(places, np.int64).view(np.uint64)).view(np.int64)
            chosen, found = kernels.draw(logits, group.index, group.rules, self._staging.upload([found_keys])[0])
            ids[group.index] = chosen
            largest[group.index] = found
        sampled = SampledTokens(ids, {item.sequence.id: row for row, item in enumerate(scheduled)})
        return PendingSamples(sampled, items, self._readback.start(ids, largest))

    def finish(self, pending: PendingSamples, plan: Plan) -> StepSamples:
        """What `begin` chose, once the device is through with it."""
        token_ids, largest = pending.wait()
        count = len(plan.scheduled)
        result = StepSamples([[]] * count, [None] * count)
        errors: dict[int, str] = {}
        corrupted = _check_rows(largest, errors)
        self._collect(token_ids, [1] * len(pending.items), errors, corrupted, pending.items, plan, result)
        return result

    def _row_layout(self, logits: Tensor, plan: Plan) -> tuple[list[int], list[int]]:
        """Items that sample and their logits rows, several for one with drafts; prompt log-probabilities on the way."""
        items: list[int] = []
        rows: list[int] = []
        row = 0
        for index, item in enumerate(plan.scheduled):
            if item.num_logits > 1 and item.sequence.wants_prompt_logprobs:
                self._take_prompt_logprobs(logits[row : row + item.num_logits], item)
            row += item.num_logits
            if item.samples:
                items.append(index)
                rows.extend(range(row - 1 - item.num_drafts, row))
            elif item.num_logits == 1 and item.sequence.wants_prompt_logprobs:
                self._take_prompt_logprobs(logits[row - 1 : row], item)
        return items, rows

    @torch.inference_mode()
    def _sample_rows(self, logits: Tensor, batch: _Batch, items: list[int], plan: Plan, result: StepSamples) -> None:
        raw = None
        if batch.logprob_rows and not self._takes_processed:
            raw = self._snapshot(logits[torch.tensor(batch.logprob_rows, device=logits.device)])
        errors = self._edit(logits, batch, plan)
        corrupted: set[int] = set()
        num_rows = logits.shape[0]
        token_ids = [0] * num_rows
        largest = torch.zeros(num_rows, device=logits.device)
        # Only an invariant plug-in parts what is judged from what is drawn from; else a random row is read once.
        judges_first = bool(self._invariant)
        _choose_greedily(logits, range(num_rows) if judges_first else batch.greedy, token_ids, largest)
        if judges_first:
            corrupted = _check_rows(largest.tolist(), errors)
            _apply_plugins(self._invariant, logits, errors)
        processed = logits.clone() if batch.keeps_survivors else None
        for group in batch.random:
            found = self._draw(logits, group, token_ids, processed)
            largest[group.index] = found
        if not judges_first:
            corrupted = _check_rows(largest.tolist(), errors)
        counts = self._verify([plan.scheduled[index] for index in items], processed, token_ids, errors)
        logprobs: dict[int, PositionLogprobs] = {}
        if batch.logprob_rows:
            if raw is None:
                source = processed if processed is not None else logits
                raw = self._snapshot(source[torch.tensor(batch.logprob_rows, device=logits.device)])
            found_logprobs = self._gather_logprobs(raw, batch, token_ids)
            logprobs = dict(zip(batch.logprob_rows, found_logprobs, strict=True))
        self._collect(token_ids, counts, errors, corrupted, items, plan, result)
        row = 0
        for index, count in zip(items, counts, strict=True):
            if row in logprobs:
                result.logprobs[index] = [logprobs[place] for place in range(row, row + count)]
            row += 1 + plan.scheduled[index].num_drafts

    @staticmethod
    def _collect(
        token_ids: list[int],
        counts: list[int],
        errors: dict[int, str],
        corrupted: set[int],
        items: list[int],
        plan: Plan,
        result: StepSamples,
    ) -> None:
        """Hand out what the rows (R,) say: `counts` tokens to each item, or its error."""
        row = 0
        for index, count in zip(items, counts, strict=True):
            result.token_ids[index] = token_ids[row : row + count]
            if row in errors:
                result.errors[index] = errors[row]
                result.num_corrupted += row in corrupted
            row += 1 + plan.scheduled[index].num_drafts

    def _verify(
        self, items: list[ScheduledSequence], processed: Tensor | None, token_ids: list[int], errors: dict[int, str]
    ) -> list[int]:
        """Tokens that each item gets: drafts found right, and one more. `token_ids` (R,) is corrected in place.

        Where a row that is reached has failed, the tokens before it stand; the sequence meets the failure again by
        itself, as it would without drafts.
        """
        counts = []
        row = 0
        for item in items:
            count = 1
            if item.num_drafts:
                rows = slice(row, row + 1 + item.num_drafts)
                drafts = item.sequence.draft_token_ids[: item.num_drafts]
                probs = self.draft_probs.get(item.sequence.id)
                if probs is not None and not item.sequence.params.is_greedy:
                    assert processed is not None, "kept for drafts that were drawn"
                    tokens = verify_drawn(processed[rows], probs, drafts, token_ids[rows], item.sequence)
                    count = len(tokens)
                    token_ids[row : row + count] = tokens
                else:
                    count = 1 + num_accepted(drafts, token_ids[rows])
                failed = next((place for place in range(count) if row + place in errors), 0)
                count = failed or count
            counts.append(count)
            row += 1 + item.num_drafts
        return counts

    def _take_largest(self, logits: Tensor, items: list[int], plan: Plan, result: StepSamples) -> None:
        """Tokens of a batch in which every row is greedy and nothing is edited or asked besides."""
        token_ids, largest = kernels.largest(logits)
        errors: dict[int, str] = {}
        corrupted = _check_rows(largest, errors)
        counts = [1] * len(items)
        if len(token_ids) > len(items):
            counts = self._verify([plan.scheduled[index] for index in items], None, token_ids, errors)
        self._collect(token_ids, counts, errors, corrupted, items, plan, result)

    # Composition

    def _batch_of(self, items: list[ScheduledSequence], device: torch.device) -> _Batch:
        sequences = [item.sequence for item in items]
        num_drafts = [0] * len(items)
        if any(item.num_drafts for item in items):
            sequences = [item.sequence for item in items for _ in range(1 + item.num_drafts)]
            num_drafts = [place for item in items for place in range(1 + item.num_drafts)]
        before = self._batch
        is_same = sequences == before.sequences and num_drafts == before.num_drafts
        plugins = self._changing + self._invariant
        if plugins:
            update = None if is_same and not any(num_drafts) else _batch_update(before, sequences, num_drafts)
            for plugin in plugins:
                plugin.update_state(update)
        if is_same and not self.draft_probs:
            return before
        self._device = device
        self._batch = self._new_batch(sequences, num_drafts)
        return self._batch

    def _new_batch(self, sequences: list[Sequence], num_drafts: list[int]) -> _Batch:
        batch = _Batch(sequences, num_drafts)
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
                keeps = (self._takes_processed and has_logprobs) or sequence.id in self.draft_probs
                random[keeps].append(row)
        batch.keeps_survivors = bool(random[True])
        batch.is_plain = len(batch.greedy) == len(sequences) and not (
            batch.edits or batch.grammars or batch.logprob_rows
        )
        batch.needs_host = bool(batch.edits or batch.grammars or batch.logprob_rows or any(num_drafts))
        batch.random = [self._random_rows(batch, rows, keeps) for keeps, rows in random.items() if rows]
        return batch

    def _random_rows(self, batch: _Batch, rows: list[int], keeps_survivors: bool) -> _RandomRows:
        own = [batch.sequences[row] for row in rows]
        params = [sequence.params for sequence in own]
        return _RandomRows(
            rows=rows,
            sequences=own,
            num_drafts=np.array([batch.num_drafts[row] for row in rows], dtype=np.int64),
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
                with with_drafts(batch.sequences[row], batch.num_drafts[row]):
                    for edit in edits.before_penalties:
                        edit.apply(logits[row])
            except Exception as error:  # a processor of the request's own: it fails that request alone
                logger.warning("logits processor of sequence %s failed: %r", batch.sequences[row].id, error)
                errors[row] = f"logits processor failed: {error!r}"
        _apply_plugins(self._changing, logits, errors)
        self._penalise(logits, batch)
        for row, edits in batch.edits:
            if edits.thinking is not None:
                with with_drafts(batch.sequences[row], batch.num_drafts[row]):
                    edits.thinking.apply(logits[row], batch.num_drafts[row])
        return errors

    @staticmethod
    def _penalise(logits: Tensor, batch: _Batch) -> None:
        """Make used tokens less likely in all rows that ask for it."""
        rows, used = [], []
        for row, edits in batch.edits:
            if edits.penalties is not None:
                with with_drafts(batch.sequences[row], batch.num_drafts[row]):
                    used.append(edits.penalties.used(batch.num_drafts[row]))
                rows.append(row)
        if rows:
            penalise(logits, rows, used)

    def _mask_by_grammars(self, logits: Tensor, batch: _Batch, plan: Plan) -> dict[int, str]:
        """Apply the step's grammar masks; errors by row."""
        if not batch.grammars:
            return {}
        if self._pending_masks is None:
            self.begin_masks(plan)
        assert self._pending_masks is not None, "a batch with grammars has masks"
        masks, self._pending_masks = self._pending_masks.result(), None
        ids = [batch.sequences[row].id for row in batch.grammars]
        places = [masks.rows[name].start + batch.num_drafts[row] for row, name in zip(batch.grammars, ids, strict=True)]
        apply_bitmask(logits, batch.grammars, masks.words[places])
        return {row: masks.errors[name] for row, name in zip(batch.grammars, ids, strict=True) if name in masks.errors}

    def _draw(self, logits: Tensor, group: _RandomRows, token_ids: list[int], processed: Tensor | None) -> Tensor:
        """Choose the tokens of the group's rows at random; the rows' largest values."""
        positions = np.array([sequence.num_output_tokens for sequence in group.sequences], dtype=np.int64)
        positions += group.num_drafts
        keys = torch.from_numpy(draw_keys(group.mixed_seeds, positions.view(np.uint64)).view(np.int64)).to(
            logits.device
        )
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
        widths = [num_top(sequence.params.logprobs, values.shape[1]) for sequence in sequences]
        positions = position_logprobs(values, chosen, widths)
        for row, sequence in enumerate(sequences):
            if sequence.params.logprob_token_ids:
                positions[row][1:] = scored_ids(values[row], sequence.params.logprob_token_ids)
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
        width = num_top(sequence.params.prompt_logprobs, values.shape[1])
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        sequence.prompt_logprobs.extend(position_logprobs(values, targets, [width] * len(targets)))


def _check_rows(largest: SequenceABC[float], errors: dict[int, str]) -> set[int]:
    """Add an error for every row whose largest value is no number; the rows that held NaN or infinity."""
    corrupted = set()
    for row, value in enumerate(largest):
        if math.isfinite(value) or row in errors:
            continue
        if value == -math.inf:
            errors[row] = "no token is allowed by the constraints on this output"
        else:
            errors[row] = "the model's logits are not finite"
            corrupted.add(row)
    return corrupted


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


def _batch_update(before: _Batch, sequences: list[Sequence], num_drafts: list[int]) -> BatchUpdate:
    """What became of the rows. Those after drafts live for one step."""
    old_rows = {
        sequence.id: row
        for row, (sequence, drafts) in enumerate(zip(before.sequences, before.num_drafts, strict=True))
        if not drafts
    }
    new_ids = {sequence.id for sequence in sequences}
    moved = []
    added = []
    for row, (sequence, drafts) in enumerate(zip(sequences, num_drafts, strict=True)):
        old_row = None if drafts else old_rows.get(sequence.id)
        if old_row is None:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            output = OutputTokens(sequence)
            shown = [*output, *sequence.draft_token_ids[:drafts]] if drafts else output
            added.append(AddedRow(row, sequence.params, prompt, shown))
        elif old_row != row:
            moved.append((old_row, row))
    removed = [
        row
        for row, (sequence, drafts) in enumerate(zip(before.sequences, before.num_drafts, strict=True))
        if drafts or sequence.id not in new_ids
    ]
    return BatchUpdate(len(sequences), removed, moved, added)
