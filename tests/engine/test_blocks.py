"""The block pool: who holds what, who goes first, what can be found again."""

from __future__ import annotations

import random

import pytest

from vkit.cache.blocks import BlockLifetimes, BlockPool
from vkit.cache.events import AllBlocksCleared, BlockRemoved, CacheEvents


def test_blocks_are_handed_out_once_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    taken = pool.get_new_blocks(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="1 blocks, 0 free"):
        pool.get_new_blocks(1)
    pool.free(taken)
    assert pool.usage == 0.0


def test_unhashed_blocks_are_reused_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6)
    a, b, c, d, e = pool.get_new_blocks(5)
    for name, block in (("a", a), ("b", b), ("c", c)):
        pool.register(block, (0, name.encode()))
    pool.free([a])
    pool.free([c, b])  # freed together: c is deeper, so it goes first
    pool.free([d])
    assert pool.free_order() == [d, a, c, b]
    assert pool.get_new_blocks(2) == [d, a]
    assert pool.lookup((0, b"a")) is None
    assert pool.lookup((0, b"b")) == b
    pool.touch([b])
    assert pool.free_order() == [c]
    assert e not in pool.free_order()


def test_two_blocks_may_hold_one_key() -> None:
    pool = BlockPool(4)
    first, second, _ = pool.get_new_blocks(3)
    pool.register(first, (0, b"x"))
    pool.register(second, (0, b"x"))
    assert pool.lookup((0, b"x")) == first
    pool.unregister(first)
    assert pool.lookup((0, b"x")) == second
    assert pool.lookup((1, b"x")) is None


def test_reset_needs_every_block_back() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.register(block, (0, b"x"))
    assert not pool.reset()
    assert pool.lookup((0, b"x")) == block
    pool.free([block])
    assert pool.reset()
    assert pool.lookup((0, b"x")) is None


def test_a_random_life_keeps_the_counts_right() -> None:
    pool = BlockPool(20)
    chooser = random.Random(5)
    held: list[int] = []
    for step in range(5000):
        action = chooser.random()
        if action < 0.45 and pool.num_free:
            (block,) = pool.get_new_blocks(1)
            held.append(block)
            if chooser.random() < 0.6:
                pool.register(block, (0, b"%d" % step))
        elif action < 0.6 and held:
            block = chooser.choice(held)
            pool.touch([block])
            held.append(block)
        elif action < 0.7:
            idle = [block for block in pool.free_order() if pool.key_of(block)]
            if idle:
                block = chooser.choice(idle)
                pool.touch([block])
                held.append(block)
        elif held:
            block = held.pop(chooser.randrange(len(held)))
            pool.free([block])
        assert sorted({*held, *pool.free_order()}) == list(range(1, 20))
        assert all(pool.ref_count(block) == held.count(block) for block in range(1, 20))
        assert pool.num_free == len(pool.free_order()) == 19 - len(set(held))


def test_events_are_numbered_without_gaps_and_only_made_for_listeners() -> None:
    events = CacheEvents()
    pool = BlockPool(2, events)
    (block,) = pool.get_new_blocks(1)
    pool.register(block, (0, b"before"))
    pool.free([block])
    seen: list[object] = []
    stop = events.subscribe(lambda number, event: seen.append((number, event)))
    pool.get_new_blocks(1)
    pool.free([block])
    pool.reset()
    assert seen == [(0, BlockRemoved((b"before",), 0)), (1, AllBlocksCleared())]
    stop()
    pool.reset()
    assert len(seen) == 2


def test_lifetimes_are_measured_from_allocation_to_eviction() -> None:
    class Seen(list[float]):
        observe = list.append

    now = 0.0
    lifetime, idle, gap = Seen(), Seen(), Seen()
    pool = BlockPool(2)
    pool.lifetimes = BlockLifetimes(lifetime, idle, gap, lambda: now)
    (block,) = pool.get_new_blocks(1)
    pool.register(block, (0, b"x"))
    pool.free([block])
    now = 3.0
    pool.touch([block])
    pool.free([block])
    now = 10.0
    pool.get_new_blocks(1)
    assert (lifetime, idle, gap) == ([10.0], [7.0], [3.0])
