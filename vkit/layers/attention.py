"""Self-attention over the paged cache: projections, head norms, rope, cache write, attention, output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.distributed import ALONE, Ranks
from vkit.layers.linear import Linear, MergedLinear
from vkit.layers.module import Module
from vkit.layers.norm import LayerNorm, Norm, RMSNorm
from vkit.layers.rotary import RotaryEmbedding
from vkit.quantization.cutting import Span, widened

if TYPE_CHECKING:
    from vkit.batch import Batch
    from vkit.kernels import PagedBatch


class CacheOwner(Module):
    """A layer that keeps something between steps."""

    layer: int
    """Index in the model, by which the cache finds its tensors."""

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """What it keeps, keys and values as `dtype`."""
        raise NotImplementedError


class Attention(CacheOwner):
    """Grouped-query attention of one layer.

    Unless `qkv_proj` or `o_proj` bring their own, the projections are q_proj, k_proj, v_proj and o_proj; `names` is
    for checkpoints that call them otherwise. Head norms see one head at a time, or the whole projection.
    """

    takes_cache_scales = True
    """Whether keys and values may be kept divided by `k_scale` and `v_scale`."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: RotaryEmbedding | None = None,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        norms_whole_projection: bool = False,
        qkv_proj: MergedLinear | Linear | None = None,
        o_proj: Linear | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.layer = layer
        self.names = names or {}
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        self._widths = [queries, keys, keys]
        self.qkv_proj = qkv_proj or MergedLinear(
            hidden_size, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, bias=bias, fused="qkv_proj"
        )
        self.o_proj = o_proj or Linear(queries, hidden_size, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotary = rotary
        self.window = window
        self._norms_whole_projection = norms_whole_projection
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._num_all_kv_heads = num_kv_heads
        self._ranks = ALONE
        self._head_dim = head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self._soft_cap = soft_cap
        self.k_scale = 1.0
        self.v_scale = 1.0

    def shard(self, ranks: Ranks) -> None:
        """Some of the query heads, and the key heads that they see; with more ranks than key heads, several see one."""
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        first, stop = ranks.split("attention heads", heads)
        kv_first, kv_stop = ranks.split_or_repeat("key-value heads", kv_heads)
        keys = widened([(kv_first, kv_stop)], head_dim)
        self._shard_projection(self._query_rows(first, stop), keys)
        self.o_proj.shard_inputs(
            ranks,
            ranks.each(lambda rank: widened([ranks.split("attention heads", heads, rank)], head_dim)),
        )
        for norm, edges in ((self.q_norm, (first, stop)), (self.k_norm, (kv_first, kv_stop))):
            if isinstance(norm, LayerNorm):
                norm.shard_heads(*edges)
        own, own_kv = (stop - first) * head_dim, (kv_stop - kv_first) * head_dim
        self._widths = [own, own_kv, own_kv]
        self._num_kv_heads = kv_stop - kv_first
        self._ranks = ranks

    def _query_rows(self, first: int, stop: int) -> list[Span]:
        """Outputs of the query projection that belong to some heads."""
        return widened([(first, stop)], self._head_dim)

    def _shard_projection(self, queries: list[Span], keys: list[Span]) -> None:
        projection = self.qkv_proj
        num_queries, num_keys = self._widths[0], self._widths[1]
        if isinstance(projection, MergedLinear) and len(projection.projections()) > 1:
            projection.shard_outputs(queries, *[keys] * (len(projection.projections()) - 1))
            return
        starts = num_queries, num_queries + num_keys  # one tensor of queries, keys and values
        projection.shard_outputs(
            [*queries, *((start + first, start + stop) for start in starts for first, stop in keys)]
        )

    def cache_spec(self, dtype: torch.dtype) -> LayerCacheSpec:
        """Keys and values of every token, or of those in the window."""
        # One scale per token and head lies behind the codes of int8.
        shape = (self._num_kv_heads, self._head_dim + (4 if dtype is torch.int8 else 0))
        name = str(dtype).removeprefix("torch.")
        tensors = tuple(TensorSpec(key, shape, name, dtype.itemsize) for key in ("k", "v"))
        kind = CacheKind.FULL if self.window is None else CacheKind.SLIDING
        return LayerCacheSpec(kind, tensors, self.window)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        return self.o_proj(self.attend(*self.project(x), batch).flatten(1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) -> queries (T, heads · D), keys and values (T, kv heads · D)."""
        q, k, v = torch.split(self.qkv_proj(x), self._widths, dim=-1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Projected queries (T, heads · D) or (T, heads, D), keys and values (T, kv heads · D) -> (T, heads, D).

        May rotate q and k in place.
        """
        q, k = self._positioned(q, k, batch)
        v = v.view(v.shape[0], -1, self._head_dim)
        k_cache, v_cache, paged = batch.kv(self.layer)
        if self.k_scale != 1.0:
            k = kernels.scale(k, 1.0 / self.k_scale)
        if self.v_scale != 1.0:
            v = kernels.scale(v, 1.0 / self.v_scale)
        kernels.write_kv(k, v, k_cache, v_cache, paged.slot_mapping)
        return self.look_up(q, k_cache, v_cache, batch, paged)

    def look_up(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, paged: PagedBatch) -> Tensor:
        """Queries (T, heads, D) against what the cache holds -> (T, heads, D)."""
        scale = self._scale * self.k_scale
        out = kernels.paged_attention(q, k_cache, v_cache, paged, scale, self.window, self._soft_cap)
        return out if self.v_scale == 1.0 else kernels.scale(out, self.v_scale)

    def _whole_norm(self, norm: Norm, x: Tensor, num_heads: int) -> Tensor:
        """The norm over all `num_heads` heads of x (T, heads here · D), which may be spread over ranks."""
        ranks = self._ranks
        if ranks.size == 1:
            return norm(x)
        whole = ranks.gather(x).unflatten(-1, (-1, self._head_dim))
        repeats = whole.shape[1] // num_heads  # ranks that share a key head each bring it
        normed = norm(whole[:, ::repeats].flatten(1))
        first, stop = ranks.split_or_repeat("heads", num_heads)
        return normed[:, first * self._head_dim : stop * self._head_dim].contiguous()

    def _positioned(self, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Queries and keys by head, normed and rotated."""
        q_norm, k_norm, rotary = self.q_norm, self.k_norm, self.rotary
        if self._norms_whole_projection and q_norm is not None and k_norm is not None:
            q, k = self._whole_norm(q_norm, q, self._num_heads), self._whole_norm(k_norm, k, self._num_all_kv_heads)
            q_norm = k_norm = None
        num_tokens, head_dim = q.shape[0], self._head_dim
        q = q if q.ndim == 3 else q.view(num_tokens, -1, head_dim)
        k = k.view(num_tokens, -1, head_dim)
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm) and rotary is not None:
            q_weight, k_weight = q_norm.weight, k_norm.weight
            if q_weight is not None and k_weight is not None:
                eps, offset = q_norm.eps, q_norm.offset
                positions, table = rotary.angles(batch)
                kernels.qk_norm_rope(q, k, q_weight, k_weight, eps, offset, positions, table, rotary.is_interleaved)
                return q, k
        if isinstance(q_norm, RMSNorm | LayerNorm) and isinstance(k_norm, RMSNorm | LayerNorm):
            q, k = q_norm(q), k_norm(k)
        if rotary is not None:
            kernels.rope(q, k, *rotary.angles(batch), rotary.is_interleaved)
        return q, k
