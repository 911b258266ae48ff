"""Compressed attention and hyper-connections: one sequence after another, everything in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.moe import _product
from vkit.kernels.reference.norm import rms_norm
from vkit.kernels.reference.rope import rope


def store_rows(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Put values (T, C) at slots (T,) of a cache (N, S, C); slot -1 is skipped."""
    kept = slots >= 0
    at = slots[kept]
    cache.index_put_((at // cache.shape[1], at % cache.shape[1]), values[kept].to(cache.dtype))


def _rows(cache: Tensor, batch: PagedBatch, b: int, start: int, stop: int) -> Tensor:
    """What the cache (N, S, C) holds of tokens start..stop - 1 of sequence b, (n, C) float32."""
    tokens = torch.arange(start, stop, device=cache.device)
    blocks, offsets = _places(cache, batch, b, tokens)
    return cache[blocks, offsets].float()


def _places(cache: Tensor, batch: PagedBatch, b: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    size = cache.shape[1]
    return batch.block_table[batch.host_rows[b], tokens // size].long(), tokens % size


def pool_windows(
    content: Tensor,
    gates: Tensor,
    batch: PagedBatch,
    ape: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    entries: Tensor,
    entry_batch: PagedBatch,
) -> None:
    """Pool every window of tokens that this step completes into its entry."""
    rate, width = ape.shape[0], norm.shape[0]
    is_overlapping = ape.shape[1] == 2 * width
    for b, seq_len in enumerate(batch.host_seq_lens):
        start = seq_len - (batch.host_cu_seqlens[b + 1] - batch.host_cu_seqlens[b])
        first, end = start // rate, seq_len // rate
        if first == end:
            continue
        before = 1 if is_overlapping and first else 0
        span = (first - before) * rate, end * rate
        c, z = (_rows(cache, batch, b, *span).unflatten(0, (-1, rate)) for cache in (content, gates))
        z = z + ape.float()
        if is_overlapping:
            c, z = _overlapped(c, z, width, drops_first=bool(before))
        pooled = rms_norm((torch.softmax(z, dim=1) * c).sum(1), norm.float(), eps, 0.0)
        positions = torch.arange(first, end, device=pooled.device) * rate
        rope(pooled[:, None, width - cos_sin.shape[1] :], None, positions, cos_sin, True)
        blocks, offsets = _places(entries, entry_batch, b, torch.arange(first * rate, end * rate, device=pooled.device))
        entries.index_put_((blocks, offsets), pooled.reshape(-1, entries.shape[2]).to(entries.dtype))


def _overlapped(c: Tensor, z: Tensor, width: int, *, drops_first: bool) -> tuple[Tensor, Tensor]:
    """Each window's own second half beside the first half of the window before; window 0 has none before."""
    earlier_c, earlier_z = c[:-1, :, :width], z[:-1, :, :width]
    if drops_first:
        c, z = c[1:], z[1:]
    else:
        earlier_c = torch.cat([torch.zeros_like(c[:1, :, :width]), earlier_c])
        earlier_z = torch.cat([torch.full_like(z[:1, :, :width], -torch.inf), earlier_z])
    return torch.cat([earlier_c, c[..., width:]], dim=1), torch.cat([earlier_z, z[..., width:]], dim=1)


def compressed_attention(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    window: int,
    scale: float,
    sinks: Tensor,
    rate: int,
    entries: Tensor | None,
    entry_batch: PagedBatch | None,
    index: tuple[Tensor, Tensor, Tensor, int] | None,
) -> Tensor:
    """Attention to the window's tokens and to the visible entries, each key its own value, beside a sink."""
    out = torch.empty_like(q)
    for b, seq_len in enumerate(batch.host_seq_lens):
        begin, end = batch.host_cu_seqlens[b], batch.host_cu_seqlens[b + 1]
        start = seq_len - (end - begin)
        first = max(0, start - window + 1)
        keys = _rows(kv, batch, b, first, seq_len)
        i = torch.arange(start, seq_len, device=q.device)[:, None]
        j = torch.arange(first, seq_len, device=q.device)
        visible = (j <= i) & (j > i - window)
        num_entries = 0 if entries is None else seq_len // rate
        if entries is not None and entry_batch is not None and num_entries:
            pooled = _rows(entries, entry_batch, b, 0, num_entries * rate).reshape(num_entries, -1)
            seen = (torch.arange(num_entries, device=q.device) + 1) * rate <= i + 1
            if index is not None:
                seen = _best(index, entry_batch, b, begin, end, rate, seen)
            keys, visible = torch.cat([keys, pooled]), torch.cat([visible, seen], dim=1)
        scores = torch.einsum("thd,kd->thk", q[begin:end].float(), keys) * scale
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        sink = sinks.float()[None, :, None].expand(end - begin, -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        out[begin:end] = torch.einsum("thk,kd->thd", weights, keys).to(q.dtype)
    return out


def _best(
    index: tuple[Tensor, Tensor, Tensor, int],
    batch: PagedBatch,
    b: int,
    begin: int,
    end: int,
    rate: int,
    seen: Tensor,
) -> Tensor:
    """Of the entries each query sees, the `top_k` that its index heads score highest."""
    queries, weights, cache, top_k = index
    num_entries = seen.shape[1]
    keys = _rows(cache, batch, b, 0, num_entries * rate).reshape(num_entries, -1)
    scores = torch.einsum("thd,kd->thk", queries[begin:end].float(), keys).relu()
    scores = (scores * weights[begin:end].float().unsqueeze(-1)).sum(1) * queries.shape[2] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(seen).scatter_(1, chosen, True) & seen


def hyper_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, hyper_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """How the streams (T, N, H) go into a sublayer (T, N), how its result comes back (T, N), and their mixing."""
    count = streams.shape[1]
    f = rms_norm(streams.float().flatten(1), None, norm_eps, 0.0) @ fn.float().T
    entering, leaving, mixing = f.split([count, count, count * count], dim=-1)
    b_in, b_out, b_mix = base.float().split([count, count, count * count])
    s = scale.float()
    pre = torch.sigmoid(entering * s[0] + b_in) + hyper_eps
    post = 2 * torch.sigmoid(leaving * s[1] + b_out)
    mix = torch.softmax((mixing * s[2] + b_mix).unflatten(-1, (count, count)), dim=-1) + hyper_eps
    mix = mix / (mix.sum(1, keepdim=True) + hyper_eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + hyper_eps)
        mix = mix / (mix.sum(1, keepdim=True) + hyper_eps)
    return pre, post, mix


def hyper_head_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hyper_eps: float, norm_eps: float
) -> Tensor:
    """How the streams (T, N, H) become one at the end (T, N)."""
    f = rms_norm(streams.float().flatten(1), None, norm_eps, 0.0) @ fn.float().T
    return torch.sigmoid(f * scale.float() + base.float()) + hyper_eps


def hyper_enter(streams: Tensor, pre: Tensor) -> Tensor:
    """Σ_j pre_j h_j: (T, N, H) -> (T, H)."""
    return torch.einsum("tnh,tn->th", streams.float(), pre).to(streams.dtype)


def hyper_leave(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """post_k y + Σ_j mix_jk h_j for every stream k, (T, N, H)."""
    mixed = torch.einsum("tjh,tjk->tkh", streams.float(), mix)
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(1)).to(streams.dtype)


def spread_streams(hidden: Tensor, count: int) -> Tensor:
    """`count` copies of every row: (T, H) -> (T, N, H)."""
    return hidden.unsqueeze(1).repeat(1, count, 1)


def route_by_root(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights (T, k) and ids (T, k) by √softplus: the experts given, else the best of score + bias."""
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    ids = chosen
    if ids is None:
        choice = scores if bias is None else scores + bias.float()
        ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, ids


def limited_silu_and_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, −limit, limit)."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def run_limited_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate: ExpertMatrix, up: ExpertMatrix, down: ExpertMatrix, limit: float
) -> Tensor:
    """Σ weights · expert(x) over each token's experts, in float32 in slot order."""
    outputs = x.new_zeros(*ids.shape, down.num_rows)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        inner = limited_silu_and_mul(_product(x[rows], gate, expert), _product(x[rows], up, expert), limit)
        outputs[rows, slots] = _product(inner, down, expert)
    return (outputs.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)
