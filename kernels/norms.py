"""Norms over the last dimension."""

from __future__ import annotations

from torch import Tensor

from vkit.kernels.dispatch import ops


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Scale each row by its inverse root mean square. x (..., C), weight (C,) or None -> (..., C) in x.dtype.

    Statistics in float32. With offset 0 the normed row is rounded to x.dtype and then multiplied by the weight; with
    another offset it is multiplied by (offset + weight) in float32 and rounded once (Gemma's zero-centred weights: 1).

    Raises:
        ValueError: weight of another width.
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}")
    out: Tensor = ops(x).rms_norm(x, weight, eps, offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The pair (rms_norm(x + residual), x + residual), both (..., C) in x.dtype; arguments are left alone.

    Raises:
        ValueError: x and residual differ in shape, or weight in width.
    """
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual {tuple(residual.shape)}, expected {tuple(x.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"add_rms_norm: weight {tuple(weight.shape)}, expected {tuple(x.shape[-1:])}")
    out: tuple[Tensor, Tensor] = ops(x).add_rms_norm(x, residual, weight, eps, offset)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last dimension, in x.dtype; float32 inside.

    Weight and bias may also have the shape (H, C) for x (T, H, C): one row per head.

    Raises:
        ValueError: weight or bias is no suffix of x's shape.
    Source: Ba, Kiros and Hinton 2016, eq. 3.
    """
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and (value.ndim < 1 or value.shape != x.shape[-value.ndim :]):
            raise ValueError(f"layer_norm: {name} {tuple(value.shape)}, expected a suffix of {tuple(x.shape)}")
    out: Tensor = ops(x).layer_norm(x, weight, bias, eps)
    return out
