"""How K and V lie in a page: tiled, so that attention reads vectors of sixteen keys in place, or plainly.

A tiled K is (N, K, S/16, D, 16) in float32 and (N, K, S/16, D/2, 16, 2) in bfloat16, a tiled V (N, K, S, Dv) and
(N, K, S/2, Dv, 2); a plain one (N, S, K, D) and (N, S, K, Dv). See attention_tiled.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels.cpu.dtypes import CACHE_IDS
from vkit.kernels.dispatch import default_kv_layout
from vkit.kernels.reference.narrow_cache import SCALE_BYTES

TILE = 16
"""Keys in a vector."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Sizes and strides (in elements: block, token, head) of a K and V pair; tiled ones have no token stride."""

    is_tiled: bool
    block_size: int
    num_heads: int
    key_dim: int
    value_dim: int
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Cache | None:
        """What k and v are; None for a pair that no kernel reads."""
        if k.dtype not in CACHE_IDS or v.dtype is not k.dtype:
            return None
        if k.ndim == 4:
            if k.stride(3) != 1 or v.stride(3) != 1:
                return None
            strides = [(x.stride(0), x.stride(1), x.stride(2)) for x in (k, v)]
            behind = SCALE_BYTES if k.dtype is torch.int8 else 0
            widths = k.shape[3] - behind, v.shape[3] - behind
            return cls(False, k.shape[1], k.shape[2], *widths, strides[0], strides[1])
        pairs = 2 if k.ndim == 6 else 1
        block_size, key_dim = k.shape[2] * TILE, k.shape[3] * pairs
        strides = [(x.stride(0), 0, x.stride(1)) for x in (k, v)]
        return cls(True, block_size, k.shape[1], key_dim, v.shape[3], strides[0], strides[1])


def kv_layout(
    pages: Tensor, block_size: int, num_kv_heads: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V as views of `pages` (N, page_bytes) uint8: tiled where the sizes allow it."""
    key_dim, value_dim = head_dims
    is_paired = dtype is torch.bfloat16
    fits = block_size % TILE == 0 and (dtype is torch.float32 or (is_paired and key_dim % 2 == 0))
    if not fits:
        return default_kv_layout(pages, block_size, num_kv_heads, head_dims, dtype)
    values = pages.view(dtype)
    num_keys, num_values = block_size * num_kv_heads * key_dim, block_size * num_kv_heads * value_dim
    k, v = values[:, :num_keys], values[:, num_keys : num_keys + num_values]
    if is_paired:
        return (
            k.unflatten(1, (num_kv_heads, block_size // TILE, key_dim // 2, TILE, 2)),
            v.unflatten(1, (num_kv_heads, block_size // 2, value_dim, 2)),
        )
    return (
        k.unflatten(1, (num_kv_heads, block_size // TILE, key_dim, TILE)),
        v.unflatten(1, (num_kv_heads, block_size, value_dim)),
    )
