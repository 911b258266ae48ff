"""What scheduler and engine have to do with a cache connector: offers, loads under way, delayed frees. No torch.

The one seam between scheduling and connectors. A load is booked here until the worker has said how it went, so that the
outcome finds its way whatever became of the sequence meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vkit.cache.connector import KVConnector, LoadFailed, SchedulerSide, TransferReport
from vkit.cache.events import CacheEvents
from vkit.cache.manager import KVCacheManager, PrefixHit
from vkit.cache.prefix import BlockHasher
from vkit.sequence import Plan, Sequence, SequenceStatus

logger = logging.getLogger("vkit.cache")

POLL_INTERVAL_S = 0.01
"""How often a connector is asked again while nothing runs."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens that a connector has beyond the local hit."""

    num_tokens: int = 0
    is_async: bool = False


NO_OFFER = Offer()


@dataclass(slots=True)
class _Load:
    """Tokens being loaded for a sequence, and the blocks they go to."""

    sequence: Sequence
    start: int
    end: int
    tables: list[list[int]]
    """Per group, the blocks of tokens start .. end - 1; 0 where none is needed."""
    is_async: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load from token `start` on ended: `num_good` tokens of the sequence are in its blocks."""

    sequence: Sequence
    start: int
    num_good: int
    is_whole: bool
    is_async: bool


class KVTransfer:
    """The scheduler's view of a connector."""

    def __init__(
        self,
        connector: KVConnector,
        cache: KVCacheManager,
        *,
        recomputes: bool,
        loads: bool = True,
        hasher: BlockHasher | None = None,
        events: CacheEvents | None = None,
        count: Callable[[int, int], None] = lambda queries, hits: None,
    ) -> None:
        """`hasher` names blocks where the prefix cache does not; `count` is told tokens looked up and found."""
        assert connector.worker is not None, "checked when the connector was built"
        self.worker = connector.worker
        self.recomputes = recomputes
        """Whether tokens that fail to load are computed; else the request ends in an error."""
        self.num_failed_loads = 0
        self._side: SchedulerSide = connector.scheduler
        self._cache = cache
        self._loads_in = loads
        self._hasher = hasher
        self._events = events
        self._count = count
        self._asking: set[str] = set()
        self._accepted: list[_Load] = []
        self._under_way: list[_Load] = []
        self._receiving: dict[str, _Load] = {}
        self._sending: dict[str, Sequence] = {}

    @property
    def side(self) -> SchedulerSide:
        """The connector's scheduler half."""
        return self._side

    @property
    def has_pending(self) -> bool:
        """Whether the worker must be asked even if nothing runs."""
        return bool(self._receiving or self._sending or self._accepted)

    def is_asking(self, sequence: Sequence) -> bool:
        """Whether the connector has yet to answer for this sequence."""
        return sequence.id in self._asking

    def offer(self, sequence: Sequence, hit: PrefixHit) -> Offer | None:
        """What the connector has beyond `hit`; None: it does not know yet. A broken promise becomes sequence.error."""
        if sequence.block_ids or not self._loads_in or sequence.skips_external or not sequence.reads_prefix_cache:
            return NO_OFFER
        self._extend(sequence)
        self._asking.discard(sequence.id)
        try:
            num_tokens, is_async = self._side.get_num_new_matched_tokens(sequence, hit.num_tokens)
        except LoadFailed as failure:
            self._fail(sequence, str(failure))
            return NO_OFFER
        if num_tokens is None:
            self._asking.add(sequence.id)
            return None
        size = self._cache.block_size
        room = sequence.num_tokens - 1 - hit.num_tokens
        if num_tokens not in range(0, room + 1, size):
            raise ValueError(f"a connector offered {num_tokens} tokens; whole blocks of at most {room} are wanted")
        return Offer(num_tokens, is_async and num_tokens > 0)

    def accept(self, sequence: Sequence, hit: PrefixHit, offer: Offer) -> None:
        """Book an admission: blocks have been allocated for the hit and the offer."""
        if sequence.block_ids and hit.num_loaded:
            return  # an asynchronous load that was booked when it began
        if self._loads_in and sequence.reads_prefix_cache and not sequence.skips_external:
            self._count(sequence.num_tokens - hit.num_tokens, offer.num_tokens)
        self._side.update_state_after_alloc(sequence, sequence.block_ids, offer.num_tokens)
        if not offer.num_tokens:
            return
        size = self._cache.block_size
        start, end = hit.num_tokens, hit.num_tokens + offer.num_tokens
        tables = [table[start // size : end // size] for table in sequence.block_ids]
        load = _Load(sequence, start, end, tables, offer.is_async)
        sequence.is_loading, sequence.num_external_tokens = True, offer.num_tokens
        sequence.external_source = self._side.source_of(sequence)
        self._accepted.append(load)
        if offer.is_async:
            self._receiving[sequence.id] = load

    def finished(self, sequence: Sequence) -> None:
        """The sequence ends now; its blocks may have to stay."""
        self._asking.discard(sequence.id)
        self._extend(sequence)
        delays, reply = self._side.request_finished(sequence, sequence.block_ids)
        sequence.kv_transfer_reply = reply
        if delays and sequence.block_ids:
            self._sending[sequence.id] = sequence

    def holds(self, sequence: Sequence) -> bool:
        """Whether somebody still reads or writes the sequence's blocks."""
        return sequence.id in self._sending or sequence.id in self._receiving

    def preempted(self, sequence: Sequence) -> None:
        """The sequence gave up its blocks."""
        sequence.is_loading = False
        sequence.num_external_tokens = 0
        self._side.request_preempted(sequence)

    def end_pass(self) -> None:
        """A scheduling pass is over."""
        self._side.on_schedule_end()
        if self._events is not None and self._events.has_listeners:
            for event in self._side.take_events():
                self._events.publish(event)

    def build_meta(self, plan: Plan) -> object:
        """What the worker has to do with this plan, which is about to run. It may be empty."""
        for item in plan.scheduled:
            self._extend(item.sequence)
        self._under_way.extend(load for load in self._accepted if not load.is_async)
        self._accepted.clear()
        return self._side.build_connector_meta(plan)

    def settle(self, report: TransferReport) -> tuple[list[Outcome], list[Sequence]]:
        """(how loads ended, ended sequences whose blocks are free now), after the step that `build_meta` was for."""
        outcomes = []
        released = [sequence for name in report.sent if (sequence := self._sending.pop(name, None)) is not None]
        ended = [load for name in report.received if (load := self._receiving.pop(name, None)) is not None]
        for load in [*self._under_way, *ended]:
            num_good = self._num_good(load, report.bad_blocks)
            outcomes.append(Outcome(load.sequence, load.start, num_good, num_good == load.end, load.is_async))
            if load.is_async and load.sequence.is_finished:
                released.append(load.sequence)
        self._under_way.clear()
        return outcomes, released

    def forget_step(self) -> None:
        """The step that `build_meta` was for never ran to its end."""
        self._under_way.clear()

    def note_failure(self, sequence: Sequence, num_good: int) -> None:
        """Say once that a load failed, and what happens now."""
        self.num_failed_loads += 1
        self._fail(sequence, f"tokens from {num_good} on did not arrive")

    def _fail(self, sequence: Sequence, reason: str) -> None:
        sequence.skips_external = True
        if self.recomputes:
            logger.warning("sequence %s: cache entries: %s; they are computed", sequence.id, reason)
        else:
            sequence.error = f"cache entries that were promised could not be loaded: {reason}"

    def _num_good(self, load: _Load, bad_blocks: set[int]) -> int:
        size = self._cache.block_size
        for index in range((load.end - load.start) // size):
            if any(table[index] in bad_blocks for table in load.tables if index < len(table)):
                return load.start + index * size
        return load.end

    def _extend(self, sequence: Sequence) -> None:
        if self._hasher is not None:
            self._hasher.extend(sequence)
        else:
            self._cache.extend_hashes(sequence)


def is_waiting_loaded(sequence: Sequence) -> bool:
    """Whether a waiting sequence holds blocks that were loaded for it."""
    return bool(sequence.block_ids) and sequence.status is SequenceStatus.WAITING
