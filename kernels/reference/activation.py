"""Elementwise ops; non-linear ones compute in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "tanh": torch.tanh,
}


def unary(x: Tensor, kind: str) -> Tensor:
    """f(x) for the named f, in x.dtype."""
    return UNARY[kind](x.float()).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(left half) · right half."""
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(left half) · right half."""
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in x.dtype."""
    return (x + y).to(x.dtype)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x · y in x.dtype."""
    return (x * y).to(x.dtype)


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x · factors[..., None] in x.dtype."""
    return (x.float() * factors.float().unsqueeze(-1)).to(x.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor in x.dtype."""
    return x * factor


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """x between low and high."""
    return x.clamp(low, high)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap), in x.dtype."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)
