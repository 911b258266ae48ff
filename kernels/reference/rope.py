"""Rotary position embedding on queries and keys, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.reference.norm import rms_norm


def rope(q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate the first R entries of every head of q (T, H, D) and k (T, K, D), in place.

    Row p of cos_sin (P, R) holds R/2 cosines, then R/2 sines, for position p.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    _rotate(q, cos, sin, interleaved)
    if k is not None:
        _rotate(k, cos, sin, interleaved)


def axis_table(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """(T, R): each pair's cosine and sine at the position of its axis."""
    own = positions[axes].T  # (T, R/2)
    return torch.cat([half.gather(0, own) for half in cos_sin.chunk(2, dim=-1)], dim=-1)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    offset: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> None:
    """RMS-norm every head of q and k, then rotate, in place."""
    q.copy_(rms_norm(q, q_weight, eps, offset))
    k.copy_(rms_norm(k, k_weight, eps, offset))
    rope(q, k, positions, cos_sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    a, b = first.float(), second.float()
    rotated_first = torch.addcmul(a * cos, b, sin, value=-1.0)
    rotated_second = torch.addcmul(b * cos, a, sin)
    first.copy_(rotated_first)
    second.copy_(rotated_second)
