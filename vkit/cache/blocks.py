"""The pool of cache blocks: who holds each, which may be reused for a prefix, which is evicted next. No torch.

Blocks are numbers 0..N-1. Block 0 is the null block: never handed out, it pads tables and stands for blocks a sliding
window has left behind. The pool knows hashes and groups only as keys; what they mean is prefix.py's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from vkit.cache.events import AllBlocksCleared, BlockRemoved, CacheEvents

NULL_BLOCK = 0

BlockKey = tuple[int, bytes]
"""(cache group, block hash)."""


class Observer(Protocol):
    """Takes measured values."""

    def observe(self, value: float) -> None:
        """Count a value."""


class BlockLifetimes:
    """Measures how long blocks live, idle and wait for reuse, in seconds. Only kept when someone asks for it."""

    def __init__(
        self, lifetime: Observer, idle: Observer, reuse_gap: Observer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifetime = lifetime
        self._idle = idle
        self._reuse_gap = reuse_gap
        self._clock = clock
        self._born: dict[int, float] = {}
        self._last_used: dict[int, float] = {}

    def allocated(self, block: int) -> None:
        """The block got a new owner and new content."""
        self._born[block] = self._last_used[block] = self._clock()

    def reused(self, block: int) -> None:
        """The block's content was found by another sequence."""
        now = self._clock()
        self._reuse_gap.observe(now - self._last_used.get(block, now))
        self._last_used[block] = now

    def evicted(self, block: int) -> None:
        """The block's content is forgotten."""
        now = self._clock()
        self._lifetime.observe(now - self._born.pop(block, now))
        self._idle.observe(now - self._last_used.pop(block, now))


class BlockPool:
    """Reference counts, the free list in order of eviction, and the table of reusable blocks.

    The free list is circular and doubly linked through block 0, so that a hit can pull a block out of its middle.
    """

    def __init__(self, num_blocks: int, events: CacheEvents | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"BlockPool: num_blocks {num_blocks}, expected at least 2 (block 0 is never handed out)")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.events = events or CacheEvents()
        self.lifetimes: BlockLifetimes | None = None
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._holders: dict[BlockKey, list[int]] = {}
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0..1."""
        return 1.0 - self.num_free / self.num_usable

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        return self._ref_counts[block]

    def key_of(self, block: int) -> BlockKey | None:
        """The key under which the block can be reused, if any."""
        return self._keys[block]

    def free_order(self) -> list[int]:
        """The free blocks, next to be handed out first."""
        order = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            order.append(block)
            block = self._next[block]
        return order

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they cached is forgotten.

        Raises:
            ValueError: fewer are free; callers check `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"get_new_blocks: {count} blocks, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            if self._keys[block] is not None:
                self.unregister(block)
            self._ref_counts[block] = 1
            if self.lifetimes is not None:
                self.lifetimes.allocated(block)
            taken.append(block)
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; one that was free leaves the free list. Null blocks are passed over."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._ref_counts[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self._ref_counts[block] += 1
            if self.lifetimes is not None:
                self.lifetimes.reused(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one holder of each block, in order of eviction: the first is evicted first. Null blocks are passed over.

        A block without a key goes to the head of the free list: it holds nothing anyone could reuse.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} freed more often than held"
            self._ref_counts[block] = count
            if count == 0:
                self._link(block, at_head=self._keys[block] is None)
                self.num_free += 1

    def register(self, block: int, key: BlockKey) -> None:
        """Make the block reusable under `key`. Several blocks may hold one key; look-ups return the first."""
        assert self._keys[block] is None, f"block {block} already has a key"
        self._keys[block] = key
        self._holders.setdefault(key, []).append(block)

    def unregister(self, block: int) -> None:
        """Make the block unusable for prefixes. A free one becomes the next to be handed out."""
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        holders = self._holders[key]
        holders.remove(block)
        if not holders:
            del self._holders[key]
        if self.lifetimes is not None:
            self.lifetimes.evicted(block)
        if self.events.has_listeners and not holders:
            self.events.publish(BlockRemoved((key[1],), key[0]))

    def lookup(self, key: BlockKey) -> int | None:
        """The first block that holds `key`, or None."""
        holders = self._holders.get(key)
        return holders[0] if holders else None

    def reset(self) -> bool:
        """Forget every reusable block. False, and nothing happens, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        self._keys = [None] * self.num_blocks
        self._holders.clear()
        if self.events.has_listeners:
            self.events.publish(AllBlocksCleared())
        return True

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _link(self, block: int, *, at_head: bool) -> None:
        before, after = (NULL_BLOCK, self._next[NULL_BLOCK]) if at_head else (self._previous[NULL_BLOCK], NULL_BLOCK)
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
