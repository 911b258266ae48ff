"""Which sequence holds which blocks, in every group: allocation, prefix reuse, release. No torch.

Tables live on the sequence (`block_ids`); this module is the only one that changes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vkit.cache.blocks import NULL_BLOCK, BlockPool
from vkit.cache.events import BlockStored
from vkit.cache.groups import BlockAt, CacheGroup, CacheKind, rules_of
from vkit.cache.prefix import BlockHasher
from vkit.sequence import Sequence, StateCopy

RECENT_REQUESTS = 1000
"""Requests over which the hit rate of log lines is taken."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading tokens of a sequence found in the cache, and the table of each group that goes with them."""

    num_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_loaded: int = 0
    """Of the tokens, those that a cache connector brought while the sequence waited; it holds its blocks already."""


@dataclass(slots=True)
class PrefixStats:
    """Tokens looked up and found; sequences that resume after preemption are counted apart."""

    num_queries: int = 0
    num_hits: int = 0
    num_resumed_queries: int = 0
    num_resumed_hits: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    """(tokens looked up, tokens found) of the latest requests."""

    @property
    def recent_hit_rate(self) -> float:
        """Share of the latest requests' tokens that were found, 0..1."""
        queries = sum(query for query, _ in self.recent)
        return sum(hit for _, hit in self.recent) / queries if queries else 0.0


class KVCacheManager:
    """Hands out and takes back the blocks of all groups from one pool."""

    def __init__(
        self,
        groups: list[CacheGroup],
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
        max_step_tokens: int,
        hasher: BlockHasher | None = None,
        num_state_rows: int = 1,
        num_blocks_recomputed: int = 0,
    ) -> None:
        """`hasher` None switches prefix caching off.

        `num_state_rows`: blocks that a group of states gives each sequence. `num_blocks_recomputed`: blocks at the end
        of what could be reused that are computed again, for a drafter that needs what the model made of them.
        """
        self.groups = groups
        self.pool = pool
        self.block_size = block_size
        self.stats = PrefixStats()
        self._max_model_len = max_model_len
        self._max_step_tokens = max_step_tokens
        self._hasher = hasher
        self._num_recomputed = num_blocks_recomputed
        self._rules = [
            rules_of(group, block_size, caches_prefixes=hasher is not None, num_state_rows=num_state_rows)
            for group in groups
        ]
        self._is_state = [group.kind is CacheKind.STATE for group in groups]
        self._indices = range(len(groups))
        self._registered_in_pass: dict[str, list[int]] = {}
        self._state_copies: list[StateCopy] = []

    @property
    def caches_prefixes(self) -> bool:
        """Whether blocks are reused between sequences."""
        return self._hasher is not None

    @property
    def aligns_chunks(self) -> bool:
        """Whether chunks should end at block boundaries, so that a reusable state exists there."""
        return self._hasher is not None and any(self._is_state)

    def begin_pass(self) -> None:
        """Start a scheduling pass: what was registered before it is certain to be written."""
        self._registered_in_pass.clear()
        self._state_copies = []

    def take_state_copies(self) -> list[StateCopy]:
        """Copies the pass asks for, in order; the caller now owns them."""
        copies, self._state_copies = self._state_copies, []
        return copies

    def fits_pool(self, num_tokens: int) -> bool:
        """Whether a sequence of this many tokens could run with the whole pool to itself."""
        return self.num_blocks_to_hold(num_tokens) <= self.pool.num_usable

    def num_blocks_to_hold(self, num_tokens: int) -> int:
        """Most blocks a sequence of this many tokens holds at once."""
        return sum(rules.max_held(num_tokens, min(self._max_step_tokens, num_tokens)) for rules in self._rules)

    def find_hit(self, sequence: Sequence) -> PrefixHit:
        """The longest reusable prefix that leaves at least one token to compute; what it holds, if it holds blocks."""
        if sequence.block_ids:
            return PrefixHit(sequence.num_computed_tokens, sequence.block_ids, sequence.num_external_tokens)
        if self._hasher is None or not sequence.reads_prefix_cache:
            return PrefixHit()
        self._hasher.extend(sequence)
        hashes = sequence.block_hashes
        lookups = [self._block_at(group, hashes) for group in self._indices]
        length = min(len(hashes), (sequence.num_tokens - 1) // self.block_size)
        length = self._longest_hit(sequence, lookups, length)
        if length and self._num_recomputed:
            length = self._longest_hit(sequence, lookups, max(0, length - self._num_recomputed))
        if length == 0:
            return PrefixHit()
        tables = [rules.hit_table(block_at, length) for rules, block_at in zip(self._rules, lookups, strict=True)]
        return PrefixHit(length * self.block_size, tables)

    def _longest_hit(self, sequence: Sequence, lookups: list[BlockAt], length: int) -> int:
        """Leading blocks, at most `length`, that every group has."""
        while True:
            length = self._before_runs(sequence, length)
            before = length
            for rules, block_at in zip(self._rules, lookups, strict=True):
                length = rules.longest_hit(block_at, length)
            if length == before:
                return length

    def _before_runs(self, sequence: Sequence, length: int) -> int:
        """At most `length` blocks, cut where they would end inside media tokens that see each other."""
        for placed in sequence.media:
            for first, beyond in placed.spans if placed.item.sees_itself else ():
                if first < length * self.block_size < beyond:
                    return first // self.block_size
        return length

    def count_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Record a look-up that led to admission."""
        if self._hasher is None or not sequence.reads_prefix_cache:
            return
        if sequence.num_preemptions:
            self.stats.num_resumed_queries += sequence.num_tokens
            self.stats.num_resumed_hits += hit.num_tokens - hit.num_loaded
        else:
            self.stats.num_queries += sequence.num_tokens
            self.stats.num_hits += hit.num_tokens - hit.num_loaded
            self.stats.recent.append((sequence.num_tokens, hit.num_tokens - hit.num_loaded))

    def can_hold_all(self, sequence: Sequence, hit: PrefixHit, num_reserved: int) -> bool:
        """Whether the blocks for all known tokens are free now, beyond what the hit provides."""
        needed = num_reserved
        step = min(self._max_step_tokens, sequence.num_tokens)
        for group, rules in enumerate(self._rules):
            total = rules.max_held(sequence.num_tokens, step)
            if hit.num_tokens:
                table = hit.tables[group]
                idle = sum(1 for block in table if block and not self.pool.ref_count(block))
                held = sum(1 for block in table if block)
                needed += max(0, total - held) + idle
            else:
                needed += total
        return needed <= self.pool.num_free

    def allocate(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        num_lookahead: int = 0,
        num_reserved: int = 0,
        num_external: int = 0,
    ) -> bool:
        """Give the sequence slots for its next tokens; False, and nothing is taken, when too few blocks are free.

        `hit` is given at admission only; the sequence then owns no blocks yet. `num_reserved` blocks stay free.
        `num_external` tokens after the hit will be loaded and not computed.
        """
        num_computed = hit.num_tokens + num_external if hit is not None else sequence.num_computed_tokens
        if hit is None:
            self._release_outside_windows(sequence)
        tables = sequence.block_ids or (hit.tables if hit is not None and hit.tables else [[] for _ in self.groups])
        num_slots = min(num_computed + num_new_tokens + num_lookahead, self._max_model_len)
        counts = [rules.table_len(num_slots) - len(table) for rules, table in zip(self._rules, tables, strict=True)]
        saves_state = self._saves_state(num_computed)
        needed = sum(counts) + (sum(self._is_state) if saves_state else 0)
        if hit is not None:
            needed += sum(1 for table in hit.tables for block in table if block and not self.pool.ref_count(block))
        if needed and needed + num_reserved > self.pool.num_free:
            return False
        if hit is not None:
            self._adopt(sequence, hit, tables)
        if saves_state:
            self._save_states(sequence, num_computed)
        for group, count in enumerate(counts):
            if count > 0:
                sequence.block_ids[group].extend(self.pool.get_new_blocks(count))
        if self._hasher is not None and not num_external and not sequence.is_loading:
            self._register_full_blocks(sequence, num_computed + num_new_tokens)
        return True

    def move_state(self, sequence: Sequence, num_tokens: int) -> None:
        """After a verification, which wrote the state after each token to a row of its own: go on from one of them."""
        rows = next((len(sequence.block_ids[group]) for group in self._indices if self._is_state[group]), 0)
        if rows:
            sequence.state_row = (sequence.state_row + num_tokens) % rows

    def register_loaded(self, sequence: Sequence, num_tokens: int) -> None:
        """Make blocks reusable whose bytes have been loaded: those of the first `num_tokens` tokens."""
        if self._hasher is not None:
            self._register_full_blocks(sequence, num_tokens, is_written=True)

    def extend_hashes(self, sequence: Sequence) -> None:
        """Bring the sequence's block hashes up to date."""
        if self._hasher is not None:
            self._hasher.extend(sequence)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks; deep ones are evicted before shallow ones."""
        for table in sequence.block_ids:
            self.pool.free(reversed(table))
        sequence.block_ids = []
        sequence.num_released_blocks = []
        sequence.num_registered_blocks = []
        sequence.state_row = 0

    def take_back_registrations(self, sequence: Sequence) -> None:
        """Forget what this pass registered for a sequence that leaves the plan: nobody will write those blocks."""
        for block in self._registered_in_pass.pop(sequence.id, ()):
            self.pool.unregister(block)

    def has_registered_in_pass(self, sequence: Sequence) -> bool:
        """Whether other sequences may already count on what this one is about to write."""
        return sequence.id in self._registered_in_pass

    def reset_prefix_cache(self) -> bool:
        """Forget all reusable prefixes; False while any sequence holds blocks."""
        return self.pool.reset()

    def _block_at(self, group: int, hashes: list[bytes]) -> BlockAt:
        lookup = self.pool.lookup
        return lambda index: lookup((group, hashes[index]))

    def _release_outside_windows(self, sequence: Sequence) -> None:
        for group, rules in enumerate(self._rules):
            released = sequence.num_released_blocks[group]
            first_kept = rules.first_kept(sequence.num_computed_tokens)
            if first_kept > released:
                table = sequence.block_ids[group]
                self.pool.free(reversed(table[released:first_kept]))
                table[released:first_kept] = [NULL_BLOCK] * (first_kept - released)
                sequence.num_released_blocks[group] = first_kept

    def _adopt(self, sequence: Sequence, hit: PrefixHit, tables: list[list[int]]) -> None:
        num_blocks = hit.num_tokens // self.block_size
        for table in hit.tables:
            self.pool.touch(table)
        sequence.block_ids = tables
        sequence.num_registered_blocks = [num_blocks] * len(tables)
        sequence.num_released_blocks = [rules.first_kept(hit.num_tokens) for rules in self._rules]

    def _saves_state(self, num_computed: int) -> bool:
        return self.aligns_chunks and num_computed > 0 and num_computed % self.block_size == 0

    def _save_states(self, sequence: Sequence, num_computed: int) -> None:
        """Leave the state at this boundary to the prefix cache and go on with a copy."""
        assert self._hasher is not None
        self._hasher.extend(sequence)
        block_hash = sequence.block_hashes[num_computed // self.block_size - 1]
        for group in self._indices:
            if not self._is_state[group]:
                continue
            table = sequence.block_ids[group]
            saved = table[sequence.state_row]
            (current,) = self.pool.get_new_blocks(1)
            self._state_copies.append(StateCopy(group, saved, current))
            if self.pool.key_of(saved) is None:
                self.pool.register(saved, (group, block_hash))
            self.pool.free([saved])
            table[sequence.state_row] = current

    def _register_full_blocks(self, sequence: Sequence, num_tokens: int, *, is_written: bool = False) -> None:
        """Make blocks reusable that hold nothing but known tokens once this step has run, or hold them already."""
        assert self._hasher is not None
        num_full = min(num_tokens, len(sequence.token_ids)) // self.block_size
        registered = sequence.num_registered_blocks
        for group in self._indices:
            first = registered[group]
            if num_full <= first or self._is_state[group]:
                continue
            self._hasher.extend(sequence)
            table = sequence.block_ids[group]
            stored = [] if is_written else self._registered_in_pass.setdefault(sequence.id, [])
            for index in range(first, num_full):
                if table[index] != NULL_BLOCK:
                    self.pool.register(table[index], (group, sequence.block_hashes[index]))
                    stored.append(table[index])
            registered[group] = num_full
            if self.pool.events.has_listeners:
                self._publish_stored(sequence, group, first, num_full)

    def _publish_stored(self, sequence: Sequence, group: int, first: int, end: int) -> None:
        hashes = sequence.block_hashes
        size = self.block_size
        self.pool.events.publish(
            BlockStored(
                hashes=tuple(hashes[first:end]),
                parent_hash=hashes[first - 1] if first else None,
                token_ids=tuple(sequence.token_ids[first * size : end * size]),
                block_size=size,
                lora=sequence.adapter.name if sequence.adapter is not None else None,
                group=group,
            )
        )
