"""Decides which sequences a step runs and how many tokens of each, and books what came back. Host only: no torch.

There is no prefill phase and no decode phase: every pass gives running sequences first, then waiting ones, some tokens
of one budget, until what is computed catches up with what is known. The scheduler knows tokens and blocks, not text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from vkit.cache.connector import TransferReport
from vkit.cache.manager import KVCacheManager, PrefixHit
from vkit.cache.media import MediaCache
from vkit.cache.transfer import NO_OFFER, KVTransfer, Offer, Outcome, is_waiting_loaded
from vkit.policies import make_policy
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus, SequenceUpdate, StepSamples
from vkit.speculation.stats import DraftStats
from vkit.types import GRAMMAR_FAULT, FinishReason, PositionLogprobs

logger = logging.getLogger("vkit.scheduler")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one sequence per step; 0 = no such limit."""
    max_num_partial_prefills: int = 0
    """Most prompts that may be half computed at a time; 0 = no such limit."""
    max_long_partial_prefills: int = 0
    """Most of those that may be long; 0 = no such limit."""
    full_sequence_must_fit: bool = True
    """Admit a prompt only if the blocks for all of it are free."""
    max_loras: int = 0
    """Most different adapters among running sequences; 0 = no such limit."""
    watermark: float = 0.0
    """Share of the blocks that admission leaves free while others run."""
    max_num_encoder_input_tokens: int = 0
    """Most prompt tokens whose media one step encodes, and most that are kept encoded; 0 = the token budget."""
    disable_chunked_mm_input: bool = False
    """A step computes all tokens of a media item or none."""

    @property
    def long_prompt_tokens(self) -> int:
        """Tokens above which a prompt counts as long."""
        return self.long_prefill_token_threshold or max(1, self.max_model_len * 4 // 100)


@dataclass(slots=True)
class _Pass:
    """One scheduling pass under construction."""

    budget: int
    items: dict[str, ScheduledSequence]
    num_preempted: int = 0


class Scheduler:
    """Owns every sequence from arrival to end."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: KVCacheManager,
        *,
        policy: str = "fcfs",
        jumps_forward: bool = False,
        max_drafts: int = 0,
        num_lookahead: int = 0,
        transfer: KVTransfer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`jumps_forward`: tokens that a grammar leaves no choice about are appended without being sampled.

        `max_drafts`: most drafts of a sequence per step. `num_lookahead`: slots that a drafter writes beyond the tokens
        of a step, given where there is room.
        """
        self.limits = limits
        self.cache = cache
        encoder_budget = limits.max_num_encoder_input_tokens or limits.max_num_batched_tokens
        self.media = MediaCache(encoder_budget, encoder_budget, splits_items=not limits.disable_chunked_mm_input)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_forced_tokens = 0
        """Tokens appended without being sampled."""
        self.num_dropped_tokens = 0
        """Tokens that came back for sequences already ended."""
        self.draft_stats = DraftStats(max_drafts)
        self._num_lookahead = num_lookahead
        self._policy = make_policy(policy, caches_prefixes=cache.caches_prefixes)
        self._sequences: dict[str, Sequence] = {}
        self._deferred: dict[str, Sequence] = {}
        self._ended: list[Sequence] = []
        self._finished_ids: list[str] = []
        self._step = 0
        self._num_reserved = int(limits.watermark * cache.pool.num_usable)
        self._jumps_forward = jumps_forward
        self._transfer = transfer
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        """Sequences not running yet, or not any more."""
        return len(self._policy)

    @property
    def num_deferred(self) -> int:
        """Waiting sequences that could not start even with room: a grammar or cache entries are on the way."""
        return len(self._deferred)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._sequences)

    def waiting(self) -> list[Sequence]:
        """Sequences not running yet, or not any more, in no order."""
        return [item for item in list(self._sequences.values()) if item.status is not SequenceStatus.RUNNING]

    def get(self, sequence_id: str) -> Sequence | None:
        """The sequence of that id, unless it has ended."""
        return self._sequences.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.queued_time = sequence.arrival_time
        if sequence.pending_grammar is not None:
            sequence.status = SequenceStatus.WAITING_FOR_GRAMMAR
            self._deferred[sequence.id] = sequence
        if any(placed.item.sees_itself for placed in sequence.media):
            sequence.skips_external = True  # a load could end amid tokens that see each other
        self._sequences[sequence.id] = sequence
        self._policy.add(sequence)

    def abort(self, sequence_id: str) -> bool:
        """End a sequence in whatever state it is; False when it has ended already or is unknown."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self.finish(sequence, FinishReason.ABORT)
        return True

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence now. Its blocks are free at once, or once the last step that names it has run."""
        if sequence.is_finished:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self._policy.remove(sequence)
            self._deferred.pop(sequence.id, None)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        del self._sequences[sequence.id]
        self._finished_ids.append(sequence.id)
        if self._transfer is not None:
            self._transfer.finished(sequence)
        self.media.give_back(sequence)
        self._release(sequence)

    def take_ended(self) -> list[Sequence]:
        """Sequences that ended while planning, in an error of their own."""
        ended, self._ended = self._ended, []
        return ended

    def schedule(self, max_num_seqs: int = 0) -> Plan | None:
        """The next step, or None when no sequence can go on. Counts its tokens as computed from now on.

        `max_num_seqs`, if given, is a lower limit on running sequences for this step alone.
        """
        self.cache.begin_pass()
        self.media.begin_pass()
        work = _Pass(budget=self.limits.max_num_batched_tokens, items={})
        self._schedule_running(work)
        if not work.num_preempted:
            self._admit_waiting(work, max_num_seqs or self.limits.max_num_seqs)
            if not work.items:
                self._fail_if_stuck()
        if self._transfer is not None:
            self._transfer.end_pass()
        if not work.items:
            return None
        for item in work.items.values():
            sequence = item.sequence
            sequence.num_computed_tokens += item.num_tokens
            sequence.num_in_flight += 1
            if item.samples:
                sequence.num_output_placeholders += 1 + item.num_drafts
        self._step += 1
        finished_ids, self._finished_ids = self._finished_ids, []
        copies, media = self.cache.take_state_copies(), self.media.take_orders()
        return Plan(self._step, list(work.items.values()), finished_ids, copies, media=media)

    def drop_finished(self, plan: Plan) -> None:
        """Take sequences out of a plan not yet run that ended since it was made.

        One stays in if it was about to write blocks that others may already count on.
        """
        kept = []
        for item in plan.scheduled:
            sequence = item.sequence
            if plan.step <= sequence.void_step:
                self._drop_void(item)
            elif sequence.is_finished and not self.cache.has_registered_in_pass(sequence):
                sequence.num_in_flight -= 1
                self._release(sequence)
            else:
                kept.append(item)
        plan.scheduled = kept
        if not kept:
            self.media.clear()  # a plan that holds nothing does not run, nor do its orders

    def take_in_forced(self, plan: Plan) -> None:
        """Bring a plan made ahead up to date with tokens that were appended without being sampled since.

        They join their sequence's chunk; where that is not possible, the chunk yields no token.
        """
        budget = self.limits.max_num_batched_tokens - plan.num_tokens
        for item in plan.scheduled:
            sequence = item.sequence
            num_new = len(sequence.token_ids) - item.start - item.num_tokens
            if num_new <= 0 or not item.samples or sequence.is_finished:
                continue
            if num_new <= budget and not self.cache.aligns_chunks and self.cache.allocate(sequence, num_new):
                item.num_tokens += num_new
                sequence.num_computed_tokens += num_new
                budget -= num_new
            else:
                item.samples, item.num_logits = False, 0
                sequence.num_output_placeholders -= 1

    def set_drafts(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Have the next step verify guesses at the tokens that follow the sequence's own.

        Ignored unless the next step brings a new token; cut to what the sequence has room and its grammar a place for.
        """
        if sequence.status is not SequenceStatus.RUNNING or not sequence.is_caught_up:
            return
        room = sequence.max_total_tokens - len(sequence.token_ids) - 1
        drafts = token_ids[: max(0, min(room, self.draft_stats.max_drafts))]
        if drafts and sequence.grammar is not None:
            drafts = sequence.grammar.validate_tokens(drafts)
        sequence.draft_token_ids = drafts

    def discard(self, plan: Plan) -> None:
        """Forget a plan not yet run, all of whose sequences have ended."""
        for item in plan.scheduled:
            assert item.sequence.is_finished, "a plan with live sequences must run"
            self.cache.take_back_registrations(item.sequence)
            item.sequence.num_in_flight -= 1
            self._release(item.sequence)
        self.media.clear()

    def preempt_all(self, *plans: Plan | None) -> None:
        """Make every running sequence give up its blocks, and forget these plans, which never ran to their end."""
        for plan in plans:
            for item in plan.scheduled if plan is not None else ():
                sequence = item.sequence
                sequence.num_in_flight -= 1
                if item.samples:
                    sequence.num_output_placeholders -= 1 + item.num_drafts
                if sequence.is_finished:
                    self._release(sequence)
        work = _Pass(budget=0, items={})
        while self.running:
            self._preempt(self.running[-1], work)
        self.media.clear()

    def commit(self, plan: Plan, samples: StepSamples) -> list[SequenceUpdate]:
        """Book a step's tokens; the result names every sequence that got tokens or ended."""
        updates = []
        for index, item in enumerate(plan.scheduled):
            sequence = item.sequence
            sequence.num_in_flight -= 1
            token_ids = samples.token_ids[index]
            if item.samples:
                sequence.num_output_placeholders -= 1 + item.num_drafts
            if sequence.status is SequenceStatus.FINISHED or plan.step <= sequence.void_step:
                self.num_dropped_tokens += len(token_ids)
                if sequence.is_finished:
                    self._release(sequence)
                continue
            if samples.errors and index in samples.errors:
                self.finish(sequence, FinishReason.ERROR, error=samples.errors[index])
                updates.append(SequenceUpdate(sequence, []))
            elif index in samples.complete:
                self.finish(sequence, FinishReason.STOP)
                updates.append(SequenceUpdate(sequence, []))
            elif item.samples:
                num_accepted = self._settle_drafts(item, token_ids) if item.num_drafts else 0
                update = self._append_or_fail(sequence, token_ids, samples.logprobs[index])
                update.num_drafts, update.num_accepted = item.num_drafts, num_accepted
                updates.append(update)
        return updates

    def settle_transfers(self, report: TransferReport) -> list[SequenceUpdate]:
        """Book how loads and sends went, before the step they belong to is committed."""
        assert self._transfer is not None
        outcomes, released = self._transfer.settle(report)
        updates = []
        for outcome in outcomes:
            sequence = outcome.sequence
            if outcome.is_async:
                self._deferred.pop(sequence.id, None)
            if sequence.is_finished:
                continue
            if outcome.is_async:
                sequence.status = SequenceStatus.WAITING
            if outcome.is_whole:
                if sequence.is_loading:
                    sequence.is_loading = False
                    self.cache.register_loaded(sequence, outcome.num_good)
            elif self._recover(outcome):
                updates.append(SequenceUpdate(sequence, []))
        for sequence in released:
            self._release(sequence)
        return updates

    def _recover(self, outcome: Outcome) -> bool:
        """After a load that failed: go back to the last good token, or end the sequence (then True)."""
        assert self._transfer is not None
        sequence, transfer = outcome.sequence, self._transfer
        transfer.note_failure(sequence, outcome.num_good)
        if not outcome.is_async:
            sequence.void_step = self._step
        if sequence.error is not None:
            self.finish(sequence, FinishReason.ERROR, error=sequence.error)
            return True
        if sequence.status is SequenceStatus.PREEMPTED:
            return False
        if any(num > outcome.num_good // self.cache.block_size for num in sequence.num_released_blocks):
            self._preempt(sequence, _Pass(budget=0, items={}))  # what it would go back to has been given away
            return False
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, outcome.num_good)
        sequence.num_external_tokens = outcome.num_good - outcome.start
        sequence.num_computed_tokens = outcome.num_good
        sequence.draft_token_ids.clear()
        sequence.is_loading = False
        self.cache.register_loaded(sequence, outcome.num_good)
        return False

    def _drop_void(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        sequence.num_in_flight -= 1
        if item.samples:
            sequence.num_output_placeholders -= 1 + item.num_drafts
        if sequence.is_finished:
            self._release(sequence)

    def _schedule_running(self, work: _Pass) -> None:
        index = 0
        while index < len(self.running) and work.budget > 0:
            sequence = self.running[index]
            want = self._num_wanted(sequence, work.budget, len(self.running) - 1 - index)
            if want <= 0:
                index += 1
                continue
            while not self._allocate_next(sequence, want):
                if num_drafts := self._num_drafts_in(sequence, want):
                    want -= num_drafts  # a guess is not worth anybody's blocks
                    continue
                victim = self._policy.victim(self.running)
                position = self.running.index(victim)
                self._preempt(victim, work)
                if victim is sequence:
                    return
                if position < index:
                    index -= 1
            self._record(sequence, sequence.num_computed_tokens, want, work)
            index += 1

    def _allocate_next(self, sequence: Sequence, want: int) -> bool:
        """Slots for the next tokens, and for the drafter's if there is room."""
        if self._num_lookahead and self.cache.allocate(sequence, want, num_lookahead=self._num_lookahead):
            return True
        return self.cache.allocate(sequence, want)

    @staticmethod
    def _num_drafts_in(sequence: Sequence, want: int) -> int:
        known = len(sequence.token_ids) + sequence.num_output_placeholders
        return max(0, sequence.num_computed_tokens + want - known)

    def _num_wanted(self, sequence: Sequence, budget: int, num_behind: int) -> int:
        """Tokens to give a running sequence that `num_behind` others still come after."""
        limits = self.limits
        placeholders = sequence.num_output_placeholders
        if placeholders and len(sequence.token_ids) + placeholders >= sequence.max_total_tokens:
            return 0  # the tokens under way end it
        computed = sequence.num_computed_tokens
        want = sequence.num_tokens_with_drafts - computed
        if want > 1 or sequence.media:
            if limits.long_prefill_token_threshold > 0:
                want = min(want, limits.long_prefill_token_threshold)
            want = min(want, budget, limits.max_model_len - 1 - computed)
            num_drafts = self._num_drafts_in(sequence, want)
            if num_drafts:  # they leave everyone behind a token of the budget
                want -= min(num_drafts, max(0, want + num_behind - budget))
            return self._cut(sequence, computed, want)
        return min(want, limits.max_model_len - 1 - computed)

    def _cut(self, sequence: Sequence, computed: int, want: int) -> int:
        """A chunk of at most `want` tokens, ended where it may end."""
        aligned = self._aligned(sequence, computed, want)
        capped = self.media.cap(sequence, computed, aligned)
        if not capped and aligned < want:
            return self.media.cap(sequence, computed, want)  # the boundary lies in an item that must stay whole
        return capped

    def _aligned(self, sequence: Sequence, computed: int, want: int) -> int:
        """Where states can be reused, end a chunk at the last block boundary it crosses."""
        if self.cache.aligns_chunks:
            boundary = (computed + want) // self.cache.block_size * self.cache.block_size
            if boundary > computed:
                return boundary - computed
        return want

    def _admit_waiting(self, work: _Pass, max_num_seqs: int) -> None:
        if not len(self._policy):
            return
        admitted: list[Sequence] = []
        rejected: list[Sequence] = []
        num_partial, num_long_partial = self._count_partial()
        for sequence in self._policy.order(self._hit_length):
            if work.budget <= 0 or len(self.running) + len(admitted) >= min(self.limits.max_num_seqs, max_num_seqs):
                break
            if self._is_deferred(sequence) or self._lacks_adapter_slot(sequence, admitted):
                continue
            if sequence.error is not None or not self.cache.fits_pool(sequence.num_tokens):
                rejected.append(sequence)
                continue
            hit = self.cache.find_hit(sequence)
            offer = NO_OFFER if self._transfer is None else self._transfer.offer(sequence, hit)
            if offer is None:
                continue  # asked again next step, in its old place
            if sequence.error is not None:
                rejected.append(sequence)
                continue
            others_run = bool(self.running or admitted)
            if offer.is_async:
                if not self._allocate_first(sequence, hit, offer, 0, others_run=others_run):
                    break
                self._begin_load(sequence, hit, offer)
                continue
            start = hit.num_tokens + offer.num_tokens
            want = self._num_admitted(sequence, start, work.budget)
            if want <= 0:
                continue  # its media cannot be encoded in this step
            is_partial = start + want < sequence.num_tokens
            is_long = sequence.num_tokens > self.limits.long_prompt_tokens
            if is_partial and not self._may_be_partial(num_partial, num_long_partial, is_long):
                break
            if not self._allocate_first(sequence, hit, offer, want, others_run=others_run):
                break
            num_partial += is_partial
            num_long_partial += is_partial and is_long
            self.cache.count_hit(sequence, hit)
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = start
            sequence.num_computed_tokens = start
            if self._transfer is not None:
                self._transfer.accept(sequence, hit, offer)
            self._record(sequence, start, want, work)
            admitted.append(sequence)
        now = self._clock() if admitted else 0.0
        for sequence in admitted:
            self._policy.remove(sequence)
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
        for sequence in rejected:
            self._reject(sequence)

    def _begin_load(self, sequence: Sequence, hit: PrefixHit, offer: Offer) -> None:
        """Let a sequence wait, with its blocks, until its cache entries have arrived."""
        assert self._transfer is not None
        self._transfer.accept(sequence, hit, offer)
        sequence.num_computed_tokens = hit.num_tokens + offer.num_tokens
        sequence.status = SequenceStatus.WAITING_FOR_REMOTE_KV
        self._deferred[sequence.id] = sequence

    def _lacks_adapter_slot(self, sequence: Sequence, admitted: list[Sequence]) -> bool:
        """Whether running this sequence now would mix more adapters than allowed."""
        adapter, limit = sequence.adapter, self.limits.max_loras
        if adapter is None or not limit:
            return False
        active = {item.adapter.key for item in (*self.running, *admitted) if item.adapter is not None}
        return adapter.key not in active and len(active) >= limit

    def _num_admitted(self, sequence: Sequence, start: int, budget: int) -> int:
        want = min(sequence.num_tokens - start, budget)
        if self.limits.long_prefill_token_threshold > 0:
            want = min(want, self.limits.long_prefill_token_threshold)
        return self._cut(sequence, start, want)

    def _may_be_partial(self, num_partial: int, num_long_partial: int, is_long: bool) -> bool:
        limits = self.limits
        if not limits.enable_chunked_prefill:
            return False
        if limits.max_num_partial_prefills and num_partial >= limits.max_num_partial_prefills:
            return False
        return not (
            is_long and limits.max_long_partial_prefills and num_long_partial >= limits.max_long_partial_prefills
        )

    def _count_partial(self) -> tuple[int, int]:
        """Running sequences whose prompt this step leaves half computed, and how many of them are long."""
        if not self.limits.max_num_partial_prefills and not self.limits.max_long_partial_prefills:
            return 0, 0
        partial = [sequence for sequence in self.running if sequence.is_prefilling]
        return len(partial), sum(1 for item in partial if item.num_tokens > self.limits.long_prompt_tokens)

    def _allocate_first(self, sequence: Sequence, hit: PrefixHit, offer: Offer, want: int, *, others_run: bool) -> bool:
        reserved = self._num_reserved if others_run else 0
        if self.limits.full_sequence_must_fit and not self.cache.can_hold_all(sequence, hit, reserved):
            return False
        if sequence.block_ids:
            return self.cache.allocate(sequence, want, num_reserved=reserved)
        return self.cache.allocate(sequence, want, hit, num_reserved=reserved, num_external=offer.num_tokens)

    def _hit_length(self, sequence: Sequence) -> int:
        return self.cache.find_hit(sequence).num_tokens

    def _is_deferred(self, sequence: Sequence) -> bool:
        if sequence.status is SequenceStatus.WAITING_FOR_GRAMMAR:
            pending = sequence.pending_grammar
            assert pending is not None, "a sequence that waits for its grammar has one pending"
            if not pending.done():
                return True
            failure = pending.exception()
            if failure is None:
                sequence.grammar = pending.result()
            else:
                sequence.error = f"structured output: {failure}"
            sequence.pending_grammar = None
            sequence.status = SequenceStatus.WAITING
            del self._deferred[sequence.id]
        # A token preempted in flight has yet to come back.
        return sequence.num_output_placeholders > 0 or sequence.status is SequenceStatus.WAITING_FOR_REMOTE_KV

    def _reject(self, sequence: Sequence) -> None:
        error = sequence.error or (
            f"{sequence.num_tokens} tokens need {self.cache.num_blocks_to_hold(sequence.num_tokens)} cache blocks, "
            f"the pool has {self.cache.pool.num_usable}"
        )
        self.finish(sequence, FinishReason.ERROR, error=error)
        self._ended.append(sequence)

    def _fail_if_stuck(self) -> None:
        """End the first waiting sequence when nothing runs and it still cannot: waiting longer would change nothing."""
        if self.running:
            return
        if self.cache.pool.num_free < self.cache.pool.num_usable:
            self._drop_idle_loads()
            return
        for sequence in self._policy.order(self._hit_length):
            if self._transfer is not None and not self._is_deferred(sequence) and not sequence.skips_external:
                # What a connector offers may be too large for the pool where computing it piece by piece is not.
                sequence.skips_external = not self._transfer.is_asking(sequence)
                return
            if not self._is_deferred(sequence):
                sequence.error = f"{sequence.num_tokens} tokens cannot be scheduled within the limits of one step"
                self._reject(sequence)
                return

    def _drop_idle_loads(self) -> None:
        """Nothing runs and nothing fits: take blocks from sequences that only wait with what was loaded for them."""
        if self._transfer is None or self._deferred:
            return
        for sequence in [item for item in self._sequences.values() if is_waiting_loaded(item)]:
            self.cache.free(sequence)
            sequence.num_computed_tokens = 0
            sequence.skips_external = True
            self._transfer.preempted(sequence)

    def _record(self, sequence: Sequence, start: int, want: int, work: _Pass) -> None:
        end = start + want
        known = len(sequence.token_ids) + sequence.num_output_placeholders
        samples = end >= known
        num_drafts = max(0, end - known)
        del sequence.draft_token_ids[num_drafts:]
        num_logits = 1 + num_drafts if samples else 0
        if sequence.wants_all_rows:
            num_logits = want
        elif sequence.wants_prompt_logprobs:
            first_row = max(start, len(sequence.prompt_logprobs) - 1)
            num_logits = max(num_logits, end - first_row)
        self.media.take(sequence, start, want)
        work.items[sequence.id] = ScheduledSequence(sequence, start, want, num_logits, samples, num_drafts)
        work.budget -= want

    def _preempt(self, victim: Sequence, work: _Pass) -> None:
        """Give up the victim's blocks; it computes everything again when it is its turn."""
        item = work.items.pop(victim.id, None)
        if item is not None:
            work.budget += item.num_tokens
        self.cache.take_back_registrations(victim)
        self.cache.free(victim)
        self.media.give_back(victim)
        self.running.remove(victim)
        if self._transfer is not None:
            self._transfer.preempted(victim)
        victim.status = SequenceStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.draft_token_ids.clear()
        victim.num_preemptions += 1
        victim.queued_time = self._clock()
        self._policy.add_preempted(victim)
        self.num_preemptions += 1
        work.num_preempted += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.num_in_flight == 0 and not (self._transfer is not None and self._transfer.holds(sequence)):
            self.cache.free(sequence)

    def _settle_drafts(self, item: ScheduledSequence, token_ids: list[int]) -> int:
        """How many drafts stood. What was computed for the others counts no more."""
        sequence = item.sequence
        drafts, sequence.draft_token_ids = sequence.draft_token_ids, []
        if sequence.status is not SequenceStatus.RUNNING:
            return 0
        accepted = sum(1 for draft, token_id in zip(drafts, token_ids, strict=False) if draft == token_id)
        self.draft_stats.book(item.num_drafts, accepted)
        sequence.num_verifications += 1
        sequence.num_draft_tokens += item.num_drafts
        sequence.num_accepted_tokens += accepted
        sequence.num_computed_tokens -= item.num_drafts + 1 - len(token_ids)
        self.cache.move_state(sequence, len(token_ids))
        return accepted

    def _append_or_fail(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[PositionLogprobs] | None
    ) -> SequenceUpdate:
        try:
            return self._append(sequence, token_ids, logprobs)
        except Exception as error:
            # Whatever a stop check, a detector or a grammar met, it is this sequence's own: the others go on.
            logger.exception("sequence %s failed", sequence.id)
            self.finish(sequence, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")
            return SequenceUpdate(sequence, [])

    def _append(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[PositionLogprobs] | None
    ) -> SequenceUpdate:
        """Append tokens one at a time up to the first that ends the sequence."""
        for count, token_id in enumerate(token_ids, 1):
            sequence.token_ids.append(token_id)
            if self._ends(sequence, token_id):
                return SequenceUpdate(sequence, token_ids[:count], logprobs[:count] if logprobs else logprobs)
        if self._jumps_forward and _may_jump(sequence):
            token_ids = token_ids + self._append_forced(sequence)
        return SequenceUpdate(sequence, token_ids, logprobs)

    def _append_forced(self, sequence: Sequence) -> list[int]:
        """Append the tokens that the grammar leaves no choice about, up to one that ends the sequence."""
        grammar = sequence.grammar
        assert grammar is not None
        forced: list[int] = []
        while not sequence.is_finished:
            token_id = grammar.forced_token()
            is_too_soon = sequence.num_output_tokens < sequence.params.min_tokens
            if token_id is None or (is_too_soon and token_id in sequence.stop_token_ids):
                break
            forced.append(token_id)
            sequence.token_ids.append(token_id)
            self._ends(sequence, token_id)
        self.num_forced_tokens += len(forced)
        return forced

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        """Whether the token just appended ends its sequence, which is then finished."""
        params = sequence.params
        num_tokens = len(sequence.token_ids)
        may_stop = num_tokens - sequence.num_prompt_tokens >= params.min_tokens
        if may_stop and token_id == sequence.eos_token_id and not params.ignore_eos:
            self.finish(sequence, FinishReason.STOP)
        elif may_stop and token_id in sequence.stop_token_ids:
            self.finish(sequence, FinishReason.STOP, stop_reason=token_id)
        elif sequence.grammar is not None and not sequence.grammar.accept_tokens([token_id]):
            self.finish(sequence, FinishReason.ERROR, error=f"{GRAMMAR_FAULT} refused token {token_id}")
        elif sequence.grammar is not None and sequence.grammar.is_terminated():
            self.finish(sequence, FinishReason.STOP)  # complete: an end token would say nothing more
        elif num_tokens >= sequence.max_total_tokens:
            self.finish(sequence, FinishReason.LENGTH)
        elif params.repetition_detection is not None and _repeats(sequence) and may_stop:
            self.finish(sequence, FinishReason.REPETITION, stop_reason="repetition_detected")
        else:
            return False
        return True


def _may_jump(sequence: Sequence) -> bool:
    """Whether a token the grammar forces is certain to be sampled, and nothing but its id is wanted."""
    params = sequence.params
    return sequence.grammar is not None and not (
        params.logprobs is not None
        or params.logprob_token_ids
        or params.allowed_token_ids is not None
        or sequence.bad_word_ids
        or params.logits_processors
    )


def _repeats(sequence: Sequence) -> bool:
    """Whether the output's tail is a pattern repeated often enough. Costs one comparison per pattern size."""
    rule = sequence.params.repetition_detection
    assert rule is not None
    runs = sequence.repetition_runs
    if not runs:
        # A pattern longer than the output can get never repeats, so its run needs no place.
        longest = min(rule.max_pattern_size, sequence.max_total_tokens - sequence.num_prompt_tokens)
        runs.extend([0] * (longest - rule.min_pattern_size + 1))
    token_ids = sequence.token_ids
    num_output = sequence.num_output_tokens
    found = False
    for index in range(len(runs)):
        size = rule.min_pattern_size + index
        same = num_output > size and token_ids[-1] == token_ids[-1 - size]
        runs[index] = runs[index] + 1 if same else 0
        found = found or runs[index] >= size * (rule.min_count - 1)
    return found
