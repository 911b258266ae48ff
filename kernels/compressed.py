"""Attention to compressed entries beside a window, hyper-connections, and experts with a limit: DeepSeek-V4's own ops.

An entry stands for a window of m tokens. Its channels lie m-th part by m-th part in the slots of those tokens, so an
entry cache (N, S, D / m) is paged like any other. Source: DeepSeek-AI 2026 (V4).
"""

from __future__ import annotations

from torch import Tensor

from vkit.kernels.dispatch import ops
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.paged import PagedBatch


def store_rows(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Put values (T, C) at slots (T,) int64 of a cache (N, S, C); slot -1 writes nothing.

    Raises:
        ValueError: shapes that do not fit.
    """
    if values.shape != (slots.shape[0], cache.shape[2]):
        raise ValueError(f"store_rows: values {tuple(values.shape)}, expected {(slots.shape[0], cache.shape[2])}")
    ops(values).store_rows(values, cache, slots)


def pool_windows(
    content: Tensor,
    gates: Tensor,
    batch: PagedBatch,
    *,
    ape: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    entries: Tensor,
    entry_batch: PagedBatch,
) -> None:
    """Write the entry of every window of m tokens that this step completes into `entries` (N, S, D / m).

    `content` and `gates` (N, S, W) are caches that hold this step's tokens already; ape (m, W), norm (D,). With W = D
    an entry pools its own window; with W = 2 D it pools the channels D.. of its own window and ..D of the one before.
    It is normed and its last channels are rotated (interleaved) to the position of its first token.

    Raises:
        ValueError: shapes that do not fit.
    """
    width, rate = norm.shape[0], ape.shape[0]
    if ape.shape[1] not in (width, 2 * width) or content.shape[2] != ape.shape[1] or gates.shape != content.shape:
        raise ValueError(
            f"pool_windows: content {tuple(content.shape)}, ape {tuple(ape.shape)}, norm {tuple(norm.shape)}"
        )
    if entries.shape[2] * rate != width:
        raise ValueError(f"pool_windows: entries {tuple(entries.shape)}, expected {width} channels over {rate} tokens")
    ops(ape).pool_windows(content, gates, batch, ape, norm, eps, cos_sin, entries, entry_batch)


def compressed_attention(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    *,
    window: int,
    scale: float,
    sinks: Tensor,
    rate: int = 1,
    entries: Tensor | None = None,
    entry_batch: PagedBatch | None = None,
    index: tuple[Tensor, Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Attention of q (T, H, D) to the last `window` tokens and to complete entries, keys being values -> (T, H, D).

    The query at position i sees entry w when (w + 1) · rate <= i + 1. `index` (queries (T, I, d), weights (T, I), cache
    (N, S, d / rate), k) keeps of those the k with the largest Σ weights · relu(query · key) · d^−½. `sinks` (H,) are
    logits in the denominator only.

    Raises:
        ValueError: shapes that do not fit.
    """
    if q.ndim != 3 or q.shape[0] != batch.num_tokens or kv.shape[2] != q.shape[2]:
        raise ValueError(f"compressed_attention: q {tuple(q.shape)}, cache {tuple(kv.shape)}")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"compressed_attention: sinks {tuple(sinks.shape)}, expected ({q.shape[1]},)")
    out: Tensor = ops(q).compressed_attention(q, kv, batch, window, scale, sinks, rate, entries, entry_batch, index)
    return out


def hyper_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, hyper_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of N streams (T, N, H) around a sublayer: in (T, N), out (T, N), and the mixing matrix (T, N, N).

    fn (2 N + N², N · H), base (2 N + N²,), scale (3,). The matrix is made doubly stochastic by Sinkhorn steps.

    Raises:
        ValueError: shapes that do not fit.
    """
    count = streams.shape[1]
    if fn.shape != (2 * count + count * count, count * streams.shape[2]):
        raise ValueError(f"hyper_weights: fn {tuple(fn.shape)} for streams {tuple(streams.shape)}")
    out: tuple[Tensor, Tensor, Tensor] = ops(streams).hyper_weights(
        streams, fn, base, scale, iterations, hyper_eps, norm_eps
    )
    return out


def hyper_head_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hyper_eps: float, norm_eps: float
) -> Tensor:
    """Weights (T, N) with which the streams (T, N, H) become one at the end; fn (N, N · H), base (N,), scale (1,)."""
    out: Tensor = ops(streams).hyper_head_weights(streams, fn, base, scale, hyper_eps, norm_eps)
    return out


def hyper_enter(streams: Tensor, pre: Tensor) -> Tensor:
    """Σ_j pre_j h_j of streams (T, N, H), pre (T, N) -> (T, H)."""
    out: Tensor = ops(streams).hyper_enter(streams, pre)
    return out


def hyper_leave(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """post_k y + Σ_j mix_jk h_j: the streams (T, N, H) after a sublayer whose result is y (T, H)."""
    out: Tensor = ops(streams).hyper_leave(streams, y, post, mix)
    return out


def spread_streams(hidden: Tensor, count: int) -> Tensor:
    """`count` copies of every row: (T, H) -> (T, N, H)."""
    out: Tensor = ops(hidden).spread_streams(hidden, count)
    return out


def route_by_root(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Each token's experts by s = √softplus(logits): `chosen` (T, k), else the best k of s + bias.

    Weights are s of the chosen, divided by their sum, times `scale`. logits (T, E) -> weights (T, k) float32, ids.
    """
    out: tuple[Tensor, Tensor] = ops(logits).route_by_root(logits, bias, chosen, top_k, scale)
    return out


def limited_silu_and_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, −limit, limit), all of one shape."""
    out: Tensor = ops(gate).limited_silu_and_mul(gate, up, limit)
    return out


def run_limited_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate: ExpertMatrix, up: ExpertMatrix, down: ExpertMatrix, limit: float
) -> Tensor:
    """`run_experts` with `limited_silu_and_mul` between the products."""
    out: Tensor = ops(x).run_limited_experts(x, weights, ids, gate, up, down, limit)
    return out
