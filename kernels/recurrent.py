"""Layers that keep one state per sequence: causal convolution, gated delta rule, Mamba-2.

Every op reads each sequence's state, runs over its tokens of this step and leaves the new state in place. How a prompt
is cut into steps changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vkit.kernels.dispatch import ops


@dataclass(slots=True)
class StateBatch:
    """One step's sequences in a group that keeps states."""

    blocks: Tensor
    """(B,) int64: the row of the state tensors that belongs to each sequence."""
    is_fresh: Tensor
    """(B,) bool: the sequence begins here; what its row holds is another's past (perhaps NaN) and counts as zeros."""
    cu_seqlens: Tensor
    """(B + 1,) int32: sequence b owns tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1."""
    host_cu_seqlens: list[int]
    """The same on the host."""
    targets: Tensor | None = None
    """(T,) int64: the row that the state after each token is written to, -1 where it is not kept; the last token of
    every sequence has one. None: the state after the last token replaces the one it began from."""
    verified: Sequence[int] = ()
    """Sequences all of whose tokens have targets: they advance token by token, as they would in steps of their own."""


@dataclass(frozen=True, slots=True)
class ScanConstants:
    """What a Mamba-2 layer's heads keep apart from their state, (H,) float32 each."""

    rate: Tensor
    """Logarithm of the speed of decay."""
    skip: Tensor
    """Share of the input that passes by."""
    step_bias: Tensor
    least_step: float


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch) -> Tensor:
    """silu(Σ_j weight[:, j] · x[t − K + 1 + j] + bias), per channel. x (T, C), weight (C, K) -> (T, C) in x.dtype.

    `state` (N, C, K − 1) holds the inputs before each sequence's first token, oldest first.

    Raises:
        ValueError: shapes that do not fit.
    """
    channels, width = weight.shape
    if x.ndim != 2 or x.shape[1] != channels:
        raise ValueError(f"causal_conv1d: x {tuple(x.shape)}, expected (T, {channels})")
    if state.shape[1:] != (channels, width - 1):
        raise ValueError(f"causal_conv1d: state {tuple(state.shape)}, expected (N, {channels}, {width - 1})")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"causal_conv1d: bias {tuple(bias.shape)}, expected ({channels},)")
    out: Tensor = ops(x).causal_conv1d(x, weight, bias, state, batch)
    return out


def log_decay(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """−exp(rate) · softplus(x + bias) in float32. x (T, H) or (T, H, D), rate (H,), bias (H,) or (H, D).

    Raises:
        ValueError: shapes that do not fit.
    Source: Yang et al. 2024, Gated Delta Networks, section 3; Gu and Dao 2023, section 3.5.
    """
    if rate.shape != x.shape[1:2] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"log_decay: rate {tuple(rate.shape)} and bias {tuple(bias.shape)}, "
            f"expected {tuple(x.shape[1:2])} and {tuple(x.shape[1:])}"
        )
    out: Tensor = ops(x).log_decay(x, rate, bias)
    return out


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
    """The gated delta rule. q and k (T, Hk, D), v (T, H, Dv) -> (T, H, Dv) in v.dtype.

    Per head: S ← exp(decay) S; S ← S + σ(write) k (v − Sᵀk)ᵀ; o = Sᵀq, with q and k divided by their length and q by
    the root of D, all in float32. `decay` (T, H), or (T, H, D) with one per channel of k; `write` (T, H). Head h reads
    key head h // (H / Hk), or h mod Hk if the heads are tiled. `state` (N, H, D, Dv).

    Raises:
        ValueError: shapes that do not fit.
    Source: Yang et al. 2024, Gated Delta Networks, eq. 10; Kimi Team 2025, Kimi Linear, eq. 1.
    """
    num_heads, width = v.shape[1], q.shape[2]
    if k.shape != q.shape or num_heads % q.shape[1]:
        raise ValueError(
            f"gated_delta_net: q {tuple(q.shape)}, k {tuple(k.shape)}, expected heads that share {num_heads}"
        )
    if state.shape[1:] != (num_heads, width, v.shape[2]):
        raise ValueError(
            f"gated_delta_net: state {tuple(state.shape)}, expected (N, {num_heads}, {width}, {v.shape[2]})"
        )
    if decay.shape not in (v.shape[:2], (*v.shape[:2], width)) or write.shape != v.shape[:2]:
        raise ValueError(
            f"gated_delta_net: decay {tuple(decay.shape)} and write {tuple(write.shape)} for {tuple(v.shape)}"
        )
    out: Tensor = ops(v).gated_delta_net(q, k, v, decay, write, state, batch, is_tiled)
    return out


def mamba2_scan(
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    constants: ScanConstants,
    state: Tensor,
    batch: StateBatch,
) -> Tensor:
    """The selective state space of Mamba-2. x (T, H, P), step (T, H), b and c (T, G, N) -> (T, H, P) in x.dtype.

    Per head, in float32: d = max(softplus(step + bias), least step); S ← exp(−exp(rate) · d) S + d · b xᵀ;
    y = Sᵀc + skip · x. Head h reads group h // (H / G). `state` (N, H, N, P).

    Raises:
        ValueError: shapes that do not fit.
    Source: Dao and Gu 2024, section 2.
    """
    num_heads, width = x.shape[1], b.shape[2]
    if b.shape != c.shape or num_heads % b.shape[1]:
        raise ValueError(f"mamba2_scan: b {tuple(b.shape)}, c {tuple(c.shape)}, expected groups that share {num_heads}")
    if state.shape[1:] != (num_heads, width, x.shape[2]):
        raise ValueError(f"mamba2_scan: state {tuple(state.shape)}, expected (N, {num_heads}, {width}, {x.shape[2]})")
    if step.shape != x.shape[:2]:
        raise ValueError(f"mamba2_scan: step {tuple(step.shape)}, expected {tuple(x.shape[:2])}")
    out: Tensor = ops(x).mamba2_scan(x, step, b, c, constants, state, batch)
    return out
