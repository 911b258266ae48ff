"""The memory behind the cache: byte slabs that all groups share. A block holds tokens of one group, or one state.

Knows shapes and bytes; who owns which block is decided elsewhere (blocks.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vkit import kernels
from vkit.cache.groups import CacheGroup, CacheKind, LayerCacheSpec, group_layers

_ALIGNMENT = 8
"""Page sizes are a multiple of the widest element, so that a page can be viewed as any dtype."""


def page_bytes(specs: list[LayerCacheSpec | None], block_size: int) -> int:
    """Bytes of one block in one slab: what the most demanding layer needs for a block of tokens, or for one state."""
    sizes = [
        spec.bytes_per_unit * (1 if spec.kind is CacheKind.STATE else block_size) for spec in specs if spec is not None
    ]
    return -(-max(sizes, default=0) // _ALIGNMENT) * _ALIGNMENT


def num_slabs(groups: list[CacheGroup]) -> int:
    """Layers of the largest group."""
    return max((len(group.layers) for group in groups), default=0)


def kv_bytes_per_block(specs: list[LayerCacheSpec | None], block_size: int) -> int:
    """Bytes one block id occupies over all slabs."""
    return num_slabs(group_layers(specs)) * page_bytes(specs, block_size)


class TensorStore:
    """Every layer's cache tensors, allocated once.

    Layer j of each group lives in slab j. Pages are zero at first, so that memory no block has used yet is finite (and,
    on a host, costs nothing until it is written).
    """

    def __init__(
        self, specs: list[LayerCacheSpec | None], *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.groups = group_layers(specs)
        self.block_size = block_size
        shape = (num_blocks, page_bytes(specs, block_size))
        self.slabs = [_zeros(shape, device) for _ in range(num_slabs(self.groups))]
        """(num_blocks, page_bytes) uint8 each."""
        self.tensors: list[dict[str, Tensor]] = [{} for _ in specs]
        """Per layer and name: (N, S, *shape) for tensors kept per token, (N, *shape) for states."""
        self.group_of: list[int] = [-1] * len(specs)
        """Per layer the index of its group; -1 for a layer that keeps nothing."""
        self.kv: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Per attention layer: K, V and the index of its group."""
        for group in self.groups:
            for slab, layer in zip(self.slabs, group.layers, strict=False):
                spec = specs[layer]
                assert spec is not None
                self.group_of[layer] = group.index
                self.tensors[layer] = tensors = _views(spec, slab, block_size)
                if tensors.keys() == {"k", "v"}:
                    self.kv[layer] = (tensors["k"], tensors["v"], group.index)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(slab.nbytes for slab in self.slabs)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy what all layers of a group keep in block `source` to block `target`."""
        for slab, _ in zip(self.slabs, self.groups[group].layers, strict=False):
            slab[target].copy_(slab[source])


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Zero bytes. On a host numpy asks the system for pages that exist once written; torch would write them all."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _views(spec: LayerCacheSpec, slab: Tensor, block_size: int) -> dict[str, Tensor]:
    """One layer's tensors as views of its slab, each tensor's values contiguous inside a page."""
    by_name = {tensor.name: tensor for tensor in spec.tensors}
    if by_name.keys() == {"k", "v"} and spec.kind is not CacheKind.STATE:
        num_kv_heads, key_dim = by_name["k"].shape
        dims = (key_dim, by_name["v"].shape[1])
        k, v = kernels.kv_layout(slab, block_size, num_kv_heads, dims, getattr(torch, by_name["k"].dtype))
        return {"k": k, "v": v}
    views: dict[str, Tensor] = {}
    start = 0
    for tensor in spec.tensors:
        shape = tensor.shape if spec.kind is CacheKind.STATE else (block_size, *tensor.shape)
        stop = start + tensor.num_bytes * (1 if spec.kind is CacheKind.STATE else block_size)
        views[tensor.name] = slab[:, start:stop].view(getattr(torch, tensor.dtype)).unflatten(1, shape)
        start = stop
    return views
