"""Memory of the cache: sizes promised, slabs shared, pages apart."""

from __future__ import annotations

import pytest
import torch

from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.cache.store import TensorStore, kv_bytes_per_block, page_bytes


def attention(
    kind: CacheKind, heads: int, dim: int, window: int | None = None, dtype: str = "float32"
) -> LayerCacheSpec:
    size = 4 if dtype == "float32" else 2
    return LayerCacheSpec(
        kind, (TensorSpec("k", (heads, dim), dtype, size), TensorSpec("v", (heads, dim), dtype, size)), window
    )


MIXED = [
    attention(CacheKind.FULL, 2, 8),
    attention(CacheKind.SLIDING, 1, 4, window=16),
    None,
    LayerCacheSpec(CacheKind.STATE, (TensorSpec("s", (3, 5), "float32", 4), TensorSpec("c", (7,), "bfloat16", 2))),
    attention(CacheKind.SLIDING, 1, 4, window=16),
    LayerCacheSpec(CacheKind.FULL, (TensorSpec("latent", (24,), "bfloat16", 2),)),
]


def make_store(num_blocks: int = 6, block_size: int = 4) -> TensorStore:
    return TensorStore(MIXED, num_blocks=num_blocks, block_size=block_size, device=torch.device("cpu"))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_bytes_per_block_is_what_is_allocated(block_size: int) -> None:
    store = make_store(6, block_size)
    assert page_bytes(MIXED, block_size) >= 2 * 2 * 8 * 4 * block_size
    assert kv_bytes_per_block(MIXED, block_size) * 6 == store.num_bytes
    assert len(store.slabs) == 2


def test_nothing_to_keep() -> None:
    assert kv_bytes_per_block([None, None], 4) == 0
    assert TensorStore([None], num_blocks=3, block_size=4, device=torch.device("cpu")).num_bytes == 0


def test_shapes() -> None:
    store = make_store()
    assert store.kv[0][0].shape == store.kv[0][1].shape == (6, 4, 2, 8)
    assert store.tensors[3]["s"].shape == (6, 3, 5)
    assert store.tensors[3]["c"].shape == (6, 7)
    assert store.tensors[3]["c"].dtype == torch.bfloat16
    assert store.tensors[5]["latent"].shape == (6, 4, 24)
    assert store.tensors[2] == {}
    assert 5 not in store.kv
    assert [store.group_of[layer] for layer in range(6)] == [0, 1, -1, 2, 1, 0]


def test_a_block_of_one_layer_touches_nothing_else() -> None:
    """Writing all tensors of a layer in block 2 changes only page 2 of its slab."""
    for layer in (0, 1, 3, 4, 5):
        store = make_store()
        for tensor in store.tensors[layer].values():
            assert not tensor[2].any()
            tensor[2] = 1.0
        for tensor in store.tensors[layer].values():
            assert bool((tensor[2] == 1.0).all())
        touched = [(i, block) for i, slab in enumerate(store.slabs) for block in range(6) if slab[block].any()]
        assert touched == [(0 if layer in (0, 1, 3) else 1, 2)]


def test_copy_block_copies_every_layer_of_the_group() -> None:
    store = make_store()
    store.tensors[3]["s"][1] = 2.5
    store.tensors[3]["c"][1] = -1.0
    store.copy_block(2, 1, 4)
    assert bool((store.tensors[3]["s"][4] == 2.5).all())
    assert bool((store.tensors[3]["c"][4] == -1.0).all())
    assert not store.slabs[1].any()
