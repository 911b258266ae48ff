"""Multi-head latent attention: what is cached is one narrow vector per token, shared by all heads.

Keys and values are linear in the latent vector, so their matrices are moved to the other side of the products: queries
are carried into latent space, attention runs there with a single key head, and its result is carried out.
Source: DeepSeek-AI 2024a, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.distributed import Ranks
from vkit.errors import UsageError
from vkit.layers.attention import CacheOwner
from vkit.layers.linear import Linear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.norm import RMSNorm
from vkit.layers.rotary import RotaryEmbedding
from vkit.quantization import Weight
from vkit.quantization.cutting import Span, index_of, num_in, take_rows, widened

if TYPE_CHECKING:
    from vkit.batch import Batch

_RANK_NORM_EPS = 1e-6
"""Of the norms on the ranks, whatever the model's other norms use."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of latent attention."""

    num_heads: int
    kv_rank: int
    q_rank: int | None
    """None: queries come from one projection."""
    nope_dim: int
    """Part of a query or key without positions."""
    rope_dim: int
    """Part that rotates; the keys' is one for all heads."""
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Width of a query."""
        return self.nope_dim + self.rope_dim


class LatentAttention(CacheOwner):
    """Latent attention of one layer. Without `rotary` the shared part of the keys does not rotate."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: LatentShape,
        *,
        rotary: RotaryEmbedding | None,
        scale: float,
        bias: bool = False,
    ) -> None:
        self.layer = layer
        self._shape = shape
        self._scale = scale
        queries = shape.num_heads * shape.query_dim
        if shape.q_rank is None:
            self.q_proj = Linear(hidden_size, queries)
        else:
            self.q_a_proj = Linear(hidden_size, shape.q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(shape.q_rank, _RANK_NORM_EPS)
            self.q_b_proj = Linear(shape.q_rank, queries)
        self.kv_a_proj_with_mqa = Linear(hidden_size, shape.kv_rank + shape.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, _RANK_NORM_EPS)
        self.kv_b_proj = LatentMatrices(shape)
        self.o_proj = Linear(shape.num_heads * shape.value_dim, hidden_size, bias=bias)
        self.rotary = rotary

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads; what all of them share, and the cache, is whole on every rank."""
        shape = self._shape
        first, stop = ranks.split("attention heads", shape.num_heads)
        queries = self.q_proj if shape.q_rank is None else self.q_b_proj
        queries.shard_outputs(widened([(first, stop)], shape.query_dim))
        self.kv_b_proj.shard(ranks)

        def columns(rank: int) -> list[Span]:
            return widened([ranks.split("attention heads", shape.num_heads, rank)], shape.value_dim)

        self.o_proj.shard_inputs(ranks, ranks.each(columns))
        self._shape = replace(shape, num_heads=stop - first)

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """The latent vector and the rotated part of every token."""
        if dtype.itemsize == 1:
            raise UsageError(
                "--kv-cache-dtype: latent attention keeps one vector per token, which fp8 and int8 are too coarse for",
                remedy="auto, bfloat16, float16 or float32",
            )
        width = self._shape.kv_rank + self._shape.rope_dim
        tensor = TensorSpec("latent", (1, width), str(dtype).removeprefix("torch."), dtype.itemsize)
        return LayerCacheSpec(CacheKind.FULL, (tensor,))

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        shape, rank = self._shape, self._shape.kv_rank
        q = self._queries(x).view(x.shape[0], shape.num_heads, shape.query_dim)
        q_plain, q_rotated = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split([rank, shape.rope_dim], dim=-1)
        if self.rotary is not None:
            table, is_interleaved = self.rotary.cos_sin, self.rotary.is_interleaved
            kernels.rope(q_rotated, k_rotated.unsqueeze(1), batch.positions, table, is_interleaved)
        query = kernels.concat([self.kv_b_proj.queries(q_plain), q_rotated])
        key = kernels.concat([self.kv_a_layernorm(latent), k_rotated]).unsqueeze(1)
        cache, paged = batch.latents(self.layer)
        values = cache[..., :rank]
        kernels.write_kv(key, key[..., :rank], cache, values, paged.slot_mapping)
        out = kernels.paged_attention(query, cache, values, paged, self._scale)
        return self.o_proj(self.kv_b_proj.values(out).flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        if self._shape.q_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


class LatentMatrices(Module):
    """Each head's matrices from the latent vector to keys and to values; dense, since both are used the other way."""

    def __init__(self, shape: LatentShape) -> None:
        self._shape = shape
        self._heads: Span | None = None
        """The heads that this rank has; None: all."""
        self._keys: Tensor
        self._values: Tensor

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads."""
        self._heads = ranks.split("attention heads", self._shape.num_heads)

    def slots(self) -> list[TensorSlot]:
        """weight."""
        shape = self._shape
        return [TensorSlot("weight", (shape.num_heads * (shape.nope_dim + shape.value_dim), shape.kv_rank))]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight, whose rows are per head the keys', then the values'."""
        shape, weight = self._shape, tensors["weight"]
        num_heads = shape.num_heads
        if self._heads is not None:
            num_heads = num_in([self._heads])
            weight = take_rows(weight, index_of(widened([self._heads], shape.nope_dim + shape.value_dim)))
        stacked = placement.vector(weight).unflatten(0, (num_heads, -1))
        keys, self._values = stacked.split([shape.nope_dim, shape.value_dim], dim=1)
        self._keys = keys.transpose(1, 2)

    def queries(self, q: Tensor) -> Tensor:
        """Queries (T, heads, nope) in latent space (T, heads, rank)."""
        return kernels.head_linear(q, self._keys)

    def values(self, latent: Tensor) -> Tensor:
        """Attended latents (T, heads, rank) as values (T, heads, Dv)."""
        return kernels.head_linear(latent, self._values)
