"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops


def rope(q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """Rotate the first R entries of every head of q (T, H, D) and k (T, K, D), in place; the rest stays.

    Row p of cos_sin (P, R) float32 holds R/2 cosines, then R/2 sines, for position p. Entry i pairs with i + R/2, or
    with its neighbour (2i, 2i + 1) when interleaved. q and k may be views of a wider tensor.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: positions that are not integers, or a table that is not float32.
    Source: Su et al. 2021, eq. 34.
    """
    _check("rope", q, k, positions, cos_sin)
    ops(q).rope(q, k, positions, cos_sin, interleaved)


def axis_table(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """A row of cosines and sines for every token whose pairs turn by positions of several axes.

    cos_sin (P, R) as for `rope`, positions (A, T), axes (R/2,) int64: pair i of token t takes the entries of row
    positions[axes[i], t] -> (T, R) float32, a table in which token t's own position is t.

    Raises:
        ValueError: shapes that do not fit.
    """
    if positions.ndim != 2 or axes.shape != (cos_sin.shape[-1] // 2,):
        raise ValueError(
            f"axis_table: positions {tuple(positions.shape)}, axes {tuple(axes.shape)}, expected (axes, T) and"
            f" ({cos_sin.shape[-1] // 2},)"
        )
    out: Tensor = ops(cos_sin).axis_table(cos_sin, positions, axes)
    return out


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
    """`rms_norm` over every head of q (T, H, D) and k (T, K, D) with weights (D,), then `rope`; in place.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: positions that are not integers, or a table that is not float32.
    """
    _check("qk_norm_rope", q, k, positions, cos_sin)
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"qk_norm_rope: {name} {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}")
    ops(q).qk_norm_rope(q, k, q_weight, k_weight, eps, offset, positions, cos_sin, interleaved)


def _check(op: str, q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor) -> None:
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"{op}: cos_sin of {cos_sin.dtype}, expected torch.float32")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: positions of {positions.dtype}, expected int32 or int64")
    if positions.shape != q.shape[:1]:
        raise ValueError(f"{op}: positions {tuple(positions.shape)}, expected {tuple(q.shape[:1])}")
    width = cos_sin.shape[-1]
    if cos_sin.ndim != 2 or width % 2 or width > q.shape[-1]:
        raise ValueError(f"{op}: cos_sin {tuple(cos_sin.shape)}, expected (positions, even width <= {q.shape[-1]})")
    if k is not None and (k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]):
        raise ValueError(f"{op}: k {tuple(k.shape)}, expected ({q.shape[0]}, kv heads, {q.shape[-1]})")
