"""Causal attention in which the tokens of a picture see each other in both directions.

A query that sees beyond itself is, to the attention op, a sequence of its own that ends with the last key it sees; a
window grows by as much as its end has moved. So one op serves every backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vkit import kernels
from vkit.kernels import PagedBatch

Spans = list[list[tuple[int, int]]]
"""Per sequence of a step, the positions (first, beyond) of each run of tokens that see each other."""


def attention_with_runs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    paged: PagedBatch,
    spans: Spans,
    scale: float,
    window: int | None,
    *,
    reaches_run: bool,
) -> Tensor:
    """`kernels.paged_attention`, but a query inside a run sees the run to its end; q (T, H, D) -> (T, H, Dv).

    `reaches_run`: it also sees the run's beginning, where that lies before its window.
    """
    out: Tensor | None = None
    for part in _parts(paged, spans, window, reaches_run=reaches_run):
        picked = kernels.embedding(part.rows, q.flatten(1)).view(-1, *q.shape[1:])
        found = kernels.paged_attention(picked, k_cache, v_cache, part.paged, scale, part.window)
        if out is None:
            out = found.new_empty(q.shape[0], found.shape[1] * found.shape[2])
        out = kernels.put_rows(out, part.rows, found.flatten(1))
    assert out is not None, "a step has tokens"
    return out.view(q.shape[0], q.shape[1], -1)


@dataclass(slots=True)
class _Part:
    """Queries that one call of the op serves."""

    rows: Tensor
    paged: PagedBatch
    window: int | None


@dataclass(slots=True)
class _Queries:
    """The same under construction: runs of queries, each as a sequence that ends with its last query's last key."""

    tokens: list[int] = field(default_factory=list)
    host_rows: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])

    def add(self, first: int, count: int, row: int, seq_len: int) -> None:
        """Tokens first .. first + count - 1 of the step, the last of which sees keys up to seq_len - 1."""
        self.tokens += range(first, first + count)
        self.host_rows.append(row)
        self.seq_lens.append(seq_len)
        self.cu_seqlens.append(len(self.tokens))


def _parts(paged: PagedBatch, spans: Spans, window: int | None, *, reaches_run: bool) -> list[_Part]:
    key = ("runs", window, reaches_run)
    found = paged.memo.get(key)
    if found is None:
        grouped = _grouped(paged, spans, window, reaches_run=reaches_run)
        paged.memo[key] = found = [_part(paged, queries, own) for own, queries in grouped.items()]
    parts: list[_Part] = found  # type: ignore[assignment]
    return parts


def _grouped(paged: PagedBatch, spans: Spans, window: int | None, *, reaches_run: bool) -> dict[int | None, _Queries]:
    """The step's queries by the window that serves them."""
    groups: dict[int | None, _Queries] = {}
    for b, seq_len in enumerate(paged.host_seq_lens):
        first, beyond = paged.host_cu_seqlens[b], paged.host_cu_seqlens[b + 1]
        row, offset = paged.host_rows[b], seq_len - (beyond - first)  # position of the first query
        position = offset
        for start, stop in [*spans[b], (seq_len, seq_len)]:
            if stop <= offset or position >= seq_len:
                continue
            if start > position:
                count = min(start, seq_len) - position
                groups.setdefault(window, _Queries()).add(first + position - offset, count, row, position + count)
                position += count
            for query in range(max(position, start), min(stop, seq_len)):
                lowest = 0 if window is None else max(0, query - window + 1)
                lowest = min(lowest, start) if reaches_run else lowest
                own = None if window is None or lowest == 0 else stop - lowest
                groups.setdefault(own, _Queries()).add(first + query - offset, 1, row, stop)
                position = query + 1
    return groups


def _part(paged: PagedBatch, queries: _Queries, window: int | None) -> _Part:
    device = paged.block_table.device
    rows = torch.tensor(queries.tokens, device=device)
    own = PagedBatch(
        paged.block_table,
        torch.tensor(queries.host_rows, dtype=torch.int32, device=device),
        paged.slot_mapping[rows],
        torch.tensor(queries.seq_lens, dtype=torch.int32, device=device),
        torch.tensor(queries.cu_seqlens, dtype=torch.int32, device=device),
        queries.host_rows,
        queries.seq_lens,
        queries.cu_seqlens,
    )
    return _Part(rows, own, window)
