"""Attention in which pictures see themselves, against a mask written out in full."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from vkit import kernels
from vkit.kernels import PagedBatch
from vkit.layers import attention_with_runs

BLOCK, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 16


def random_step(rng: random.Random) -> tuple[list[int], list[int], list[list[tuple[int, int]]]]:
    """Lengths, queries and runs of a few sequences; no chunk cuts a run."""
    lengths, queries, spans = [], [], []
    for _ in range(rng.randint(1, 4)):
        marks = sorted(rng.sample(range(60), 2 * rng.randint(0, 3)))
        runs = [(first, beyond) for first, beyond in zip(marks[::2], marks[1::2], strict=True)]
        length = rng.randint(max([beyond for _, beyond in runs], default=1), 64)
        starts = [start for start in range(length) if not any(first < start < beyond for first, beyond in runs)]
        lengths.append(length)
        queries.append(length - rng.choice(starts))
        spans.append(runs)
    return lengths, queries, spans


def visible(length: int, runs: list[tuple[int, int]], window: int | None, reaches: bool) -> torch.Tensor:
    """(length, length): which query sees which key."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = j <= i
    above = j > i - window if window is not None else torch.ones_like(seen)
    for first, beyond in runs:
        same = (i >= first) & (i < beyond) & (j >= first) & (j < beyond)
        seen = seen | same
        if reaches:
            above = above | same
    return seen & above


@pytest.mark.parametrize("name", ["reference", *(item.name for item in kernels.backends("cpu"))])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("reaches", [False, True])
def test_against_a_full_mask(name: str, window: int | None, reaches: bool) -> None:
    unavailable = {item.name: item.unavailable for item in kernels.backends("cpu")}
    if unavailable.get(name):
        pytest.skip(f"{name}: {unavailable[name]}")
    rng = random.Random(f"{window} {reaches}")
    with kernels.using_backend("cpu", name):
        for seed in range(12):
            check(rng, seed, window, reaches)


def check(rng: random.Random, seed: int, window: int | None, reaches: bool) -> None:
    lengths, queries, spans = random_step(rng)
    torch.manual_seed(seed)
    blocks = list(range(1, 1 + sum(-(-length // BLOCK) for length in lengths)))
    rng.shuffle(blocks)
    table = torch.zeros(len(lengths), 16, dtype=torch.int32)
    page = 2 * BLOCK * KV_HEADS * WIDTH * 4
    pages = torch.full((len(blocks) + 1, page), 255, dtype=torch.uint8)
    k_cache, v_cache = kernels.kv_layout(pages, BLOCK, KV_HEADS, (WIDTH, WIDTH), torch.float32)
    keys, values, q, expected = [], [], [], []
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        own = [blocks.pop() for _ in range(-(-length // BLOCK))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        k, v = torch.randn(length, KV_HEADS, WIDTH), torch.randn(length, KV_HEADS, WIDTH)
        slots = torch.tensor([own[place // BLOCK] * BLOCK + place % BLOCK for place in range(length)])
        kernels.write_kv(k, v, k_cache, v_cache, slots)
        query = torch.randn(count, HEADS, WIDTH)
        mask = visible(length, spans[row], window, reaches)[length - count :]
        expected.append(dense(query, k, v, mask))
        keys.append(k)
        values.append(v)
        q.append(query)
    cu = [0, *itertools.accumulate(queries)]
    rows = list(range(len(lengths)))
    paged = PagedBatch(
        table,
        torch.tensor(rows, dtype=torch.int32),
        torch.full((cu[-1],), -1),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(cu, dtype=torch.int32),
        rows,
        lengths,
        cu,
    )
    found = attention_with_runs(torch.cat(q), k_cache, v_cache, paged, spans, 0.3, window, reaches_run=reaches)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=0)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    group = HEADS // KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
