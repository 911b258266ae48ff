"""Norm layers. `add` also adds the residual first, in the same operation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vkit import kernels
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import Weight


class RMSNorm(Module):
    """x · rsqrt(mean(x²) + eps) · weight. Zero-centred checkpoints store weight − 1 (`is_zero_centred`)."""

    def __init__(self, width: int, eps: float, *, is_zero_centred: bool = False, has_weight: bool = True) -> None:
        self.width = width
        self.eps = eps
        self.offset = 1.0 if is_zero_centred else 0.0
        self.weight: Tensor | None = None
        self._has_weight = has_weight

    def slots(self) -> list[TensorSlot]:
        """weight, if there is one."""
        return [TensorSlot("weight", (self.width,))] if self._has_weight else []

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight; a zero-centred one stays float32, since it is used before rounding."""
        if self._has_weight:
            self.weight = placement.vector(tensors["weight"], torch.float32 if self.offset else None)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x (..., C)."""
        return kernels.rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps, self.offset), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm(Module):
    """(x − mean) / sqrt(var + eps) · weight + bias. `heads`: a row of weights per head, for x (T, heads, C)."""

    def __init__(self, width: int, eps: float, *, bias: bool = True, heads: int | None = None) -> None:
        self.shape: tuple[int, ...] = (width,) if heads is None else (heads, width)
        self._eps = eps
        self._has_bias = bias
        self._weight: Tensor
        self._bias: Tensor | None = None
        self._heads: slice | None = None

    def shard_heads(self, first: int, stop: int) -> None:
        """Keep the rows of some heads, where each has its own."""
        if len(self.shape) == 2:
            self._heads = slice(first, stop)

    def slots(self) -> list[TensorSlot]:
        """weight, and bias if there is one."""
        bias = [TensorSlot("bias", self.shape)] if self._has_bias else []
        return [TensorSlot("weight", self.shape), *bias]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take weight and bias."""
        self._weight = placement.vector(tensors["weight"])
        if self._has_bias:
            self._bias = placement.vector(tensors["bias"])
        if self._heads is not None:
            self._weight = self._weight[self._heads]
            self._bias = None if self._bias is None else self._bias[self._heads]

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x (..., C)."""
        return kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        total = x if residual is None else kernels.add(x, residual)
        return self(total), total


Norm = RMSNorm | LayerNorm
