"""Norms over the last dimension; statistics in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · (offset + weight), in x.dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if offset:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to x.dtype before it is normed."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps, offset), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) · rsqrt(var + eps) · weight + bias, in x.dtype."""
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype)
