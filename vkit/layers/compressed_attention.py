"""DeepSeek-V4's attention: a window of keys that are their own values, and compressed entries beside it.

The last tokens lie in one cache group; the entries, where a layer has them, in another, under a layer number of their
own. Source: DeepSeek-AI 2026 (V4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.layers.linear import Linear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.norm import RMSNorm
from vkit.layers.rotary import RotaryEmbedding
from vkit.quantization import Weight

if TYPE_CHECKING:
    from vkit.batch import Batch

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """Widths and constants that layers share."""

    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_top_k: int
    num_streams: int
    iterations: int
    hyper_eps: float
    eps: float


class Tensors(Module):
    """Dense tensors named as their attributes' paths, without a layer around them."""

    is_inline = True

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._shapes = shapes
        self._values: dict[str, Tensor] = {}

    def slots(self) -> list[TensorSlot]:
        """Every tensor."""
        return [TensorSlot(name, shape) for name, shape in self._shapes.items()]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take them, numbers as float32 and ids as int64."""
        for name, weight in tensors.items():
            is_ids = isinstance(weight, Tensor) and not weight.is_floating_point()
            self._values[name] = placement.vector(weight, torch.int64 if is_ids else torch.float32)

    def __getitem__(self, name: str) -> Tensor:
        """One of them."""
        return self._values[name]


class Compressor(Module):
    """What a token adds to the entry of its window, and the pooling of windows into entries."""

    def __init__(self, shape: CompressedShape, width: int, rate: int, *, is_overlapping: bool) -> None:
        stored = 2 * width if is_overlapping else width
        self.wkv = Linear(shape.hidden_size, stored)
        self.wgate = Linear(shape.hidden_size, stored)
        self.norm = RMSNorm(width, shape.eps)
        self.ape = Tensors(ape=(rate, stored))
        self.stored = stored
        self._eps = shape.eps

    def __call__(self, x: Tensor, names: tuple[str, str, str], batch: Batch, layer: int, entry_layer: int,
                 cos_sin: Tensor) -> None:  # fmt: skip
        """Store the tokens x (T, H) in the caches `names` (content, gates, entries) and pool what they complete."""
        content, gates, entries = names
        own, paged = batch.paged_tensors(layer)
        others, entry_paged = batch.paged_tensors(entry_layer)
        kernels.store_rows(self.wkv(x), own[content], paged.slot_mapping)
        kernels.store_rows(self.wgate(x), own[gates], paged.slot_mapping)
        assert self.norm.weight is not None
        kernels.pool_windows(
            own[content],
            own[gates],
            paged,
            ape=self.ape["ape"],
            norm=self.norm.weight,
            eps=self._eps,
            cos_sin=cos_sin,
            entries=others[entries],
            entry_batch=entry_paged,
        )


class Indexer(Module):
    """Which entries a query looks at."""

    def __init__(self, shape: CompressedShape, rate: int) -> None:
        self.wq_b = Linear(shape.q_rank, shape.index_heads * shape.index_dim)
        self.weights_proj = Linear(shape.hidden_size, shape.index_heads)
        self.compressor = Compressor(shape, shape.index_dim, rate, is_overlapping=True)
        self._shape = shape

    def __call__(self, x: Tensor, r: Tensor, batch: Batch, table: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries (T, heads, d) and the heads' weights (T, heads)."""
        shape = self._shape
        queries = self.wq_b(r).view(x.shape[0], shape.index_heads, shape.index_dim)
        kernels.rope(queries[..., shape.index_dim - shape.rope_dim :], None, batch.positions, table, True)
        return queries, kernels.scale(self.weights_proj(x), shape.index_heads**-0.5)


class CompressedAttention(Module):
    """One key head that is also the value, for the window's tokens and for entries; grouped output projection."""

    def __init__(
        self, layer: int, entry_layer: int, shape: CompressedShape, kind: str, rate: int, rotary: TableRotary
    ) -> None:
        self.layer, self.entry_layer = layer, entry_layer
        self.shape, self.kind, self.rate = shape, kind, rate
        self.wq_a = Linear(shape.hidden_size, shape.q_rank)
        self.q_norm = RMSNorm(shape.q_rank, shape.eps)
        self.wq_b = Linear(shape.q_rank, shape.num_heads * shape.head_dim)
        self.wkv = Linear(shape.hidden_size, shape.head_dim)
        self.kv_norm = RMSNorm(shape.head_dim, shape.eps)
        self.wo_a = _GroupedMatrix(shape.out_groups, shape.out_rank, shape.num_heads * shape.head_dim)
        self.wo_b = Linear(shape.out_groups * shape.out_rank, shape.hidden_size)
        self.sinks = Tensors(attn_sink=(shape.num_heads,))
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if kind != SLIDING:
            self.compressor = Compressor(shape, shape.head_dim, rate, is_overlapping=kind == SPARSE)
        if kind == SPARSE:
            self.indexer = Indexer(shape, rate)
        self._rotary = rotary
        self._unweighted = RMSNorm(shape.head_dim, shape.eps, has_weight=False)

    def specs(self, dtype: torch.dtype) -> tuple[LayerCacheSpec, LayerCacheSpec | None]:
        """What the window keeps, and what the entries take."""
        shape, rate = self.shape, self.rate

        def tensor(name: str, width: int, kept_as: torch.dtype = dtype) -> TensorSpec:
            return TensorSpec(name, (width,), str(kept_as).removeprefix("torch."), kept_as.itemsize)

        kept, entries = [tensor("kv", shape.head_dim)], []
        parts = [(self.compressor, "", shape.head_dim)]
        if self.indexer is not None:
            parts.append((self.indexer.compressor, "index_", shape.index_dim))
        for compressor, prefix, width in parts:
            if compressor is not None:
                # What entries are pooled from is kept for a window only, so its full precision costs little.
                kept += [tensor(f"{prefix}{name}", compressor.stored, torch.float32) for name in ("content", "gates")]
                entries.append(tensor(f"{prefix}entries", width // rate))
        # A window is pooled when its last token comes; an overlapping one reads the window before as well.
        reach = 2 * rate if self.kind == SPARSE else rate
        window = max(shape.window, reach if entries else 1)
        of_tokens = LayerCacheSpec(CacheKind.SLIDING, tuple(kept), window)
        return of_tokens, LayerCacheSpec(CacheKind.FULL, tuple(entries), granule=rate) if entries else None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        shape, table = self.shape, self._rotary.cos_sin
        start = shape.head_dim - shape.rope_dim
        r = self.q_norm(self.wq_a(x))
        q = self._unweighted(self.wq_b(r).view(x.shape[0], shape.num_heads, shape.head_dim))
        kv = self.kv_norm(self.wkv(x)).view(x.shape[0], 1, shape.head_dim)
        kernels.rope(q[..., start:], kv[..., start:], batch.positions, table, True)
        own, paged = batch.paged_tensors(self.layer)
        kernels.store_rows(kv[:, 0], own["kv"], paged.slot_mapping)
        entries = entry_paged = index = None
        if self.compressor is not None:
            self.compressor(x, ("content", "gates", "entries"), batch, self.layer, self.entry_layer, table)
            others, entry_paged = batch.paged_tensors(self.entry_layer)
            entries = others["entries"]
            if self.indexer is not None:
                names = ("index_content", "index_gates", "index_entries")
                self.indexer.compressor(x, names, batch, self.layer, self.entry_layer, table)
                index = (*self.indexer(x, r, batch, table), others["index_entries"], shape.index_top_k)
        out = kernels.compressed_attention(
            q,
            own["kv"],
            paged,
            window=shape.window,
            scale=shape.head_dim**-0.5,
            sinks=self.sinks["attn_sink"],
            rate=self.rate,
            entries=entries,
            entry_batch=entry_paged,
            index=index,
        )
        kernels.rope(out[..., start:], None, batch.positions, self._rotary.inverse, True)
        return self.wo_b(self.wo_a(out.flatten(1)))


class _GroupedMatrix(Module):
    """Each group of heads through rows of its own."""

    def __init__(self, groups: int, rank: int, width: int) -> None:
        self._groups, self._shape = groups, (groups * rank, width // groups)
        self._weight: Tensor

    def slots(self) -> list[TensorSlot]:
        """weight."""
        return [TensorSlot("weight", self._shape)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight, dense: its groups are multiplied apart."""
        self._weight = placement.vector(tensors["weight"]).unflatten(0, (self._groups, -1))

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, in) -> (T, groups · rank)."""
        return kernels.head_linear(x.unflatten(-1, (self._groups, -1)), self._weight).flatten(1)


class TableRotary(RotaryEmbedding):
    """A rope that can also be undone."""

    inverse: Tensor
    """The table of the opposite angles."""

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Build both tables."""
        super().set_tensors(tensors, placement)
        cosines, sines = self.cos_sin.chunk(2, dim=-1)
        self.inverse = torch.cat([cosines, -sines], dim=-1)
