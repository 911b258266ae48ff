"""Prefix reuse: hashes, hits per kind of group, salts, events, and what a step that was withdrawn takes back."""

from __future__ import annotations

import hashlib

import pytest

from tests.fakes import FULL, FakeRunner, check_pool, generate, make_engine, make_request, naive_loop, run
from vkit.cache.blocks import BlockPool
from vkit.cache.events import BlockStored
from vkit.cache.groups import CacheGroup, CacheKind, FullRules, SlidingRules, StateRules
from vkit.cache.manager import KVCacheManager
from vkit.cache.prefix import BlockHasher, cbor_item, hash_sha256_cbor
from vkit.sequence import Sequence
from vkit.types import OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, output_kind=OutputKind.FINAL_ONLY)
SLIDING = [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.SLIDING, (1,), 9)]


def sequence(token_ids: list[int], name: str = "s", salt: str | None = None) -> Sequence:
    return Sequence(name, list(token_ids), len(token_ids), GREEDY, 0.0, cache_salt=salt, max_total_tokens=10**6)


def cache(groups: list[CacheGroup] = FULL, num_blocks: int = 50, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(
        groups,
        BlockPool(num_blocks),
        block_size=block_size,
        max_model_len=1000,
        max_step_tokens=1000,
        hasher=BlockHasher(block_size, seed="0"),
    )


def test_the_cbor_chain_is_what_any_language_would_compute() -> None:
    # [h'00'*32, [1, 24, 256, 70000], null] by hand, RFC 8949.
    expected = bytes.fromhex("83" + "5820" + "00" * 32 + "84" + "01" + "1818" + "190100" + "1a00011170" + "f6")
    assert hash_sha256_cbor(bytes(32), [1, 24, 256, 70000], ()) == hashlib.sha256(expected).digest()
    salted = expected[:-1] + bytes.fromhex("81" + "62") + b"ab"
    assert hash_sha256_cbor(bytes(32), [1, 24, 256, 70000], ("ab",)) == hashlib.sha256(salted).digest()
    assert cbor_item(-500) == bytes.fromhex("3901f3")  # RFC 8949, appendix A gives -1000 as 3903e7
    assert cbor_item(2**32) == bytes.fromhex("1b0000000100000000")


def test_a_fixed_seed_gives_the_same_hashes_and_none_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert BlockHasher(4).none_hash != BlockHasher(4).none_hash
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    assert BlockHasher(4).none_hash == BlockHasher(4).none_hash == BlockHasher(4, seed="12").none_hash


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_each_block_is_hashed_once_and_depends_on_all_before_it(algorithm: str) -> None:
    hasher = BlockHasher(2, algorithm, seed="0")
    one, other = sequence([1, 2, 3, 4, 5]), sequence([9, 2, 3, 4, 5])
    hasher.extend(one)
    hasher.extend(other)
    assert len(one.block_hashes) == 2
    assert not set(one.block_hashes) & set(other.block_hashes)
    first = list(one.block_hashes)
    one.token_ids += [6, 7]
    hasher.extend(one)
    assert one.block_hashes[:2] == first
    assert len(one.block_hashes) == 3
    salted = sequence([1, 2, 3, 4], salt="x")
    hasher.extend(salted)
    assert not set(salted.block_hashes) & set(first)


def test_full_attention_hits_up_to_the_first_missing_block() -> None:
    present = {0: 5, 1: 6, 3: 8}
    rules = FullRules(4)
    assert rules.longest_hit(present.get, 4) == 2
    assert rules.longest_hit(present.get, 1) == 1
    assert rules.hit_table(present.get, 2) == [5, 6]


@pytest.mark.parametrize(
    ("window", "present", "limit", "hit", "table"),
    [
        (9, {2, 3}, 6, 4, [0, 0, 12, 13]),  # ceil(8 / 4) = 2 blocks lead up to 4
        (9, {0}, 6, 1, [10]),  # the whole beginning is enough
        (9, {1, 3, 4}, 6, 5, [0, 0, 0, 13, 14]),
        (9, {1, 3, 5}, 6, 0, []),
        (1, set(), 6, 6, [0] * 6),  # a window of one token sees nothing of the past
        (5, {4}, 6, 5, [0, 0, 0, 0, 14]),
        (6, {4}, 6, 0, []),
    ],
)
def test_sliding_windows_need_their_window_only(
    window: int, present: set[int], limit: int, hit: int, table: list[int]
) -> None:
    rules = SlidingRules(4, window)

    def block_at(index: int) -> int | None:
        return 10 + index if index in present else None

    assert rules.longest_hit(block_at, limit) == hit
    assert rules.hit_table(block_at, hit) == table


def test_states_hit_at_the_last_saved_boundary() -> None:
    rules = StateRules(4, saves=True)
    assert rules.longest_hit({0: 3, 2: 7}.get, 5) == 3
    assert rules.hit_table({0: 3, 2: 7}.get, 3) == [7]


def test_groups_shrink_each_others_hits() -> None:
    """Full attention has six blocks, the window only two around block 4: the common hit is four blocks."""
    manager = cache(SLIDING)
    first = sequence(list(range(100, 124)), "a")
    assert manager.allocate(first, 24, manager.find_hit(first))
    pool = manager.pool
    keys = [(1, first.block_hashes[index]) for index in (0, 1, 4, 5)]
    for key in keys:
        block = pool.lookup(key)
        assert block is not None
        pool.unregister(block)
    hit = manager.find_hit(sequence([*range(100, 124), 1], "b"))
    assert hit.num_tokens == 16
    assert hit.tables[1][:2] == [0, 0]
    assert all(hit.tables[1][2:])
    assert all(hit.tables[0])


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    manager = cache()
    first = sequence(list(range(8)))
    manager.allocate(first, 8, manager.find_hit(first))
    assert manager.find_hit(sequence(list(range(8)))).num_tokens == 4
    assert manager.find_hit(sequence([*range(8), 1])).num_tokens == 8


def test_allocation_takes_all_or_nothing_and_counts_idle_hits() -> None:
    manager = cache(num_blocks=5)
    first = sequence(list(range(8)), "a")
    manager.allocate(first, 8, manager.find_hit(first))
    manager.free(first)
    other = sequence([*range(100, 108)], "b")
    assert manager.allocate(other, 8, manager.find_hit(other))
    second = sequence([*range(8), 50], "c")
    hit = manager.find_hit(second)
    assert hit.num_tokens == 8
    before = manager.pool.free_order()
    assert not manager.allocate(second, 1, hit)  # two idle hits and one new block, two free
    assert manager.pool.free_order() == before
    assert second.block_ids == []


def test_what_a_withdrawn_step_registered_is_forgotten() -> None:
    manager = cache()
    first = sequence(list(range(16)), "a")
    manager.begin_pass()
    manager.allocate(first, 8, manager.find_hit(first))
    first.num_computed_tokens = 8
    manager.begin_pass()
    manager.allocate(first, 8)
    probe = sequence([*range(16), 1], "b")
    assert manager.find_hit(probe).num_tokens == 16
    manager.take_back_registrations(first)
    assert manager.find_hit(probe).num_tokens == 8  # the step before has run
    manager.free(first)
    assert manager.pool.num_free == manager.pool.num_usable


def test_a_preempted_sequence_leaves_no_unwritten_hits_behind() -> None:
    """Registered at planning, preempted in the same pass: a later request may not hit what nobody wrote."""
    engine = make_engine(num_blocks=9, block_size=2, limits={"max_num_seqs": 3, "full_sequence_must_fit": False})
    requests = [
        make_request(engine, [5 + i, 6, 7], GREEDY.with_(max_tokens=9), name=f"{i}", priority=0) for i in range(3)
    ]
    outputs = generate(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        assert outputs[request.id].outputs[0].token_ids == naive_loop(FULL, 24, request, seed=0, max_model_len=64)[0]
    check_pool(engine)


def test_a_shared_prefix_is_computed_once() -> None:
    engine = make_engine(
        num_blocks=2000, block_size=16, limits={"max_num_batched_tokens": 512, "max_model_len": 600, "max_num_seqs": 16}
    )
    prefix = [2 + i % 20 for i in range(500)]
    requests = [make_request(engine, [*prefix, 3 + i], GREEDY, name=f"{i}") for i in range(10)]
    for request in requests:
        engine.add_request(request)
    outputs = {output.request_id: output for output in run(engine, after_step=lambda: check_pool(engine))}
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    cached = 500 // 16 * 16
    assert runner.num_tokens == 501 + 9 * (501 - cached) + 10 * 3
    assert engine.metrics.prefix_cache_queries.value == 10 * 501
    assert engine.metrics.prefix_cache_hits.value == 9 * cached
    assert [outputs[f"{i}"].num_cached_tokens for i in range(10)] == [0] + [cached] * 9
    assert engine.metrics.prompt_tokens_by_source.by_label["local_cache_hit"] == 9 * cached
    for request in requests:
        assert outputs[request.id].outputs[0].token_ids == naive_loop(FULL, 24, request, seed=0, max_model_len=600)[0]


def test_salts_isolate_tenants() -> None:
    engine = make_engine()
    prompt = list(range(2, 20))
    hits = []
    for name, salt in (("a", "one"), ("b", "two"), ("c", None), ("d", "one")):
        outputs = generate(engine, [make_request(engine, prompt, GREEDY, name=name, cache_salt=salt)])
        hits.append(outputs[name].num_cached_tokens)
    assert hits == [0, 0, 0, 16]


def test_the_next_turn_hits_the_answer_of_the_last() -> None:
    engine = make_engine()
    first = generate(engine, [make_request(engine, [2, 3, 4, 5, 6], GREEDY.with_(max_tokens=9))])["r"]
    turn = [2, 3, 4, 5, 6, *first.outputs[0].token_ids, 7, 8]
    second = generate(engine, [make_request(engine, turn, GREEDY, name="s")])["s"]
    assert second.num_cached_tokens == 12  # fourteen tokens of the first turn, the last of them never computed


def test_skip_reading_still_fills_the_cache() -> None:
    engine = make_engine()
    prompt = list(range(2, 20))
    hits = []
    for name, skips in (("a", True), ("b", True), ("c", None)):
        params = GREEDY.with_(skip_reading_prefix_cache=skips)
        hits.append(generate(engine, [make_request(engine, prompt, params, name=name)])[name].num_cached_tokens)
    assert hits == [0, 0, 16]


def test_a_window_holds_a_bounded_number_of_blocks_for_ever() -> None:
    groups = [CacheGroup(0, CacheKind.SLIDING, (0,), 9)]
    engine = make_engine(groups=groups, num_blocks=10, block_size=4, limits={"max_model_len": 500})
    request = make_request(engine, [2, 3, 4], GREEDY.with_(max_tokens=400))
    engine.add_request(request)
    most = 0

    def watch() -> None:
        nonlocal most
        check_pool(engine)
        most = max(most, engine.pool.num_usable - engine.pool.num_free)

    (output,) = run(engine, after_step=watch)
    assert output.outputs[0].token_ids == naive_loop(groups, 24, request, seed=0, max_model_len=500)[0]
    assert most <= 4  # nine tokens touch at most three blocks, plus the one begun


def test_a_window_hit_needs_no_early_blocks() -> None:
    groups = [CacheGroup(0, CacheKind.SLIDING, (0,), 9)]
    engine = make_engine(groups=groups, num_blocks=40, block_size=4, limits={"max_model_len": 100})
    first = generate(engine, [make_request(engine, list(range(2, 22)), GREEDY.with_(max_tokens=40), name="a")])["a"]
    tokens = [*range(2, 22), *first.outputs[0].token_ids]
    for index in (0, 1, 2):  # evict the beginning
        block = engine.pool.lookup((0, _hashes(engine, tokens)[index]))
        assert block is not None
        engine.pool.unregister(block)
    request = make_request(engine, [*tokens, 5], GREEDY, name="b")
    second = generate(engine, [request])["b"]
    assert second.num_cached_tokens == 56
    assert second.outputs[0].token_ids == naive_loop(groups, 24, request, seed=0, max_model_len=100)[0]


def _hashes(engine: object, tokens: list[int]) -> list[bytes]:
    probe = sequence([*tokens, 1])
    engine.cache._hasher.extend(probe)  # type: ignore[attr-defined]
    return probe.block_hashes


def test_stored_events_name_parent_and_tokens() -> None:
    engine = make_engine()
    seen: list[BlockStored] = []
    engine.events.subscribe(lambda number, event: seen.append(event))  # type: ignore[arg-type]
    generate(engine, [make_request(engine, [2, 3, 4, 5, 6, 7, 8, 9, 10], GREEDY)])
    first, second = seen
    assert first.token_ids == (2, 3, 4, 5, 6, 7, 8, 9)
    assert first.parent_hash is None
    assert second.parent_hash == first.hashes[-1]
    assert second.block_size == 4
