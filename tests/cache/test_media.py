"""The budget of encoded media: whatever requests come, every step finds what it needs and nothing is lost."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FULL, FakeBatch, FakeRunner, check_pool, context_key, hashed_logits, make_engine, make_request
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.cache.media import MediaCache
from vkit.engine import Engine
from vkit.media import MediaInput, PlacedMedia
from vkit.sequence import MediaOrders, Plan, Sequence
from vkit.types import SamplingParams

VOCAB, PAD, MAX_LEN = 24, 20, 64
GROUPS = {
    "full": FULL,
    "full+sliding": [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.SLIDING, (1,), 7)],
    "full+state": [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.STATE, (1,))],
}


def item(content: int, num_rows: int) -> MediaInput:
    digest = hashlib.sha256(b"%d %d" % (content, num_rows)).digest()
    return MediaInput("image", digest, np.zeros((1, 1), np.float32), (1, 1, 1), num_rows, (PAD,) * num_rows, PAD)


def sequence(name: str, *media: PlacedMedia, length: int = 40) -> Sequence:
    return Sequence(name, [2] * length, length, SamplingParams(), 0.0, media=media)


def place(content: int, *spans: tuple[int, int]) -> PlacedMedia:
    return PlacedMedia(item(content, sum(stop - start for start, stop in spans)), spans)


def row_value(entry: PlacedMedia, row: int) -> int:
    """What the fake model keeps for a media token."""
    return 1000 + zlib.crc32(b"%d" % row, zlib.crc32(entry.item.digest)) % 1_000_000


def seen(token_ids: list[int], media: tuple[PlacedMedia, ...]) -> list[int]:
    """The prompt as the fake model takes it in: rows in place of pads."""
    values = list(token_ids)
    for entry in media:
        positions = [position for start, stop in entry.spans for position in range(start, stop)]
        for row, position in enumerate(positions):
            values[position] = row_value(entry, row)
    return values


class MediaRunner(FakeRunner):
    """The fake model that follows orders about media and sees rows where pads are."""

    def __init__(self, *args: Any, max_rows: int, max_step_rows: int, splits: bool, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.limits = max_rows, max_step_rows, splits
        self.encoded: dict[bytes, int] = {}
        self.num_encoded = 0

    def prepare(self, plan: Plan) -> Any:
        batch = super().prepare(plan)
        rows, needed = [], set()
        for index, share in enumerate(plan.scheduled):
            tokens, start, *rest = batch.rows[index]
            values = seen(share.sequence.token_ids, share.sequence.media)
            own = values[start : start + len(tokens)]
            rows.append((own, start, *rest))
            for entry in share.sequence.media:
                if entry.start < start + len(tokens) and entry.stop > start:
                    needed.add(entry.item.digest)
                if not self.limits[2]:
                    assert not any(first < start + len(tokens) < beyond for first, beyond in entry.spans), "a cut item"
        return FakeBatch(rows, batch.state_copies), plan.media, needed

    def execute(self, batch: Any) -> torch.Tensor:
        inner, orders, needed = batch
        max_rows, max_step_rows, _ = self.limits
        if orders.clears:
            self.encoded.clear()
        for digest in orders.free:
            del self.encoded[digest]
        for entry in orders.encode:
            assert entry.digest not in self.encoded, "encoded twice"
            self.encoded[entry.digest] = entry.num_rows
            self.num_encoded += 1
        sizes = [entry.num_rows for entry in orders.encode]
        assert sum(sizes) <= max(max_step_rows, max(sizes, default=0))
        assert sum(self.encoded.values()) <= max(max_rows, max(self.encoded.values(), default=0))
        assert needed <= self.encoded.keys(), "a step needs what is not there"
        return super().execute(inner)


@dataclass(frozen=True)
class Job:
    """One request: text runs and items by turns."""

    texts: tuple[int, ...]
    items: tuple[tuple[int, int], ...]
    max_tokens: int
    arrives: int
    aborted: int | None

    def prompt(self) -> tuple[list[int], tuple[PlacedMedia, ...]]:
        ids: list[int] = []
        placed = []
        for index, length in enumerate(self.texts):
            ids += [2 + (index + place) % 8 for place in range(length)]
            if index < len(self.items):
                content, num_rows = self.items[index]
                placed.append(PlacedMedia(item(content, num_rows), ((len(ids), len(ids) + num_rows),)))
                ids += [PAD] * num_rows
        return ids, tuple(placed)


@st.composite
def jobs(draw: Any) -> Job:
    items = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=3))
    texts = draw(st.lists(st.integers(0, 5), min_size=len(items) + 1, max_size=len(items) + 1))
    texts[-1] = max(1, texts[-1])
    return Job(
        tuple(texts),
        tuple(items),
        draw(st.integers(1, 8)),
        draw(st.integers(0, 5)),
        draw(st.one_of(st.none(), st.none(), st.integers(0, 9))),
    )


def expected_tokens(job: Job, groups: list[CacheGroup]) -> list[int]:
    ids, media = job.prompt()
    values = seen(ids, media)
    tokens: list[int] = []
    for _ in range(job.max_tokens):
        tokens.append(int(hashed_logits(context_key(groups, values), VOCAB).argmax()))
        values.append(tokens[-1])
    return tokens


def start(job: Job, engine: Engine, name: str) -> None:
    ids, media = job.prompt()
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    engine.add_request(replace(make_request(engine, ids, params, name=name), media=media))


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(jobs(), min_size=1, max_size=5),
    groups=st.sampled_from(sorted(GROUPS)),
    block_size=st.sampled_from([1, 3, 4]),
    spare=st.sampled_from([0, 2, 40]),
    budget=st.sampled_from([1, 4, 9, 14, 100]),
    tokens=st.sampled_from([9, 11, 30]),
    splits=st.booleans(),
    caches=st.booleans(),
    is_async=st.booleans(),
)
def test_any_requests(
    work: list[Job],
    groups: str,
    block_size: int,
    spare: int,
    budget: int,
    tokens: int,
    splits: bool,
    caches: bool,
    is_async: bool,
) -> None:
    chosen = GROUPS[groups]
    longest = max(len(job.prompt()[0]) + job.max_tokens for job in work)
    num_blocks = 1 + (-(-longest // block_size) + 2) * len(chosen) + spare
    runner = MediaRunner(
        chosen, num_blocks, block_size, vocab_size=VOCAB, max_rows=budget, max_step_rows=budget, splits=splits
    )
    engine = make_engine(
        runner,
        groups=chosen,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB,
        enable_prefix_caching=caches,
        async_scheduling=is_async,
        limits={
            "max_num_seqs": 3,
            "max_num_batched_tokens": tokens,
            "max_model_len": MAX_LEN,
            "max_num_encoder_input_tokens": budget,
            "disable_chunked_mm_input": not splits,
        },
    )
    found: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    for step in range(400):
        for index, job in enumerate(work):
            if job.arrives == step:
                start(job, engine, str(index))
            if job.aborted is not None and job.arrives + job.aborted == step:
                engine.abort(str(index))
        if step > 20 and not engine.has_work:
            break
        for output in engine.step():
            (choice,) = output.outputs
            assert choice.error is None
            if output.finished:
                found[output.request_id] = list(choice.token_ids)
                ended[output.request_id] = str(choice.finish_reason)
        check_pool(engine)
    assert len(ended) == len(work), "every request ends"
    for index, job in enumerate(work):
        expected = expected_tokens(job, chosen)
        if ended[str(index)] != "abort":
            assert found[str(index)] == expected
    assert not engine.scheduler.media._held, "nobody holds anything in the end"
    engine.close()


def test_a_chunk_ends_before_what_cannot_be_encoded() -> None:
    cache = MediaCache(100, 8)
    first = sequence("a", place(0, (3, 9)), place(1, (12, 18)))
    assert cache.cap(first, 0, 40) == 12
    cache.take(first, 0, 12)
    assert [entry.num_rows for entry in cache.take_orders().encode] == [6]
    assert cache.cap(first, 12, 5) == 0, "the step has encoded enough"
    cache.begin_pass()
    assert cache.cap(first, 12, 5) == 5


def test_an_item_larger_than_the_budget_has_a_step_to_itself() -> None:
    cache = MediaCache(4, 4)
    one, other = sequence("a", place(0, (0, 9))), sequence("b", place(1, (0, 2)))
    assert cache.cap(one, 0, 40) == 40
    cache.take(one, 0, 40)
    assert cache.cap(other, 0, 40) == 0
    one.num_computed_tokens = 40
    cache.begin_pass()
    assert cache.cap(other, 0, 40) == 40
    cache.take(other, 0, 40)
    orders = cache.take_orders()
    assert [entry.num_rows for entry in orders.encode] == [2], "evicted before it was ever encoded"
    assert orders.free == []


def test_the_least_recently_held_goes_first() -> None:
    cache = MediaCache(6, 100)
    for content in (0, 1, 0):
        holder = sequence(f"s{content}", place(content, (0, 3)))
        cache.take(holder, 0, 40)
        holder.num_computed_tokens = 40
        cache.begin_pass()
    assert (cache.num_queries, cache.num_hits) == (3, 1)
    cache.take_orders()
    cache.take(sequence("new", place(2, (0, 3))), 0, 40)
    assert cache.take_orders() == MediaOrders([], []) or cache.digests == [item(0, 3).digest, item(2, 3).digest]
    assert cache.num_rows == 6


def test_whole_runs() -> None:
    cache = MediaCache(100, 100, splits_items=False)
    clip = sequence("a", place(0, (3, 6), (8, 11)))
    assert [cache.cap(clip, 0, want) for want in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] == [3, 3, 3, 6, 7, 8, 8, 8, 11, 12]


def test_lost_orders_are_made_up_for() -> None:
    cache = MediaCache(100, 100)
    holder = sequence("a", place(0, (0, 3)))
    cache.take(holder, 0, 2)
    cache.clear()
    assert cache.take_orders() == MediaOrders(clears=True)
    cache.give_back(holder)
    assert cache.cap(holder, 2, 10) == 10
    cache.take(holder, 2, 10)
    assert [entry.num_rows for entry in cache.take_orders().encode] == [3]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_prefix_keys_name_media(size: int) -> None:
    from vkit.cache.prefix import BlockHasher

    def keys(*media: PlacedMedia) -> list[bytes]:
        own = sequence("a", *media, length=24)
        hasher.extend(own)
        return own.block_hashes

    hasher = BlockHasher(size, seed="x")
    plain, one, other = keys(), keys(place(0, (9, 12))), keys(place(1, (9, 12)))
    same_before = 9 // size
    assert plain[:same_before] == one[:same_before] == other[:same_before]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(*(x[same_before:] for x in (plain, one, other)), strict=True))
    assert keys(place(0, (9, 12))) == one
    assert keys(place(0, (8, 11)))[-1] != one[-1], "where it lies counts"
