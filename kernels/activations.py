"""Elementwise ops."""

from __future__ import annotations

from torch import Tensor

from vkit.kernels.dispatch import ops
from vkit.kernels.reference.activation import UNARY


def unary(x: Tensor, kind: str) -> Tensor:
    """f(x), same shape and dtype; kind is gelu (exact), gelu_tanh, relu, relu2 (squared relu), sigmoid, silu,
    softplus or tanh.

    Raises:
        ValueError: another kind.
    """
    if kind not in UNARY:
        raise ValueError(f"unary: kind {kind!r}, expected one of {', '.join(UNARY)}")
    out: Tensor = ops(x).unary(x, kind)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) · up for x = [gate | up] (..., 2I) -> (..., I) in x.dtype; float32 inside.

    Raises:
        ValueError: an odd width.
    Source: Shazeer 2020, eq. 6 (SwiGLU).
    """
    if x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: width {x.shape[-1]}, expected an even number")
    out: Tensor = ops(x).silu_and_mul(x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up for x = [gate | up] (..., 2I) -> (..., I) in x.dtype; `approximate` is "tanh" or "none".

    Raises:
        ValueError: an odd width, or another approximation.
    Source: Shazeer 2020, eq. 6 (GEGLU).
    """
    if x.shape[-1] % 2:
        raise ValueError(f"gelu_and_mul: width {x.shape[-1]}, expected an even number")
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu_and_mul: approximate {approximate!r}, expected 'tanh' or 'none'")
    out: Tensor = ops(x).gelu_and_mul(x, approximate)
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in x.dtype; y may be broadcast over leading dimensions.

    Raises:
        ValueError: y is no suffix of x's shape.
    """
    if y.shape != x.shape[x.ndim - y.ndim :]:
        raise ValueError(f"add: y {tuple(y.shape)}, expected {tuple(x.shape)} or a suffix of it")
    out: Tensor = ops(x).add(x, y)
    return out


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x · y in x.dtype; y may be broadcast over leading dimensions.

    Raises:
        ValueError: y is no suffix of x's shape.
    """
    if y.shape != x.shape[x.ndim - y.ndim :]:
        raise ValueError(f"multiply: y {tuple(y.shape)}, expected {tuple(x.shape)} or a suffix of it")
    out: Tensor = ops(x).multiply(x, y)
    return out


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Each row of x (..., C) times its own factor (...), in x.dtype; float32 inside.

    Raises:
        ValueError: factors that are not one per row.
    """
    if factors.shape != x.shape[:-1]:
        raise ValueError(f"scale_rows: factors {tuple(factors.shape)}, expected {tuple(x.shape[:-1])}")
    out: Tensor = ops(x).scale_rows(x, factors)
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor in x.dtype."""
    out: Tensor = ops(x).scale(x, factor)
    return out


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """x with every value brought into low..high, in x.dtype."""
    out: Tensor = ops(x).clamp(x, low, high)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap) in x.dtype.

    Raises:
        ValueError: a cap that is not positive.
    """
    if not cap > 0:
        raise ValueError(f"soft_cap: cap {cap}, expected a positive number")
    out: Tensor = ops(x).soft_cap(x, cap)
    return out
