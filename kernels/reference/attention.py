"""Attention over a paged cache: blocks are gathered per sequence (or per group of decoding sequences), then attended.

Nothing of size query × key is built beyond one chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.narrow_cache import FP8, SCALE_BYTES, decode_rows, encode_rows

_BYTES = dict.fromkeys(FP8, torch.uint8)

_MAX_SCORES = 1 << 23
"""Scores alive at once on the path that builds them (float32: 32 MB)."""
_MAX_GATHERED_TOKENS = 1 << 15
"""Keys, padding included, that one group of decoding sequences gathers."""
_QUERY_CHUNK = 512
"""Queries per call in a prefill, so that the mask stays small and a window skips what is out of sight."""


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k (T, K, D) and v (T, K, Dv) at their slots of (N, S, K, D) caches; slot -1 is skipped."""
    block_size = k_cache.shape[1]
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    at = (slot_mapping // block_size, slot_mapping % block_size)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        stored = _BYTES.get(cache.dtype, cache.dtype)  # not every type has an index_put of its own; bytes have
        cache.view(stored).index_put_(at, encode_rows(rows, cache.dtype).view(stored))


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v inside each run; neighbours of one length are attended to together."""
    out, start = [], 0
    for length, group in itertools.groupby(lengths):
        count = sum(1 for _ in group)
        stop = start + count * length
        queries, keys, values = (x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out.append(attended.transpose(1, 2).flatten(0, 1))
        start = stop
    return out[0] if len(out) == 1 else torch.cat(out) if out else q


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(mask(cap(scale · q kᵀ))) v for every query against its own sequence."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1] - (SCALE_BYTES if v_cache.dtype is torch.int8 else 0))
    work = _work(batch, k_cache.shape[1], window)
    for group in work.decodes:
        keys, values = _gather(group.blocks, k_cache, v_cache, q.dtype)
        # No probability goes to slots beyond a sequence's end, but 0 · NaN from a recycled block would still be NaN.
        keys[group.beyond] = 0.0
        values[group.beyond] = 0.0
        mask = group.visible[:, None, None, :]
        out[group.queries] = _attend(q[group.queries].unsqueeze(2), keys, values, mask, scale, soft_cap, sinks).squeeze(
            2
        )
    for chunk in work.prefills:
        keys, values = _gather(chunk.blocks, k_cache, v_cache, q.dtype)
        keys, values = keys[:, : chunk.num_keys], values[:, : chunk.num_keys]
        queries = q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
        attended = _attend(queries, keys, values, chunk.visible, scale, soft_cap, sinks)
        out[chunk.start : chunk.stop] = attended.squeeze(0).transpose(0, 1)
    return out


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences with one query each, their keys padded to a common length."""

    queries: Tensor
    """(b,) rows of q."""
    blocks: Tensor
    """(b, n) block ids; padding repeats a valid id."""
    visible: Tensor
    """(b, n · S) whether the sequence's query sees the key."""
    beyond: tuple[Tensor, ...]
    """Indices of the slots beyond each sequence's end."""


@dataclass(slots=True)
class _PrefillChunk:
    """A run of queries of one sequence and the blocks they can see."""

    start: int
    stop: int
    blocks: Tensor
    """(1, n)"""
    num_keys: int
    """Keys of those blocks up to the last query's own."""
    visible: Tensor
    """(1, 1, q, num_keys)"""


@dataclass(slots=True)
class _Work:
    decodes: list[_DecodeGroup]
    prefills: list[_PrefillChunk]


def _work(batch: PagedBatch, block_size: int, window: int | None) -> _Work:
    """How to cut the step up; the same for every layer with this window, so derived once."""
    key = ("reference.work", block_size, window)
    work = batch.memo.get(key)
    if not isinstance(work, _Work):
        batch.memo[key] = work = _cut(batch, block_size, window)
    return work


def _cut(batch: PagedBatch, block_size: int, window: int | None) -> _Work:
    cu, lengths = batch.host_cu_seqlens, batch.host_seq_lens
    decodes: list[int] = []
    prefills: list[_PrefillChunk] = []
    for b, seq_len in enumerate(lengths):
        query_len = cu[b + 1] - cu[b]
        if seq_len == 0:
            continue  # a padding row: it sees nothing, and its result is zeros
        if query_len == 1:
            decodes.append(b)
            continue
        for first in range(0, query_len, _QUERY_CHUNK):
            last = min(first + _QUERY_CHUNK, query_len)
            prefills.append(
                _prefill_chunk(batch, b, cu[b] + first, cu[b] + last, seq_len - query_len, block_size, window)
            )
    groups = [_decode_group(batch, members, block_size, window) for members in _alike(decodes, lengths, window)]
    return _Work(groups, prefills)


def _prefill_chunk(
    batch: PagedBatch, b: int, start: int, stop: int, offset: int, block_size: int, window: int | None
) -> _PrefillChunk:
    """The chunk of queries start..stop-1; query i of the sequence has position offset + i."""
    device = batch.block_table.device
    first_position = offset + start - batch.host_cu_seqlens[b]
    last_position = first_position + stop - start - 1
    first_block = 0 if window is None else max(0, first_position - window + 1) // block_size
    first_key = first_block * block_size
    blocks = batch.block_table[batch.host_rows[b], first_block : last_position // block_size + 1]
    keys = torch.arange(first_key, last_position + 1, device=device)
    queries = torch.arange(first_position, last_position + 1, device=device).unsqueeze(1)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return _PrefillChunk(start, stop, blocks.long().unsqueeze(0), len(keys), visible[None, None])


def _alike(members: list[int], lengths: list[int], window: int | None) -> list[list[int]]:
    """Split decoding sequences into groups of similar length, so that padding at most doubles the keys read."""
    groups: list[list[int]] = []
    shortest = 0
    for b in sorted(members, key=lengths.__getitem__):
        seen = lengths[b] if window is None else min(lengths[b], window)
        if groups and seen <= 2 * shortest + 64 and seen * (len(groups[-1]) + 1) <= _MAX_GATHERED_TOKENS:
            groups[-1].append(b)
        else:
            groups.append([b])
            shortest = seen
    return groups


def _decode_group(batch: PagedBatch, members: list[int], block_size: int, window: int | None) -> _DecodeGroup:
    device = batch.block_table.device
    lengths = torch.tensor([batch.host_seq_lens[b] for b in members], device=device).unsqueeze(1)
    rows = torch.tensor([batch.host_rows[b] for b in members], device=device).unsqueeze(1)
    queries = torch.tensor([batch.host_cu_seqlens[b] for b in members], device=device)
    first_block = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0) // block_size
    num_blocks = (lengths - 1) // block_size + 1 - first_block
    column = torch.arange(int(num_blocks.max()), device=device)
    blocks = batch.block_table[rows, first_block + torch.minimum(column, num_blocks - 1)].long()
    position = first_block * block_size + torch.arange(len(column) * block_size, device=device)
    within = position < lengths
    visible = within if window is None else within & (position >= lengths - window)
    return _DecodeGroup(queries, blocks, visible, (~within).nonzero(as_tuple=True))


def _gather(blocks: Tensor, k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the blocks (b, n), as (b, n · S, K, D)."""
    k, v = (decode_rows(_taken(cache, blocks), dtype) for cache in (k_cache, v_cache))
    return k, v


def _taken(cache: Tensor, blocks: Tensor) -> Tensor:
    """The blocks of a cache, through bytes where its type has no index of its own."""
    stored = _BYTES.get(cache.dtype)
    rows = cache[blocks] if stored is None else cache.view(stored)[blocks].view(cache.dtype)
    return rows.flatten(1, 2)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q (b, H, n, D), keys (b, L, K, D), values (b, L, K, Dv), visible (b | 1, 1, n, L) -> (b, H, n, Dv)."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if soft_cap is None and sinks is None:
        if q.shape[2] == 1:
            # One query sees the same keys in every head: heads that share a kv head become its queries, so that keys
            # are not copied once per head.
            grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[3])
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
            return out.reshape(q.shape[0], q.shape[1], 1, -1)
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
        )
    rows = max(1, _MAX_SCORES // max(1, q.shape[0] * q.shape[1] * keys.shape[2]))
    parts = [
        _attend_explicitly(part, keys, values, seen, scale, soft_cap, sinks)
        for part, seen in zip(q.split(rows, dim=2), visible.split(rows, dim=2), strict=True)
    ]
    return torch.cat(parts, dim=2)


def _attend_explicitly(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `_attend`, with the scores built in float32."""
    num_kv_heads = keys.shape[1]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # (b, K, G, n, D)
    scores = grouped @ keys.float().transpose(-1, -2).unsqueeze(2) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~visible.unsqueeze(2), -math.inf)
    if sinks is not None:
        logit = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, logit], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ values.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)
