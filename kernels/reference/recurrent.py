"""Recurrent layers: sequences with one token advance together, longer runs go chunk by chunk in matrix form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vkit.kernels.recurrent import ScanConstants, StateBatch

_CHUNK = 64
_CHANNEL_CHUNK = 16
"""Tokens per chunk where every channel decays on its own: its scores need a value per pair of tokens and channel."""
_TINY = 1e-6


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch) -> Tensor:
    """silu of the depthwise convolution over each sequence's past and present."""
    out = torch.empty_like(x)
    past = _states(state, batch, torch.float32)
    kernel, offset = weight.float(), None if bias is None else bias.float()
    for sequences, tokens, rows in _runs(batch, x.device):
        inputs = x[tokens].float().transpose(-1, -2)  # (b, C, n)
        window = torch.cat([past[sequences], inputs], dim=-1)
        mixed = functional.conv1d(window, kernel.unsqueeze(1), offset, groups=len(kernel))
        out[tokens] = functional.silu(mixed).transpose(-1, -2).to(x.dtype)
        state[rows] = kept = window[..., inputs.shape[-1] :].to(state.dtype)
        if batch.verified:
            past[sequences] = kept.float()
    return out


def log_decay(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """−exp(rate) · softplus(x + bias) in float32."""
    speed = rate.float().exp().view(-1, *[1] * (x.ndim - 2))
    return -speed * functional.softplus(x.float() + bias.float())


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor,
    state: Tensor,
    batch: StateBatch,
    is_tiled: bool = False,
) -> Tensor:
    """The gated delta rule over each sequence."""
    group = v.shape[1] // q.shape[1]
    q, k = _unit(q).mul_(q.shape[-1] ** -0.5), _unit(k)
    q, k = (x.repeat(1, group, 1) if is_tiled else x.repeat_interleave(group, dim=1) for x in (q, k))
    decay = decay.view(*decay.shape[:2], -1)
    beta = torch.sigmoid(write.float()).unsqueeze(-1)
    out = torch.empty_like(v)
    current = _states(state, batch, torch.float32)
    size = _CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK
    for sequences, tokens, rows in _runs(batch, v.device):
        matrix = current[sequences]
        pieces = []
        for part in tokens.split(size, dim=1):
            inputs = _DeltaInputs(*(_by_head(value[part]) for value in (q, k, v.float(), decay, beta)))
            piece, matrix = _delta_step(inputs, matrix) if part.shape[1] == 1 else _delta_chunk(inputs, matrix)
            pieces.append(piece)
        out[tokens] = torch.cat(pieces, dim=2).transpose(1, 2).to(v.dtype)
        state[rows] = kept = matrix.to(state.dtype)
        if batch.verified:
            current[sequences] = kept.float()
    return out


def mamba2_scan(
    x: Tensor, step: Tensor, b: Tensor, c: Tensor, constants: ScanConstants, state: Tensor, batch: StateBatch
) -> Tensor:
    """The selective state space over each sequence."""
    step = functional.softplus(step.float() + constants.step_bias).clamp_min(constants.least_step)
    group = x.shape[1] // b.shape[1]
    b, c = (value.float().repeat_interleave(group, dim=1) for value in (b, c))
    decay = (-constants.rate.exp() * step).unsqueeze(-1)
    inputs = x.float() * step.unsqueeze(-1)
    out = torch.empty_like(x)
    current = _states(state, batch, torch.float32)
    for sequences, tokens, rows in _runs(batch, x.device):
        matrix = current[sequences]
        pieces = []
        for part in tokens.split(_CHUNK, dim=1):
            keys, queries, values, total = (_by_head(value[part]) for value in (b, c, inputs, decay))
            total = total.cumsum(2)
            pieces.append(queries * total.exp() @ matrix + _scores(queries, keys, total, 0) @ values)
            matrix = _advanced(matrix, keys, values, total)
        scanned = torch.cat(pieces, dim=2).transpose(1, 2)
        out[tokens] = (scanned + constants.skip.unsqueeze(-1) * x[tokens].float()).to(x.dtype)
        state[rows] = kept = matrix.to(state.dtype)
        if batch.verified:
            current[sequences] = kept.float()
    return out


def _states(state: Tensor, batch: StateBatch, dtype: torch.dtype) -> Tensor:
    """Each sequence's state, zeros for those that begin."""
    is_fresh = batch.is_fresh.view(-1, *[1] * (state.ndim - 1))
    return state[batch.blocks].to(dtype).masked_fill(is_fresh, 0.0)


def _runs(batch: StateBatch, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(sequences (b,), their tokens (b, n), rows for the states after those (b,)), in an order that keeps time.

    Sequences with one token go together, and so do the tokens of equal place of those under verification; each of the
    others alone.
    """
    bounds = list(pairwise(batch.host_cu_seqlens))
    verified = set(batch.verified)
    ones = [b for b, (start, stop) in enumerate(bounds) if stop - start == 1]
    if ones:
        yield _run(batch, ones, [bounds[b][0] for b in ones], device)
    for b, (start, stop) in enumerate(bounds):
        if stop - start > 1 and b not in verified:
            tokens = torch.arange(start, stop, device=device).unsqueeze(0)
            sequences = torch.tensor([b], device=device)
            yield sequences, tokens, batch.blocks[sequences]
    longer = [b for b in batch.verified if bounds[b][1] - bounds[b][0] > 1]
    for place in range(max((bounds[b][1] - bounds[b][0] for b in longer), default=0)):
        left = [b for b in longer if bounds[b][0] + place < bounds[b][1]]
        yield _run(batch, left, [bounds[b][0] + place for b in left], device)


def _run(
    batch: StateBatch, sequences: list[int], tokens: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of each of the sequences."""
    own, places = torch.tensor(sequences, device=device), torch.tensor(tokens, device=device)
    return own, places.unsqueeze(1), batch.blocks[own] if batch.targets is None else batch.targets[places]


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)  # (b, n, H, D) -> (b, H, n, D)


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _TINY)


class _DeltaInputs(NamedTuple):
    """(b, H, L, width) each: of one chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def _delta_step(x: _DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: outputs (b, H, 1, Dv) and the state after it (b, H, D, Dv)."""
    state = state * x.decay.exp().transpose(-1, -2)
    state = state + x.k.transpose(-1, -2) * (x.beta * (x.v - x.k @ state))
    return x.q @ state, state


def _delta_chunk(x: _DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens at once: what each writes, given that it sees what those before it wrote, is a triangular system."""
    total = x.decay.cumsum(2)
    system = x.beta * _scores(x.k, x.k, total, -1) + torch.eye(x.k.shape[2], device=x.k.device)
    sides = torch.cat([x.beta * x.v, x.beta * total.exp() * x.k], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written = solved[..., : x.v.shape[-1]] - solved[..., x.v.shape[-1] :] @ state
    out = x.q * total.exp() @ state + _scores(x.q, x.k, total, 0) @ written
    return out, _advanced(state, x.k, written, total)


def _scores(a: Tensor, b: Tensor, total: Tensor, diagonal: int) -> Tensor:
    """Σ_c a_ic b_jc exp(total_ic − total_jc) for j <= i + diagonal, else 0. a, b (b, H, L, D) -> (b, H, L, L).

    The difference comes before the exponential: exp(−total) alone overflows.
    """
    length = a.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(diagonal)
    if total.shape[-1] == 1:
        gap = (total - total.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        return a @ b.transpose(-1, -2) * gap.exp()
    gaps = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~visible.unsqueeze(-1), -torch.inf)
    return (a.unsqueeze(3) * b.unsqueeze(2) * gaps.exp()).sum(-1)


def _advanced(state: Tensor, keys: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """The state after a chunk: what is left of the old one, and of each token's writing."""
    last = total[:, :, -1:]
    return state * last.exp().transpose(-1, -2) + (keys * (last - total).exp()).transpose(-1, -2) @ values
