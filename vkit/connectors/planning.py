"""The scheduler's half of every built-in connector: which chunks to look up, load and keep, and for whom.

Look-ups never wait: an answer that needs a disk or a network is asked for by a thread, and until it is there the
sequence keeps its place ("ask again"). A store at hand then loads before the step; a remote one loads while the
sequence waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vkit.cache.connector import ConnectorContext, ConnectorStats, KVConnector, LoadFailed, SchedulerSide
from vkit.connectors.identity import identity_digest
from vkit.connectors.moving import Chunk, ChunkStore, LoadOrder, Mover, Moves, SaveOrder, StoreUnavailable
from vkit.kv_transfer import KVTransferConfig
from vkit.sequence import Plan, Sequence

logger = logging.getLogger("vkit.cache")

PROMISE_TIMEOUT_S = 30.0
"""How long the entries that a producer promised may take to arrive."""


@dataclass(slots=True)
class Lookup:
    """One question to the store, and its answer once there is one."""

    first_chunk: int
    keys: list[bytes]
    answer: Future[list[Chunk] | int]


@dataclass(frozen=True, slots=True)
class Promise:
    """What another engine said it has computed."""

    num_tokens: int
    deadline: float


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """How sequences are cut."""

    block_size: int
    chunk_blocks: int
    prompt_only: bool
    is_remote: bool
    name_chunks: Callable[[Sequence, int, int], list[bytes]] | None = None
    """Names of chunks first .. end - 1 of a sequence; None: the hash of each chunk's last block."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk."""
        return self.block_size * self.chunk_blocks

    def keys(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """Names of chunks first .. end - 1."""
        if self.name_chunks is not None:
            return self.name_chunks(sequence, first, end)
        return [sequence.block_hashes[(chunk + 1) * self.chunk_blocks - 1] for chunk in range(first, end)]


class ChunkPlanner(SchedulerSide):
    """Decides what a store is asked and given."""

    def __init__(
        self,
        config: KVTransferConfig,
        store: ChunkStore,
        mover: Mover,
        rules: ChunkRules,
        stats: ConnectorStats,
        identity: str,
        notify: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._mover = mover
        self._rules = rules
        self._stats = stats
        self._identity = identity
        self._notify = notify
        self._clock = clock
        self._lookups: dict[str, Lookup] = {}
        self._promises: dict[str, Promise] = {}
        self._num_saved: dict[str, int] = {}
        self._sources: dict[str, str] = {}
        self._loads: list[LoadOrder] = []
        self._has_warned = False

    def get_num_new_matched_tokens(self, sequence: Sequence, num_computed: int) -> tuple[int | None, bool]:
        """Tokens of the leading chunks that the store has."""
        rules = self._rules
        promise = self._promise_of(sequence)
        first = num_computed // rules.chunk_tokens
        lookup = self._lookups.get(sequence.id)
        if lookup is None or lookup.first_chunk != first:
            lookup = self._ask(sequence, first)
        if not lookup.answer.done():
            return None, False
        found = self._found(lookup)
        usable = (sequence.num_tokens - 1) // rules.block_size * rules.block_size
        end = min((first + found) * rules.chunk_tokens, usable)
        if promise is not None and end < min(promise.num_tokens, usable, self._nameable(sequence)):
            return self._await_promise(sequence, promise, end)
        num_tokens = max(0, end - num_computed)
        return num_tokens, rules.is_remote and num_tokens > 0

    def update_state_after_alloc(self, sequence: Sequence, block_ids: list[list[int]], num_external: int) -> None:
        """Order the load."""
        lookup = self._lookups.pop(sequence.id, None)
        self._promises.pop(sequence.id, None)
        if lookup is None or num_external == 0:
            return
        size = self._rules.block_size
        answer = lookup.answer.result()
        found = answer if isinstance(answer, int) else len(answer)
        end_block = min((lookup.first_chunk + found) * self._rules.chunk_blocks, (sequence.num_tokens - 1) // size)
        first_block = end_block - num_external // size
        tables = [table[first_block:end_block] for table in block_ids]
        payloads = None
        if not isinstance(answer, int):
            payloads = [chunk.payload for chunk in answer]
            tiers = {chunk.tier for chunk in answer}
            self._sources[sequence.id] = "disk" if "disk" in tiers else next(iter(tiers))
        self._loads.append(
            LoadOrder(sequence.id, first_block, end_block, tables, lookup.first_chunk, lookup.keys[:found], payloads)
        )

    def build_connector_meta(self, plan: Plan) -> Moves:
        """Loads ordered since the last time, and the chunks that this plan completes."""
        loads, self._loads = self._loads, []
        saves: list[SaveOrder] = []
        if self._config.stores:
            for item in plan.scheduled:
                self._collect_saves(item.sequence, item.start + item.num_tokens - item.num_drafts, saves)
        return Moves(loads, saves)

    def request_finished(self, sequence: Sequence, block_ids: list[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are copied out at once, so none must stay. A prompt computed for another engine is promised to it."""
        self._forget(sequence)
        # What is read within a step goes with it. What is read in the background holds its blocks until the worker has
        # reported it, so that order must reach the worker.
        self._loads = [order for order in self._loads if order.sequence_id != sequence.id or order.payloads is None]
        params = sequence.kv_transfer_params or {}
        if not (self._config.stores and params.get("do_remote_decode") is True) or sequence.error is not None:
            return False, None
        num_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        num_tokens = num_tokens // self._rules.chunk_tokens * self._rules.chunk_tokens
        return False, {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self._config.engine_id,
            "remote_num_tokens": num_tokens,
            "remote_identity": self._identity,
        }

    def request_preempted(self, sequence: Sequence) -> None:
        """Begin again."""
        self._forget(sequence)

    def reset_cache(self) -> bool:
        """Forget what the store keeps for this identity."""
        return self._mover.flush() and self._store.clear()

    def source_of(self, sequence: Sequence) -> str:
        """Host or disk, or that it is not known."""
        return self._sources.get(sequence.id, "external_unspecified")

    def stats(self) -> ConnectorStats:
        """What has been moved."""
        return self._stats

    def _forget(self, sequence: Sequence) -> None:
        self._lookups.pop(sequence.id, None)
        self._promises.pop(sequence.id, None)
        self._num_saved.pop(sequence.id, None)
        self._sources.pop(sequence.id, None)

    # Looking up

    def _nameable(self, sequence: Sequence) -> int:
        return sequence.num_tokens // self._rules.chunk_tokens * self._rules.chunk_tokens

    def _ask(self, sequence: Sequence, first: int) -> Lookup:
        end = sequence.num_tokens // self._rules.chunk_tokens
        keys = self._rules.keys(sequence, first, end) if end > first else []
        lookup = Lookup(first, keys, Future())
        self._lookups[sequence.id] = lookup
        if not keys:
            lookup.answer.set_result([])
        elif self._rules.is_remote:
            self._in_background(lookup, self._store.count_leading)
        else:
            at_hand = self._store.peek(keys)
            if at_hand is None:
                self._in_background(lookup, self._store.read_leading)
            else:
                lookup.answer.set_result(at_hand)
        return lookup

    def _in_background(self, lookup: Lookup, question: Callable[[SequenceABC[bytes]], list[Chunk] | int]) -> None:
        def timed(keys: SequenceABC[bytes]) -> list[Chunk] | int:
            start = time.perf_counter()
            try:
                return question(keys)
            finally:
                self._stats.load_time += time.perf_counter() - start

        lookup.answer = self._mover.readers.submit(timed, lookup.keys)
        lookup.answer.add_done_callback(lambda _: self._notify())

    def _found(self, lookup: Lookup) -> int:
        """Leading chunks; a store that does not answer has promised nothing."""
        failure = lookup.answer.exception()
        if isinstance(failure, StoreUnavailable):
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cache entries cannot be looked up: %s", failure)
            lookup.answer = Future()
            lookup.answer.set_result([])
            return 0
        self._has_warned = False
        answer = lookup.answer.result()
        return answer if isinstance(answer, int) else len(answer)

    # Promises

    def _promise_of(self, sequence: Sequence) -> Promise | None:
        """What the request says that another engine has computed.

        Raises:
            LoadFailed: parameters that make no sense, or another identity.
        """
        params = sequence.kv_transfer_params
        if not params or params.get("do_remote_prefill") is not True:
            return None
        known = self._promises.get(sequence.id)
        if known is not None:
            return known
        num_tokens, identity = params.get("remote_num_tokens"), params.get("remote_identity")
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            raise LoadFailed(f"kv_transfer_params: remote_num_tokens: expected an integer, got {num_tokens!r}")
        if identity != self._identity:
            raise LoadFailed("kv_transfer_params: remote_identity: the other engine's cache entries are not like ours")
        promise = Promise(num_tokens, self._clock() + PROMISE_TIMEOUT_S)
        self._promises[sequence.id] = promise
        return promise

    def _await_promise(self, sequence: Sequence, promise: Promise, end: int) -> tuple[int | None, bool]:
        if self._clock() >= promise.deadline:
            raise LoadFailed(f"{promise.num_tokens} tokens were promised, {end} came within {PROMISE_TIMEOUT_S:g} s")
        lookup = self._lookups[sequence.id]
        lookup.first_chunk = -1  # whatever the next question begins with, it is a new one
        return None, False

    # Keeping

    def _collect_saves(self, sequence: Sequence, num_tokens: int, saves: list[SaveOrder]) -> None:
        """Order the chunks that hold nothing but known tokens once `num_tokens` of the sequence are computed."""
        rules = self._rules
        limit = min(num_tokens, sequence.num_prompt_tokens if rules.prompt_only else sequence.num_tokens)
        first, end = self._num_saved.get(sequence.id, 0), limit // rules.chunk_tokens
        if end <= first or sequence.is_finished:
            return
        self._num_saved[sequence.id] = end
        size = rules.chunk_blocks
        for chunk, key in zip(range(first, end), rules.keys(sequence, first, end), strict=True):
            tables = [table[chunk * size : (chunk + 1) * size] for table in sequence.block_ids]
            if all(len(table) == size and 0 not in table for table in tables):
                saves.append(SaveOrder(sequence.id, key, tables))


def chunked_connector(
    context: ConnectorContext,
    store: ChunkStore,
    *,
    chunk_blocks: int = 1,
    prompt_only: bool = True,
    is_remote: bool = False,
    name_chunks: Callable[[Sequence, int, int], list[bytes]] | None = None,
    mover: Mover | None = None,
    stats: ConnectorStats | None = None,
    budgets: Mapping[str, int | None] | None = None,
) -> KVConnector:
    """Both halves around a store."""
    stats = stats or ConnectorStats()
    mover = mover or Mover(store, context.groups, chunk_blocks, context.notify, stats, budgets=budgets)
    rules = ChunkRules(context.block_size, chunk_blocks, prompt_only, is_remote, name_chunks)
    identity = identity_digest(context.identity)
    planner = ChunkPlanner(context.config, store, mover, rules, stats, identity, context.notify)
    return KVConnector(planner, mover, handles_sliding=True)
