"""The memory behind the cache: byte slabs that all groups share, and one row per sequence for recurrent states.

Knows shapes and bytes; who owns which block is decided elsewhere (blocks.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheGroup, CacheKind, LayerCacheSpec, group_layers

_ALIGNMENT = 8
"""Page sizes are a multiple of the widest element, so that a page can be viewed as any dtype."""


def page_bytes(specs: list[LayerCacheSpec | None], block_size: int) -> int:
    """Bytes one block occupies in one slab: what the most demanding paged layer needs."""
    sizes = [
        spec.bytes_per_unit * block_size for spec in specs if spec is not None and spec.kind is not CacheKind.STATE
    ]
    return -(-max(sizes, default=0) // _ALIGNMENT) * _ALIGNMENT


def num_slabs(groups: list[CacheGroup]) -> int:
    """Layers of the largest paged group."""
    return max((len(group.layers) for group in groups if group.kind is not CacheKind.STATE), default=0)


def kv_bytes_per_block(specs: list[LayerCacheSpec | None], block_size: int) -> int:
    """Bytes one block id occupies over all slabs."""
    return num_slabs(group_layers(specs)) * page_bytes(specs, block_size)


def state_bytes(specs: list[LayerCacheSpec | None], max_num_seqs: int) -> int:
    """Bytes of all recurrent states: one row per sequence and one spare for padding."""
    rows = max_num_seqs + 1
    return sum(rows * spec.bytes_per_unit for spec in specs if spec is not None and spec.kind is CacheKind.STATE)


class TensorStore:
    """Every layer's cache tensors, allocated once.

    Layer j of each paged group lives in slab j. Pages are zero at first, so that memory no block has used yet is finite
    (and, on a host, costs nothing until it is written).
    """

    def __init__(
        self,
        specs: list[LayerCacheSpec | None],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.groups = group_layers(specs)
        self.block_size = block_size
        shape = (num_blocks, page_bytes(specs, block_size))
        self.slabs = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(num_slabs(self.groups))]
        """(num_blocks, page_bytes) uint8 each."""
        self.tensors: list[dict[str, Tensor]] = [{} for _ in specs]
        """Per layer: (N, S, *shape) for paged tensors, (max_num_seqs + 1, *shape) for states, by name."""
        self.kv: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Per attention layer: K, V and the index of its group."""
        for group in self.groups:
            for slab, layer in enumerate(group.layers):
                spec = specs[layer]
                assert spec is not None
                if group.kind is CacheKind.STATE:
                    self.tensors[layer] = _states(spec, max_num_seqs + 1, device)
                    continue
                self.tensors[layer] = _views(spec, self.slabs[slab], block_size)
                if self.tensors[layer].keys() == {"k", "v"}:
                    self.kv[layer] = (self.tensors[layer]["k"], self.tensors[layer]["v"], group.index)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        states = sum(
            tensor.nbytes
            for group in self.groups
            if group.kind is CacheKind.STATE
            for layer in group.layers
            for tensor in self.tensors[layer].values()
        )
        return states + sum(slab.nbytes for slab in self.slabs)


def _views(spec: LayerCacheSpec, slab: Tensor, block_size: int) -> dict[str, Tensor]:
    """One layer's tensors as views of its slab, each tensor's tokens contiguous inside a page."""
    by_name = {tensor.name: tensor for tensor in spec.tensors}
    if by_name.keys() == {"k", "v"}:
        num_kv_heads, key_dim = by_name["k"].shape
        dtype = getattr(torch, by_name["k"].dtype)
        dims = (key_dim, by_name["v"].shape[1])
        k, v = kernels.kv_layout(slab, block_size, num_kv_heads, dims, dtype)
        return {"k": k, "v": v}
    views: dict[str, Tensor] = {}
    start = 0
    for tensor in spec.tensors:
        stop = start + tensor.num_bytes * block_size
        values = slab[:, start:stop].view(getattr(torch, tensor.dtype))
        views[tensor.name] = values.unflatten(1, (block_size, *tensor.shape))
        start = stop
    return views


def _states(spec: LayerCacheSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
    return {
        tensor.name: torch.zeros((num_rows, *tensor.shape), dtype=getattr(torch, tensor.dtype), device=device)
        for tensor in spec.tensors
    }
