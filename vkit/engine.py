"""One model serving many requests: plan a step, run it, choose tokens, book them.

The engine is used from one thread. It knows no event loop, no HTTP and no files; `vkit.loading` builds one from a
checkpoint.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from vkit.cache.blocks import BlockLifetimes, BlockPool
from vkit.cache.connector import KVConnector, TransferReport
from vkit.cache.events import CacheEvents
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.cache.manager import KVCacheManager
from vkit.cache.prefix import BlockHasher
from vkit.cache.transfer import POLL_INTERVAL_S, KVTransfer
from vkit.errors import EngineDeadError, InvalidRequest, UsageError
from vkit.inputs import EngineRequest
from vkit.logits import BatchLogitsProcessor
from vkit.metrics import SLEEP_STATES, EngineMetrics, EngineStats, MetricFamily, Sample, gauge
from vkit.outputs import OutputProcessor
from vkit.pooling import Pooler, Pooling
from vkit.sampler import Sampler
from vkit.scheduler import Scheduler, SchedulerLimits
from vkit.sequence import Plan, Sequence, SequenceUpdate
from vkit.speculation.proposer import Proposer
from vkit.text.tokenizer import Tokenizer
from vkit.types import CompletionOutput, FinishReason, RequestOutput

if TYPE_CHECKING:
    from torch import Tensor

    from vkit.sampled import PendingSamples, SampledTokens

logger = logging.getLogger("vkit.engine")

MAX_UNREAD_STEPS = 65536

LOG_INTERVAL_S = 10.0


class ForwardPass(Protocol):
    """The part of a runner the engine needs."""

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None, /) -> Any:
        """Host work of a step; must be done before the next plan is made.

        `sampled` is given only to a runner whose engine keeps tokens on the device.
        """

    def execute(self, batch: Any) -> Tensor:
        """Logits (R, V) float32 of a prepared step."""


class TransferControl(Protocol):
    """What a runner adds that moves cache entries for a connector."""

    def exchange(self, meta: Any) -> None:
        """Load and store what `meta` asks for, without a step."""

    def transfer_report(self) -> TransferReport:
        """What became of loads and sends since the last call."""


class SleepControl(Protocol):
    """What a runner that can sleep adds."""

    def sleep(self, level: int) -> None:
        """Give up the cache, and at level 2 the weights."""

    def wake_up(self, tags: frozenset[str]) -> None:
        """Bring back "weights", "kv_cache" or both."""


class PauseMode(StrEnum):
    """What happens to requests under way when generation is paused."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that has been launched and not been booked."""

    plan: Plan
    pending: PendingSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What the engine itself needs to know; the rest is in the parts it is given."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    vocab_size: int
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    prefix_caching_seed: str | None = None
    async_scheduling: bool = False
    keeps_tokens_on_device: bool = False
    """With `async_scheduling`: launch a step before the host knows the tokens of the one before. Else the next step is
    planned, and no more, while this one runs."""
    logprobs_mode: str = "raw_logprobs"
    seed: int | None = None
    cache_dtype: str = "float32"
    """How keys and values are kept; for display."""
    measures_blocks: bool = False
    enable_jump_forward: bool = False
    loads_kv: bool = True
    """Whether a connector may bring cache entries in."""
    recomputes_kv: bool = False
    """Whether entries that fail to load are computed; else their request ends in an error."""
    pooling: Pooling | None = None
    """Set where the model embeds: prompts end with a vector, and nothing is generated."""


class Engine:
    """Requests in, outputs out, one step at a time."""

    def __init__(
        self,
        settings: EngineSettings,
        runner: ForwardPass,
        groups: list[CacheGroup],
        tokenizer: Tokenizer | None,
        *,
        plugins: Iterable[BatchLogitsProcessor] = (),
        proposer: Proposer | None = None,
        connector: KVConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.enable_prefix_caching and any(group.kind is CacheKind.STATE for group in groups):
            _check_copies_states(runner)
        self.settings = settings
        self.runner = runner
        self.proposer = proposer
        max_drafts = proposer.max_drafts if proposer is not None else 0
        self.metrics = EngineMetrics(
            settings.limits.max_model_len, measures_blocks=settings.measures_blocks, max_drafts=max_drafts
        )
        self.events = CacheEvents()
        self.pool = BlockPool(settings.num_blocks, self.events)
        if self.metrics.blocks is not None:
            self.pool.lifetimes = BlockLifetimes(*self.metrics.blocks, clock)
        hasher = None
        if settings.enable_prefix_caching:
            hasher = BlockHasher(
                settings.block_size, settings.prefix_caching_hash_algo, seed=settings.prefix_caching_seed
            )
        self.cache = KVCacheManager(
            groups,
            self.pool,
            block_size=settings.block_size,
            max_model_len=settings.limits.max_model_len,
            max_step_tokens=settings.limits.max_num_batched_tokens,
            hasher=hasher,
            num_state_rows=1 + max_drafts,
            num_blocks_recomputed=int(proposer is not None and proposer.needs_hidden_states),
        )
        self._transfer = self._make_transfer(connector)
        end_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.sampler: Sampler | Pooler
        if settings.pooling is not None:
            self.sampler = Pooler(settings.pooling)
        else:
            self.sampler = Sampler(
                settings.vocab_size, logprobs_mode=settings.logprobs_mode, plugins=plugins, end_ids=end_ids
            )
        self.scheduler = Scheduler(
            settings.limits,
            self.cache,
            policy=settings.scheduling_policy,
            jumps_forward=settings.enable_jump_forward and not self.sampler.can_forbid,
            max_drafts=max_drafts,
            num_lookahead=proposer.num_lookahead if proposer is not None else 0,
            transfer=self._transfer,
            clock=clock,
        )
        self.outputs = OutputProcessor(tokenizer, self.metrics, clock=clock)
        self.sleep_level = 0
        self.is_stalled = False
        """Set while requests wait for something other than a step, such as a grammar being compiled."""
        self.wake: Callable[[], None] = lambda: None
        """Called from other threads when something a request waited for is ready."""
        self._step_tokens: deque[int] = deque(maxlen=MAX_UNREAD_STEPS)
        self._clock = clock
        self._logged_time = clock()
        self._logged: tuple[float, float] = (0.0, 0.0)
        self._seeds = random.Random(settings.seed)
        self._num_requests = 0
        self._ids: dict[str, list[str]] = {}
        """Caller's request id -> ids of its unfinished sequences."""
        self._owners: dict[str, str] = {}
        self._held: list[EngineRequest] = []
        self._pause: PauseMode | None = None
        self._ready: list[RequestOutput] = []
        self._pending_updates: list[SequenceUpdate] = []
        self._next_plan: Plan | None = None
        self._awake_parts: frozenset[str] = frozenset()
        self._failure: EngineDeadError | None = None
        self._retry_with = 0
        """Most sequences of the next step, after one that ran out of memory; 0: no such limit."""
        self._launches_ahead = settings.async_scheduling and settings.keeps_tokens_on_device
        if self._launches_ahead and (proposer is not None or connector is not None or settings.pooling is not None):
            raise ValueError("Engine: keeps_tokens_on_device, expected no proposer, connector or pooling beside it")
        self._flight: _Flight | None = None
        has_shadow = settings.async_scheduling and not self._launches_ahead
        self._shadow = ThreadPoolExecutor(1, "vkit-shadow") if has_shadow else None

    # Requests

    @property
    def has_work(self) -> bool:
        """Whether a step could bring something forward."""
        if self._ready or self._pending_updates or self._flight is not None:
            return True
        if self._next_plan is not None and not self._is_frozen:
            return True
        if self._transfer is not None and self._transfer.has_pending:
            return True
        return self.scheduler.has_unfinished and not self._is_frozen

    @property
    def poll_interval_s(self) -> float | None:
        """How long to wait for news before a step is tried again; None: until there is some."""
        return None if self._transfer is None else POLL_INTERVAL_S

    def _make_transfer(self, connector: KVConnector | None) -> KVTransfer | None:
        if connector is None:
            return None
        settings, metrics = self.settings, self.metrics

        def count(queries: int, hits: int) -> None:
            metrics.external_queries.add(queries)
            metrics.external_hits.add(hits)

        names_blocks = settings.enable_prefix_caching
        algorithm, seed = settings.prefix_caching_hash_algo, settings.prefix_caching_seed
        return KVTransfer(
            connector,
            self.cache,
            recomputes=settings.recomputes_kv,
            loads=settings.loads_kv,
            hasher=None if names_blocks else BlockHasher(settings.block_size, algorithm, seed=seed),
            events=self.events,
            count=count,
        )

    @property
    def num_unfinished(self) -> int:
        """Requests not yet ended, held ones included."""
        return len(self._ids) + len(self._held)

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held back."""
        return self._pause is not None or self.sleep_level > 0

    def add_request(self, request: EngineRequest) -> None:
        """Take in a request; its outputs come out of later steps. While paused it is held."""
        if self.is_paused:
            self._held.append(request)
            return
        sequences = self._sequences_of(request)
        keeps_logprobs = request.params.logprobs is not None or bool(request.params.logprob_token_ids)
        self.outputs.add(request, sequences, keeps_logprobs=keeps_logprobs)
        owned = self._ids.setdefault(request.id, [])
        for sequence in sequences:
            owned.append(sequence.id)
            self._owners[sequence.id] = request.id
            if sequence.pending_grammar is not None:
                sequence.pending_grammar.add_done_callback(lambda _: self.wake())
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is. Unknown and ended ones are passed over."""
        for held in [request for request in self._held if request.id == request_id]:
            self._held.remove(held)
            self._ready.append(_aborted(held))
        ended = []
        for sequence_id in list(self._ids.get(request_id, ())):
            sequence = self.scheduler.get(sequence_id)
            if sequence is not None:
                self.scheduler.finish(sequence, FinishReason.ABORT)
                ended.append(SequenceUpdate(sequence, []))
        self._report(ended)

    def fail(self, failure: EngineDeadError) -> None:
        """Have the next step fail, and wake who would run it: something the engine needs is gone. From any thread."""
        self._failure = failure
        self.wake()

    def abort_all(self) -> None:
        """End every request."""
        for request_id in [request.id for request in self._held] + list(self._ids):
            self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what callers may see of it. Empty when nothing can go on.

        Raises:
            EngineDeadError: `fail` was called.
        """
        if self._failure is not None:
            raise self._failure
        can_advance = not self._is_frozen and self.scheduler.has_unfinished
        if can_advance:
            self._report(self._launch_ahead() if self._launches_ahead else self._advance())
        elif self._transfer is not None and self._transfer.has_pending:
            self._report(self._exchange())
        if not can_advance or not self.scheduler.has_unfinished:
            self._drain()
        elif not self._has_shadow_ahead:
            self._settle()
        ready, self._ready = self._ready, []
        return ready

    @property
    def _has_shadow_ahead(self) -> bool:
        """Whether a next step is certain, in whose shadow callers can be told of this one."""
        if self.proposer is not None and self._shadow is not None:
            return not self.is_stalled
        return self._next_plan is not None

    def _launch_ahead(self) -> list[SequenceUpdate]:
        """Plan and launch a step, and book the one before while the device runs this one.

        A step whose rows depend on what the host knows of their outputs waits for the one before.
        """
        plan = self._take_plan()
        if plan is None:
            self.is_stalled = self._flight is None
            return self._land() + [SequenceUpdate(sequence, []) for sequence in self.scheduler.take_ended()]
        self.is_stalled = False
        assert isinstance(self.sampler, Sampler), "what pools launches nothing ahead"
        if not self.sampler.can_defer(plan):
            self._report(self._land())  # by itself: one report has a sequence once
            self.scheduler.drop_finished(plan)
            self.scheduler.take_in_forced(plan)
            return self._run(plan) if plan.scheduled else []
        logits = self._forward(plan)
        if logits is None:
            return []
        before, self._flight = self._flight, _Flight(plan, self.sampler.begin(logits, plan))
        updates = [] if before is None else self._book(before)
        return updates + [SequenceUpdate(sequence, []) for sequence in self.scheduler.take_ended()]

    def _land(self) -> list[SequenceUpdate]:
        """Wait for the step that was launched, and book it."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._book(flight)

    def _book(self, flight: _Flight) -> list[SequenceUpdate]:
        assert isinstance(self.sampler, Sampler), "what pools launches nothing ahead"
        samples = self.sampler.finish(flight.pending, flight.plan)
        self._observe_step(flight.plan, samples.num_corrupted)
        return self.scheduler.commit(flight.plan, samples)

    def _advance(self) -> list[SequenceUpdate]:
        """Plan, run, sample, book."""
        plan = self._take_plan()
        self.is_stalled = plan is None
        if plan is None:
            updates = [SequenceUpdate(sequence, []) for sequence in self.scheduler.take_ended()]
            return updates + self._exchange()
        return self._run(plan)

    def _run(self, plan: Plan) -> list[SequenceUpdate]:
        """Run a plan, sample, book."""
        logits = self._forward(plan)
        if logits is None:
            return []
        settled = self._settle_transfers()
        samples = self.sampler.sample(logits, plan)
        if self.proposer is not None:
            self.proposer.forget(plan.finished_ids)
            self.proposer.observe(plan, samples)
        self._observe_step(plan, samples.num_corrupted)
        updates = settled + self.scheduler.commit(plan, samples)
        if self.proposer is not None:
            self._draft(self.proposer, updates)
        self.metrics.forced_tokens.value = self.scheduler.num_forced_tokens
        updates.extend(SequenceUpdate(sequence, []) for sequence in self.scheduler.take_ended())
        return updates

    def _draft(self, proposer: Proposer, updates: list[SequenceUpdate]) -> None:
        """Have the sequences' next tokens guessed."""
        for update in updates:
            sequence = update.sequence
            if sequence.is_finished:
                continue
            if update.num_drafts:
                proposer.book(sequence, update.num_drafts, update.num_accepted)
            drafts = proposer.propose(sequence)
            self.scheduler.set_drafts(sequence, drafts.token_ids)
            if drafts.probs is not None and sequence.draft_token_ids:
                assert isinstance(self.sampler, Sampler), "what draws drafts generates"
                self.sampler.draft_probs[sequence.id] = drafts.probs
        if self.metrics.drafts is not None:
            self.scheduler.draft_stats.publish(self.metrics.drafts)

    def _exchange(self) -> list[SequenceUpdate]:
        """Let a connector work although no step runs."""
        if self._transfer is None or self.sleep_level:
            return []
        meta = self._transfer.build_meta(Plan(0, []))
        runner: TransferControl = self.runner  # type: ignore[assignment]
        runner.exchange(meta)
        return self._settle_transfers()

    def _settle_transfers(self) -> list[SequenceUpdate]:
        if self._transfer is None:
            return []
        runner: TransferControl = self.runner  # type: ignore[assignment]
        return self.scheduler.settle_transfers(runner.transfer_report())

    def _forward(self, plan: Plan) -> Tensor | None:
        """Logits of the plan's rows; None when memory ran out, which is taken care of."""
        shadow: Future[Plan | None] | None = None
        try:
            try:
                if self._transfer is not None:
                    plan.connector_meta = self._transfer.build_meta(plan)
                batch = self._prepare(plan)
                self.sampler.begin_masks(plan)
                shadow = self._start_shadow()
                logits = self.runner.execute(batch)
            finally:
                if shadow is not None:
                    self._next_plan = shadow.result()
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._make_room(plan, error)
            return None
        self._retry_with = 0
        return logits

    def _prepare(self, plan: Plan) -> Any:
        if self._flight is None:
            return self.runner.prepare(plan)
        return self.runner.prepare(plan, self._flight.pending.sampled)

    def _make_room(self, plan: Plan, error: Exception) -> None:
        """After a step that ran out of memory: try once more with half of its sequences, then give its sequences up."""
        self._report(self._land())
        ahead, self._next_plan = self._next_plan, None
        sequences = [item.sequence for item in plan.scheduled]
        self.scheduler.preempt_all(plan, ahead)
        if self._transfer is not None:
            self._transfer.forget_step()
        self.cache.reset_prefix_cache()  # blocks this step was to write hold nothing
        if self._retry_with == 0:
            self._retry_with = max(1, len(sequences) // 2)
            logger.warning("out of memory with %d sequences in a step: trying %d", len(sequences), self._retry_with)
            return
        self._retry_with = 0
        for sequence in sequences:
            self.scheduler.finish(sequence, FinishReason.ERROR, error=f"out of memory: {error}")
        self._pending_updates.extend(SequenceUpdate(sequence, []) for sequence in sequences)

    def _take_plan(self) -> Plan | None:
        if self._retry_with:
            return self.scheduler.schedule(self._retry_with)
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self.scheduler.drop_finished(plan)
            self.scheduler.take_in_forced(plan)
            if plan.scheduled:
                return plan
        return self.scheduler.schedule()

    def _start_shadow(self) -> Future[Plan | None] | None:
        """While the forward pass runs: show the last step's tokens to callers, and plan the next step."""
        if self._shadow is None:
            return None
        return self._shadow.submit(self._work_in_shadow)

    def _work_in_shadow(self) -> Plan | None:
        self._flush()
        # What the step after a verification runs depends on what it finds, and on the drafts made of that.
        return self.scheduler.schedule() if self.proposer is None else None

    def _report(self, updates: list[SequenceUpdate]) -> None:
        """Hand news to the output side: now, or in the shadow of the next forward pass."""
        self._pending_updates.extend(updates)
        if self._shadow is None:
            self._flush()

    def _flush(self) -> None:
        updates, self._pending_updates = self._pending_updates, []
        if not updates:
            return
        outputs, stops = self.outputs.process(updates)
        for found in stops:
            self.scheduler.finish(found.sequence, FinishReason.STOP, stop_reason=found.stop)
        for update in updates:
            if update.sequence.is_finished:
                self._forget(update.sequence)
        self._ready.extend(outputs)

    def _forget(self, sequence: Sequence) -> None:
        request_id = self._owners.pop(sequence.id, None)
        if request_id is not None:
            owned = self._ids[request_id]
            owned.remove(sequence.id)
            if not owned:
                del self._ids[request_id]

    def _sequences_of(self, request: EngineRequest) -> list[Sequence]:
        """One sequence per output; they share the prompt through the prefix cache."""
        self._num_requests += 1
        params = request.params
        count = max(params.n, params.best_of or 1)
        if count > params.n and params.logprobs is None:
            params = params.with_(logprobs=0)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences = []
        for index in range(count):
            own = params.with_(prompt_logprobs=None) if index and params.prompt_logprobs is not None else params
            wants_all_rows = isinstance(self.sampler, Pooler) and self.sampler.needs_all_rows
            skips_cache = own.prompt_logprobs is not None or own.skip_reading_prefix_cache is True or wants_all_rows
            sequences.append(
                Sequence(
                    id=f"{request.id}#{self._num_requests}.{index}",
                    token_ids=list(request.prompt_token_ids),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    params=own,
                    arrival_time=request.arrival_time,
                    priority=request.priority,
                    eos_token_id=request.eos_token_id,
                    stop_token_ids=request.stop_token_ids,
                    max_total_tokens=request.max_total_tokens,
                    cache_salt=request.cache_salt,
                    adapter=request.adapter,
                    seed=seed + index,
                    bad_word_ids=request.bad_word_ids,
                    media=request.media,
                    rope_positions=request.rope_positions,
                    position_delta=request.position_delta,
                    thinking=request.thinking,
                    reads_prefix_cache=not skips_cache,
                    wants_all_rows=wants_all_rows,
                    pending_grammar=request.compile_grammar() if request.compile_grammar is not None else None,
                    prompt_logprobs=[None] if own.prompt_logprobs is not None else [],
                    kv_transfer_params=request.kv_transfer_params,
                )
            )
        return sequences

    # Control

    @property
    def _is_frozen(self) -> bool:
        return self._pause is PauseMode.KEEP or self.sleep_level > 0

    def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Hold new requests back; those under way are aborted, finished, or kept where they are."""
        self._pause = mode
        if mode is PauseMode.ABORT:
            for request_id in list(self._ids):
                self.abort(request_id)

    def resume(self) -> None:
        """Go on where `pause` left off, and let held requests in."""
        self._pause = None
        self._admit_held()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget all reusable prefixes; False while any request holds blocks.

        With `reset_running_requests` those give up their blocks first and compute them again. With `reset_external`
        what a cache connector keeps is forgotten too.

        Raises:
            InvalidRequest: `reset_external` without a connector.
        """
        if reset_external and self._transfer is None:
            raise InvalidRequest("reset_external: this engine has no external cache", param="reset_external")
        is_reset = self._reset_own(reset_running_requests)
        if reset_external:
            assert self._transfer is not None
            return self._transfer.side.reset_cache() and is_reset
        return is_reset

    def _reset_own(self, reset_running_requests: bool) -> bool:
        self._drain()
        if reset_running_requests:
            self.scheduler.preempt_all(self._next_plan)
            self._next_plan = None
        return self.cache.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Abort what runs and give memory back: level 1 the cache (weights stay in host memory), level 2 both.

        Raises:
            InvalidRequest: a level other than 1 and 2.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level: expected 1 or 2, got {level!r}", param="level")
        for request_id in list(self._ids):
            self.abort(request_id)
        self._drain()
        self.cache.reset_prefix_cache()
        self.scheduler.media.clear()
        _sleeper(self.runner).sleep(level)
        self.sleep_level = level

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again: "weights", "kv_cache", or by default both. Awake once nothing is missing.

        Raises:
            InvalidRequest: an unknown tag.
        """
        wanted = frozenset(tags or ("weights", "kv_cache"))
        unknown = wanted - {"weights", "kv_cache"}
        if unknown:
            raise InvalidRequest(f"tags: expected weights or kv_cache, got {sorted(unknown)}", param="tags")
        if self.sleep_level == 0:
            return
        _sleeper(self.runner).wake_up(wanted)
        self._awake_parts |= wanted
        missing = frozenset(("weights", "kv_cache") if self.sleep_level == 2 else ("kv_cache",))
        if missing <= self._awake_parts:
            self._awake_parts = frozenset()
            self.sleep_level = 0
            self._admit_held()

    def close(self) -> None:
        """End what runs and stop the helper thread."""
        self.abort_all()
        self._drain()
        self.stop_threads()

    def stop_threads(self) -> None:
        """Stop the helper threads: all there is to do about an engine whose step failed."""
        self.sampler.close()
        if self._transfer is not None:
            self._transfer.worker.shutdown()
        if self._shadow is not None:
            self._shadow.shutdown()

    def _admit_held(self) -> None:
        if self.is_paused:
            return
        held, self._held = self._held, []
        for request in held:
            self.add_request(request)

    def _drain(self) -> None:
        """Book what the device is still at, then settle: nothing is left that names a block."""
        self._report(self._land())
        self._settle()

    def _settle(self) -> None:
        """Show what is left to show; forget a plan made ahead for sequences that have all ended since."""
        self._flush()
        if self._next_plan is not None and not self.scheduler.has_unfinished:
            self.scheduler.discard(self._next_plan)
            self._next_plan = None

    # Metrics

    def _observe_step(self, plan: Plan, num_corrupted: int) -> None:
        metrics = self.metrics
        num_tokens = plan.num_tokens
        metrics.step_tokens.observe(num_tokens)
        self._step_tokens.append(num_tokens)
        if num_corrupted:
            metrics.corrupted.add(num_corrupted)
        stats = self.cache.stats
        metrics.prefix_cache_queries.value = stats.num_queries
        metrics.prefix_cache_hits.value = stats.num_hits
        metrics.preemptions.value = self.scheduler.num_preemptions
        metrics.mm_queries.value = self.scheduler.media.num_queries
        metrics.mm_hits.value = self.scheduler.media.num_hits
        now = self._clock()
        if now - self._logged_time >= LOG_INTERVAL_S:
            self._log_activity(now)

    def _log_activity(self, now: float) -> None:
        """One line on the time since the last one. Reached by steps only, so an idle engine is silent."""
        metrics, scheduler = self.metrics, self.scheduler
        counts = (metrics.prompt_tokens.value, metrics.generation_tokens.value)
        elapsed = now - self._logged_time
        prompt_rate, generation_rate = ((new - old) / elapsed for new, old in zip(counts, self._logged, strict=True))
        self._logged_time, self._logged = now, counts
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f %%,"
            " prefix hits %.1f %%",
            prompt_rate,
            generation_rate,
            len(scheduler.running),
            scheduler.num_waiting + len(self._held),
            100 * self.pool.usage,
            100 * self.cache.stats.recent_hit_rate,
        )
        if (report := self.scheduler.draft_stats.take_report()) is not None:
            logger.info("%s", report)

    def _offload_families(self) -> list[MetricFamily]:
        """What a connector has moved."""
        stats = self._transfer.side.stats() if self._transfer is not None else None
        if stats is None:
            return []
        return [
            MetricFamily(f"vllm:kv_offload_{name}", "counter", help, [Sample("_total", {}, getattr(stats, name))])
            for name, help in _OFFLOAD_COUNTERS.items()
        ]

    def _cache_settings(self) -> dict[str, str]:
        settings = self.settings
        return {
            "block_size": str(settings.block_size),
            "num_gpu_blocks": str(settings.num_blocks),
            "cache_dtype": settings.cache_dtype,
            "enable_prefix_caching": str(settings.enable_prefix_caching),
            "prefix_caching_hash_algo": settings.prefix_caching_hash_algo,
        }

    def stats(self) -> EngineStats:
        """Gauges and counters in short."""
        step_tokens = [self._step_tokens.popleft() for _ in range(len(self._step_tokens))]
        metrics = self.metrics
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting + len(self._held),
            num_waiting_deferred=self.scheduler.num_deferred + len(self._held),
            kv_cache_usage=self.pool.usage,
            prefix_cache_queries=int(metrics.prefix_cache_queries.value),
            prefix_cache_hits=int(metrics.prefix_cache_hits.value),
            num_preemptions=int(metrics.preemptions.value),
            num_corrupted=int(metrics.corrupted.value),
            iteration_tokens=step_tokens,
            cache_settings=self._cache_settings(),
        )

    def _adapter_families(self) -> list[MetricFamily]:
        """Which adapters run and wait, where requests may choose one."""
        limit = self.settings.limits.max_loras
        if not limit:
            return []
        labels = {
            "max_lora": str(limit),
            "waiting_lora_adapters": _adapter_names(self.scheduler.waiting()),
            "running_lora_adapters": _adapter_names(self.scheduler.running),
        }
        return [gauge("vllm:lora_requests_info", "Adapters that run and wait, as labels", time.time(), labels)]

    def metric_families(self) -> list[MetricFamily]:
        """A snapshot of everything measured, gauges included."""
        scheduler = self.scheduler
        waiting = scheduler.num_waiting + len(self._held)
        deferred = scheduler.num_deferred + len(self._held)
        by_reason = [
            Sample("", {"reason": "capacity"}, waiting - deferred),
            Sample("", {"reason": "deferred"}, deferred),
        ]
        sleeping = [
            Sample("", {"sleep_state": state}, int(level == self.sleep_level))
            for level, state in enumerate(SLEEP_STATES)
        ]
        return [
            gauge("vllm:num_requests_running", "Sequences in the running batch", len(scheduler.running)),
            gauge("vllm:num_requests_waiting", "Sequences waiting", waiting),
            MetricFamily("vllm:num_requests_waiting_by_reason", "gauge", "Sequences waiting, by reason", by_reason),
            gauge("vllm:kv_cache_usage_perc", "Share of the cache blocks in use, 0..1", self.pool.usage),
            MetricFamily("vllm:engine_sleep_state", "gauge", "1 for the state the engine is in", sleeping),
            gauge("vllm:cache_config_info", "Cache settings, as labels", 1, self._cache_settings()),
            *self._adapter_families(),
            *self.metrics.families(),
            *self._offload_families(),
        ]


_OFFLOAD_COUNTERS = {
    "load_bytes": "Bytes of cache entries that a connector loaded",
    "store_bytes": "Bytes of cache entries that a connector stored",
    "load_time": "Seconds spent loading cache entries",
    "store_time": "Seconds spent storing cache entries",
}


def _adapter_names(sequences: Iterable[Sequence]) -> str:
    return ",".join(sorted({item.adapter.name for item in sequences if item.adapter is not None}))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a forward pass failed for lack of memory, by the ways torch has of saying so."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)


def _sleeper(runner: Any) -> SleepControl:
    if not hasattr(runner, "sleep") or not hasattr(runner, "wake_up"):
        raise InvalidRequest("sleep: this engine's runner cannot give its memory back")
    sleeper: SleepControl = runner
    return sleeper


def _check_copies_states(runner: object) -> None:
    if not getattr(runner, "copies_states", False):
        raise UsageError(
            "--enable-prefix-caching: this model has recurrent layers, whose states cannot be reused between requests"
        )


def _aborted(request: EngineRequest) -> RequestOutput:
    """The only output of a request that never started."""
    completions = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason=FinishReason.ABORT)
        for index in range(request.params.n)
    ]
    return RequestOutput(request.id, request.prompt, request.prompt_token_ids, completions, finished=True)
