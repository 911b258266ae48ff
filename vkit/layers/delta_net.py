"""Gated delta nets: linear attention that keeps a convolution state and one matrix per head.

Source: Yang et al. 2024, Gated Delta Networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.distributed import Ranks
from vkit.layers.attention import CacheOwner
from vkit.layers.linear import Linear, MergedLinear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.norm import RMSNorm
from vkit.quantization import Weight
from vkit.quantization.cutting import Span, index_of, num_in, take_rows, widened

if TYPE_CHECKING:
    from vkit.batch import Batch


def state_spec(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LayerCacheSpec:
    """One state of these shapes and types per sequence; the widest type comes first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1][1].itemsize)
    return LayerCacheSpec(
        CacheKind.STATE,
        tuple(
            TensorSpec(name, shape, str(dtype).removeprefix("torch."), dtype.itemsize)
            for name, (shape, dtype) in ordered
        ),
    )


class CausalConv(Module):
    """silu of a depthwise convolution over a sequence's last K inputs."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        self.channels, self.width = channels, width
        self._has_bias = bias
        self._weight: Tensor
        self._bias: Tensor | None = None
        self._kept: Tensor | None = None

    def shard_channels(self, spans: Sequence[Span]) -> None:
        """Keep the channels of the spans, in their order."""
        self._kept = index_of(spans)

    @property
    def num_own_channels(self) -> int:
        """Channels that this rank has."""
        return self.channels if self._kept is None else len(self._kept)

    def slots(self) -> list[TensorSlot]:
        """weight, and bias if there is one."""
        bias = [TensorSlot("bias", (self.channels,))] if self._has_bias else []
        return [TensorSlot("weight", (self.channels, 1, self.width)), *bias]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take weight and bias."""
        self._weight = placement.vector(tensors["weight"])[:, 0]
        if self._has_bias:
            self._bias = placement.vector(tensors["bias"])
        if self._kept is not None:
            self._weight = self._weight[self._kept]
            self._bias = None if self._bias is None else self._bias[self._kept]

    def __call__(self, x: Tensor, state: Tensor, batch: kernels.StateBatch) -> Tensor:
        """x (T, C), state (N, C, K − 1) -> (T, C)."""
        return kernels.causal_conv1d(x, self._weight, self._bias, state, batch)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and widths of a gated delta net."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_tiled: bool = False
    """Value head h belongs to key head h mod the number of key heads, not to h // (value heads per key head)."""

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_dim

    def share(self, ranks: Ranks) -> DeltaShape:
        """The same of one rank."""
        keys, values = self.num_key_heads // ranks.size, self.num_value_heads // ranks.size
        return replace(self, num_key_heads=keys, num_value_heads=values)

    def key_heads_of(self, ranks: Ranks, rank: int) -> list[Span]:
        """A rank's key heads.

        Raises:
            CannotShare: the ranks do not divide them.
        """
        return [ranks.split("key heads of a recurrent layer", self.num_key_heads, rank)]

    def value_heads_of(self, ranks: Ranks, rank: int) -> list[Span]:
        """The value heads that belong to a rank's key heads, in an order that keeps which belongs to which."""
        ((first, stop),) = self.key_heads_of(ranks, rank)
        per_key, num_keys = self.num_value_heads // self.num_key_heads, self.num_key_heads
        if self.is_tiled:
            return [(tile * num_keys + first, tile * num_keys + stop) for tile in range(per_key)]
        return [(first * per_key, stop * per_key)]


class GatedDeltaNet(CacheOwner):
    """Delta rule with one decay per head; its output is normed per head, then gated."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: DeltaShape,
        *,
        eps: float,
        gate: Literal["silu", "sigmoid"],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self._shape = shape
        self._gate = gate
        self._num_heads = shape.num_value_heads
        self._dtypes = dtype, state_dtype
        channels = 2 * shape.keys + shape.values
        heads = shape.num_value_heads
        self._widths = [channels, shape.values, heads, heads]
        self.in_proj = MergedLinear(
            hidden_size,
            {"in_proj_qkv": channels, "in_proj_z": shape.values, "in_proj_b": heads, "in_proj_a": heads},
        )
        self.conv1d = CausalConv(channels, shape.conv_width)
        self.norm = RMSNorm(shape.value_dim, eps)
        self.out_proj = Linear(shape.values, hidden_size)
        self._heads: Tensor | None = None
        self._rate: Tensor
        self._bias: Tensor

    def shard(self, ranks: Ranks) -> None:
        """Some of the key heads, and the value heads that are theirs."""
        shape = self._shape
        key_heads, value_heads = (heads(ranks, ranks.rank) for heads in (shape.key_heads_of, shape.value_heads_of))
        channels = [
            *widened(key_heads, shape.key_dim),
            *widened(key_heads, shape.key_dim, shape.keys),
            *widened(value_heads, shape.value_dim, 2 * shape.keys),
        ]
        self.in_proj.shard_outputs(channels, widened(value_heads, shape.value_dim), value_heads, value_heads)
        self.conv1d.shard_channels(channels)
        columns = ranks.each(lambda rank: widened(shape.value_heads_of(ranks, rank), shape.value_dim))
        self.out_proj.shard_inputs(ranks, columns)
        self._heads = index_of(value_heads)
        self._shape = own = shape.share(ranks)
        self._widths = [num_in(channels), own.values, own.num_value_heads, own.num_value_heads]

    def slots(self) -> list[TensorSlot]:
        """A_log and dt_bias."""
        heads = (self._num_heads,)
        return [TensorSlot("A_log", heads), TensorSlot("dt_bias", heads)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the decay's constants, in float32."""
        if self._heads is not None:
            tensors = {name: take_rows(tensor, self._heads) for name, tensor in tensors.items()}
        self._rate = placement.vector(tensors["A_log"], torch.float32)
        self._bias = placement.vector(tensors["dt_bias"], torch.float32)

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """The last inputs of the convolution, and a matrix per head."""
        shape = self._shape
        matrix = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        conv = (self.conv1d.num_own_channels, shape.conv_width - 1)
        return state_spec({"matrix": (matrix, self._dtypes[1]), "conv": (conv, self._dtypes[0])})

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        shape = self._shape
        mixed, z, write, decay = torch.split(self.in_proj(x), self._widths, dim=-1)
        tensors, states = batch.states(self.layer)
        mixed = self.conv1d(mixed, tensors["conv"], states)
        q, k, v = torch.split(mixed, [shape.keys, shape.keys, shape.values], dim=-1)
        out = kernels.gated_delta_net(
            q.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            k.unflatten(-1, (shape.num_key_heads, shape.key_dim)),
            v.unflatten(-1, (shape.num_value_heads, shape.value_dim)),
            kernels.log_decay(decay, self._rate, self._bias),
            write,
            tensors["matrix"],
            states,
            shape.is_tiled,
        )
        gated = kernels.multiply(self.norm(out).flatten(1), kernels.unary(z, self._gate))
        return self.out_proj(gated)


class KimiDeltaAttention(CacheOwner):
    """Delta rule with a decay for every channel of the keys; decays and gate come through narrow projections.

    Source: Kimi Team 2025, Kimi Linear.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: DeltaShape,
        *,
        eps: float,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self._shape = shape
        self._dtypes = dtype, state_dtype
        self._widths = [shape.keys, shape.keys, shape.values]
        self.qkv_proj = MergedLinear(hidden_size, dict(zip(("q_proj", "k_proj", "v_proj"), self._widths, strict=True)))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (CausalConv(width, shape.conv_width) for width in self._widths)
        self.f_a_proj, self.f_b_proj = Linear(hidden_size, shape.key_dim), Linear(shape.key_dim, shape.keys)
        self.b_proj = Linear(hidden_size, shape.num_key_heads)
        self.g_a_proj, self.g_b_proj = Linear(hidden_size, shape.value_dim), Linear(shape.value_dim, shape.values)
        self.o_norm = RMSNorm(shape.value_dim, eps)
        self.o_proj = Linear(shape.values, hidden_size)
        self._stored_shape = shape
        self._heads = slice(None)
        self._rate: Tensor
        self._bias: Tensor

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads."""
        shape = self._shape
        heads = shape.key_heads_of(ranks, ranks.rank)
        keys, values = widened(heads, shape.key_dim), widened(heads, shape.value_dim)
        self.qkv_proj.shard_outputs(keys, keys, values)
        for conv, spans in zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), (keys, keys, values), strict=True):
            conv.shard_channels(spans)
        self.f_b_proj.shard_outputs(keys)
        self.b_proj.shard_outputs(heads)
        self.g_b_proj.shard_outputs(values)
        columns = ranks.each(lambda rank: widened(shape.key_heads_of(ranks, rank), shape.value_dim))
        self.o_proj.shard_inputs(ranks, columns)
        self._heads = slice(*heads[0])
        self._shape = own = shape.share(ranks)
        self._widths = [own.keys, own.keys, own.values]

    def slots(self) -> list[TensorSlot]:
        """A_log and dt_bias."""
        shape = self._stored_shape
        return [TensorSlot("A_log", (1, 1, shape.num_key_heads, 1)), TensorSlot("dt_bias", (shape.keys,))]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the decay's constants, in float32."""
        heads, num_heads = self._heads, self._stored_shape.num_key_heads
        self._rate = placement.vector(tensors["A_log"], torch.float32).flatten()[heads]
        self._bias = placement.vector(tensors["dt_bias"], torch.float32).view(num_heads, -1)[heads]

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """The last inputs of the convolutions, and a matrix per head."""
        shape = self._shape
        matrix = (shape.num_key_heads, shape.key_dim, shape.value_dim)
        conv = (sum(self._widths), shape.conv_width - 1)
        return state_spec({"matrix": (matrix, self._dtypes[1]), "conv": (conv, self._dtypes[0])})

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        shape = self._shape
        heads = (shape.num_key_heads, -1)
        tensors, states = batch.states(self.layer)
        projected = torch.split(self.qkv_proj(x), self._widths, dim=-1)
        pasts = torch.split(tensors["conv"], self._widths, dim=1)
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        q, k, v = (conv(part, past, states) for conv, part, past in zip(convs, projected, pasts, strict=True))
        decay = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, heads)
        out = kernels.gated_delta_net(
            q.unflatten(-1, heads),
            k.unflatten(-1, heads),
            v.unflatten(-1, heads),
            kernels.log_decay(decay, self._rate, self._bias),
            self.b_proj(x),
            tensors["matrix"],
            states,
        )
        gate = kernels.unary(self.g_b_proj(self.g_a_proj(x)), "sigmoid")
        return self.o_proj(kernels.multiply(self.o_norm(out).flatten(1), gate))
