"""Mamba-2: a selective state space that keeps a convolution state and one matrix per head. Source: Dao and Gu 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import LayerCacheSpec
from vkit.layers.attention import CacheOwner
from vkit.layers.delta_net import CausalConv, state_spec
from vkit.layers.linear import Linear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import Weight

if TYPE_CHECKING:
    from vkit.batch import Batch


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Heads and widths of a Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """What passes through the convolution: inputs, and the groups' b and c."""
        return self.inner + 2 * self.num_groups * self.state_size


class Mamba2(CacheOwner):
    """The selective state space; its output is gated, then normed group by group."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: MambaShape,
        *,
        eps: float,
        least_step: float,
        bias: bool,
        conv_bias: bool,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self._shape = shape
        self._least_step = least_step
        self._dtypes = dtype, state_dtype
        self._widths = [shape.inner, shape.channels, shape.num_heads]
        self.in_proj = Linear(hidden_size, sum(self._widths), bias=bias)
        self.conv1d = CausalConv(shape.channels, shape.conv_width, bias=conv_bias)
        self.norm = GroupNorm(shape.inner, shape.num_groups, eps)
        self.out_proj = Linear(shape.inner, hidden_size, bias=bias)
        self._constants: kernels.ScanConstants

    def slots(self) -> list[TensorSlot]:
        """A_log, D and dt_bias."""
        return [TensorSlot(name, (self._shape.num_heads,)) for name in ("A_log", "D", "dt_bias")]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the heads' constants, in float32."""
        rate, skip, bias = (placement.vector(tensors[name], torch.float32) for name in ("A_log", "D", "dt_bias"))
        self._constants = kernels.ScanConstants(rate, skip, bias, self._least_step)

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """The last inputs of the convolution, and a matrix per head."""
        shape = self._shape
        matrix = (shape.num_heads, shape.state_size, shape.head_dim)
        conv = (shape.channels, shape.conv_width - 1)
        return state_spec({"matrix": (matrix, self._dtypes[1]), "conv": (conv, self._dtypes[0])})

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        shape = self._shape
        z, mixed, step = torch.split(self.in_proj(x), self._widths, dim=-1)
        tensors, states = batch.states(self.layer)
        mixed = self.conv1d(mixed, tensors["conv"], states)
        per_group = shape.num_groups * shape.state_size
        inputs, b, c = torch.split(mixed, [shape.inner, per_group, per_group], dim=-1)
        out = kernels.mamba2_scan(
            inputs.unflatten(-1, (shape.num_heads, shape.head_dim)),
            step,
            b.unflatten(-1, (shape.num_groups, shape.state_size)),
            c.unflatten(-1, (shape.num_groups, shape.state_size)),
            self._constants,
            tensors["matrix"],
            states,
        )
        return self.out_proj(self.norm(kernels.multiply(out.flatten(1), kernels.unary(z, "silu"))))


class GroupNorm(Module):
    """Each group of channels divided by its root mean square, times a weight per channel."""

    def __init__(self, width: int, num_groups: int, eps: float) -> None:
        self._width = width
        self._num_groups = num_groups
        self._eps = eps
        self._weight: Tensor

    def slots(self) -> list[TensorSlot]:
        """weight."""
        return [TensorSlot("weight", (self._width,))]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight."""
        self._weight = placement.vector(tensors["weight"])

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x (T, C)."""
        normed = kernels.rms_norm(x.unflatten(-1, (self._num_groups, -1)), None, self._eps)
        return kernels.multiply(normed.flatten(1), self._weight)
