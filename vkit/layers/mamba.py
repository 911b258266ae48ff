"""Mamba-2: a selective state space that keeps a convolution state and one matrix per head. Source: Dao and Gu 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import LayerCacheSpec
from vkit.distributed import ALONE, Ranks
from vkit.layers.attention import CacheOwner
from vkit.layers.delta_net import CausalConv, state_spec
from vkit.layers.linear import Linear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import Weight
from vkit.quantization.cutting import Span, num_in, widened

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
        self._num_heads = shape.num_heads
        self._heads = slice(None)

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads and their groups; with more ranks than groups, the same group as others."""
        shape = self._shape
        head = ranks.split("heads of a recurrent layer", shape.num_heads)
        group = ranks.split_or_repeat("groups of a recurrent layer", shape.num_groups)
        per_group = shape.num_groups * shape.state_size
        inner = widened([head], shape.head_dim)

        def channels(start: int) -> list[Span]:
            groups = (widened([group], shape.state_size, start + shape.inner + part * per_group) for part in (0, 1))
            return [*widened([head], shape.head_dim, start), *(span for spans in groups for span in spans)]

        steps = shape.inner + shape.channels
        self.in_proj.shard_outputs(inner, channels(shape.inner), widened([head], 1, steps))
        self.conv1d.shard_channels(channels(0))
        self.norm.shard(ranks)

        def columns(rank: int) -> list[Span]:
            return widened([ranks.split("heads of a recurrent layer", shape.num_heads, rank)], shape.head_dim)

        self.out_proj.shard_inputs(ranks, ranks.each(columns))
        self._heads = slice(*head)
        self._shape = replace(shape, num_heads=head[1] - head[0], num_groups=group[1] - group[0])
        self._widths = [num_in(inner), num_in(channels(0)), self._shape.num_heads]

    def slots(self) -> list[TensorSlot]:
        """A_log, D and dt_bias."""
        return [TensorSlot(name, (self._num_heads,)) for name in ("A_log", "D", "dt_bias")]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the heads' constants, in float32."""
        names, heads = ("A_log", "D", "dt_bias"), self._heads
        rate, skip, bias = (placement.vector(tensors[name], torch.float32)[heads] for name in names)
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
        self._ranks = ALONE
        self._own = slice(None)

    def shard(self, ranks: Ranks) -> None:
        """The channels of some of the groups, or some of a group's."""
        self._ranks = ranks
        self._own = slice(*ranks.split("channels of a recurrent layer", self._width))

    def slots(self) -> list[TensorSlot]:
        """weight."""
        return [TensorSlot("weight", (self._width,))]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight."""
        self._weight = placement.vector(tensors["weight"])[self._own]

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x (T, C)."""
        ranks, num_groups = self._ranks, self._num_groups
        if num_groups % ranks.size:  # a group's channels are spread over ranks
            normed = self._normed(ranks.gather(x), num_groups)[:, self._own]
        else:
            normed = self._normed(x, num_groups // ranks.size)
        return kernels.multiply(normed, self._weight)

    def _normed(self, x: Tensor, num_groups: int) -> Tensor:
        return kernels.rms_norm(x.unflatten(-1, (num_groups, -1)), None, self._eps).flatten(1)
