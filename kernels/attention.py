"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops
from vkit.kernels.paged import PagedBatch


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k (T, K, D) and v (T, K, Dv) in the cache at slot_mapping (T,) int64; slot -1 writes nothing.

    A cache of int8 has a float32 scale behind the codes of each row: its widths are four more.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: slots that are not int64.
    """
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"write_kv: slot_mapping of {slot_mapping.dtype}, expected torch.int64")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"write_kv: slot_mapping {tuple(slot_mapping.shape)}, expected {tuple(k.shape[:1])}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"write_kv: v {tuple(v.shape)}, expected {tuple(k.shape[:2])} and a width")
    ops(k).write_kv(k, v, k_cache, v_cache, slot_mapping)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attention inside each of several runs of tokens, every token seeing its whole run; nothing is cached.

    q, k and v (T, H, D), runs of lengths[0], lengths[1], ... tokens -> (T, H, D) in q.dtype.

    Raises:
        ValueError: shapes that differ, or lengths that are not those of T tokens.
    """
    if q.ndim != 3 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"segment_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must be equal"
        )
    if sum(lengths) != q.shape[0] or any(length < 1 for length in lengths):
        raise ValueError(f"segment_attention: lengths {list(lengths)[:8]}, expected the runs of {q.shape[0]} tokens")
    out: Tensor = ops(q).segment_attention(q, k, v, lengths, scale)
    return out


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
    """Causal attention of the step's queries to their own sequences. q (T, H, D) -> (T, H, Dv) in q.dtype.

    Prefill, decode and mixtures are one call. Query head h reads kv head h // (H / K). Scores are scaled, then capped
    (soft_cap · tanh(s / soft_cap)), then masked: the query at position i sees keys j <= i, and only j > i − window if a
    window is given. `sinks` (H,) are logits that take part in the softmax's denominator only.

    Raises:
        ValueError: shapes or settings that do not fit.
    """
    if q.ndim != 3 or q.shape[0] != batch.num_tokens:
        raise ValueError(f"paged_attention: q {tuple(q.shape)}, expected ({batch.num_tokens}, heads, width)")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window {window}, expected at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"paged_attention: soft_cap {soft_cap}, expected a positive number")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"paged_attention: sinks {tuple(sinks.shape)}, expected {tuple(q.shape[1:2])}")
    out: Tensor = ops(q).paged_attention(q, k_cache, v_cache, batch, scale, window, soft_cap, sinks)
    return out
