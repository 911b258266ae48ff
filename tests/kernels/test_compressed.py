"""Compressed attention against a plain loop over queries, entries and channels; hyper-connections by their text."""

from __future__ import annotations

import math

import pytest
import torch

from vkit import kernels
from vkit.kernels import PagedBatch

SIZE, WIDTH, RATE, WINDOW = 4, 8, 4, 6


def paged(table: list[list[int]], seq_lens: list[int], counts: list[int]) -> PagedBatch:
    cu = [0, *torch.tensor(counts).cumsum(0).tolist()]
    slots = [
        table[b][t // SIZE] * SIZE + t % SIZE
        for b, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True))
        for t in range(seq_len - count, seq_len)
    ]
    ints = {"dtype": torch.int32}
    rows = list(range(len(table)))
    return PagedBatch(
        torch.tensor(table, **ints), torch.tensor(rows, **ints), torch.tensor(slots), torch.tensor(seq_lens, **ints),
        torch.tensor(cu, **ints), rows, seq_lens, cu,
    )  # fmt: skip


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_entries_and_attention(is_overlapping: bool, chunk: int) -> None:
    """One sequence of 11 tokens in pieces: entries, then the attention of every query, by their definitions."""
    rng = torch.Generator().manual_seed(chunk)
    stored = 2 * WIDTH if is_overlapping else WIDTH
    c, z, kv = (torch.randn(11, width, generator=rng) for width in (stored, stored, WIDTH))
    q = torch.randn(11, 2, WIDTH, generator=rng)
    ape, norm = torch.randn(RATE, stored, generator=rng), torch.rand(WIDTH, generator=rng) + 0.5
    sinks = torch.randn(2, generator=rng)
    angles = torch.arange(16.0)[:, None] * torch.tensor([0.3, 0.1])
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    table = [[3, 1, 2]]
    caches = {name: torch.full((5, SIZE, width), torch.nan) for name, width in
              (("c", stored), ("z", stored), ("kv", WIDTH), ("entries", WIDTH // RATE))}  # fmt: skip
    found = []
    for start in range(0, 11, chunk):
        stop = min(start + chunk, 11)
        batch = paged(table, [stop], [stop - start])
        for name, values in (("c", c), ("z", z), ("kv", kv)):
            kernels.store_rows(values[start:stop], caches[name], batch.slot_mapping)
        kernels.pool_windows(caches["c"], caches["z"], batch, ape=ape, norm=norm, eps=1e-6, cos_sin=cos_sin,
                             entries=caches["entries"], entry_batch=batch)  # fmt: skip
        found.append(
            kernels.compressed_attention(
                q[start:stop],
                caches["kv"],
                batch,
                window=WINDOW,
                scale=0.4,
                sinks=sinks,
                rate=RATE,
                entries=caches["entries"],
                entry_batch=batch,
            )
        )
    entries = [entry(c, z, ape, norm, cos_sin, w, is_overlapping) for w in range(2)]
    for i in range(11):
        keys = [kv[j] for j in range(max(0, i - WINDOW + 1), i + 1)]
        keys += [entries[w] for w in range(2) if (w + 1) * RATE <= i + 1]
        for head in range(2):
            powers = [math.exp(0.4 * float(q[i, head] @ key)) for key in keys]
            total = sum(powers) + math.exp(float(sinks[head]))
            expected = sum(power / total * key for power, key in zip(powers, keys, strict=True))
            torch.testing.assert_close(torch.cat(found)[i, head], expected, atol=1e-5, rtol=1e-5)


def entry(c: torch.Tensor, z: torch.Tensor, ape: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor, w: int,
          is_overlapping: bool) -> torch.Tensor:  # fmt: skip
    """One entry, channel by channel."""
    pooled = torch.zeros(WIDTH)
    for channel in range(WIDTH):
        own = channel + WIDTH if is_overlapping else channel
        slots = [(w * RATE + j, j, own) for j in range(RATE)]
        if is_overlapping and w:
            slots += [((w - 1) * RATE + j, j, channel) for j in range(RATE)]
        powers = [math.exp(float(z[t, at] + ape[j, at])) for t, j, at in slots]
        pooled[channel] = sum(p / sum(powers) * float(c[t, at]) for p, (t, _, at) in zip(powers, slots, strict=True))
    pooled = pooled * (pooled.square().mean() + 1e-6).rsqrt() * norm
    for pair in range(2):
        a, b = pooled[4 + 2 * pair].clone(), pooled[5 + 2 * pair].clone()
        cos, sin = cos_sin[w * RATE, pair], cos_sin[w * RATE, 2 + pair]
        pooled[4 + 2 * pair], pooled[5 + 2 * pair] = a * cos - b * sin, b * cos + a * sin
    return pooled


def test_mixing_is_doubly_stochastic() -> None:
    rng = torch.Generator().manual_seed(0)
    streams = torch.randn(5, 3, 8, generator=rng)
    fn, base, scale = torch.randn(15, 24, generator=rng), torch.randn(15, generator=rng), torch.rand(3, generator=rng)
    pre, post, mix = kernels.hyper_weights(streams, fn, base, scale, iterations=60, hyper_eps=1e-6, norm_eps=1e-6)
    torch.testing.assert_close(mix.sum(1), torch.ones(5, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(mix.sum(2), torch.ones(5, 3), atol=1e-3, rtol=0)
    assert bool(((pre > 0) & (pre < 1.001)).all())
    assert bool(((post > 0) & (post < 2)).all())
    y = torch.randn(5, 8, generator=rng)
    left = kernels.hyper_leave(streams, y, post, mix)
    expected = post[2, 1] * y[2] + sum(mix[2, j, 1] * streams[2, j] for j in range(3))
    torch.testing.assert_close(left[2, 1], expected)


def test_errors() -> None:
    batch = paged([[1]], [2], [2])
    with pytest.raises(ValueError, match="store_rows: values"):
        kernels.store_rows(torch.zeros(2, 3), torch.zeros(2, SIZE, 4), batch.slot_mapping)
    with pytest.raises(ValueError, match="compressed_attention: sinks"):
        kernels.compressed_attention(torch.zeros(2, 2, 8), torch.zeros(2, SIZE, 8), batch, window=4, scale=1.0,
                                     sinks=torch.zeros(3))  # fmt: skip
