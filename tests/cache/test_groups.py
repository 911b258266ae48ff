"""Layers in groups: every layer in one, blocks as full as they can be."""

from __future__ import annotations

import pytest

from vkit.cache.groups import MAX_GROUPS_OF_A_KIND, CacheKind, LayerCacheSpec, TensorSpec, group_layers
from vkit.cache.store import num_slabs

STATE = LayerCacheSpec(CacheKind.STATE, (TensorSpec("recurrent", (4, 4), "float32", 4),))
FULL = LayerCacheSpec(CacheKind.FULL, (TensorSpec("k", (1, 4), "float32", 4), TensorSpec("v", (1, 4), "float32", 4)))
SLIDING = LayerCacheSpec(CacheKind.SLIDING, FULL.tensors, window=16)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ([FULL] * 5, [5]),
        ([STATE, STATE, STATE, FULL] * 16, [16, 16, 16, 16]),
        ([*([SLIDING] * 5), FULL] * 3, [3, 3, 3, 3, 3, 3]),
        ([STATE] * 21 + [FULL] * 20, [21, 20]),  # cutting 21 into 11 and 10 would double what a sequence takes
        ([STATE] * 23 + [FULL] * 6, [5, 6, 6, 6, 6]),
        ([FULL] + [STATE] * 40, [1, *[5] * 8]),
        ([None, FULL, None], [1]),
        ([], []),
    ],
)
def test_groups_share_pages_evenly(pattern: list[LayerCacheSpec | None], sizes: list[int]) -> None:
    groups = group_layers(pattern)
    assert [len(group.layers) for group in groups] == sizes
    layers = sorted(layer for group in groups for layer in group.layers)
    assert layers == [layer for layer, spec in enumerate(pattern) if spec is not None]
    assert [group.index for group in groups] == list(range(len(groups)))
    assert num_slabs(groups) == max(sizes, default=0)
    kinds = [(group.kind, group.window) for group in groups]
    assert max(map(kinds.count, kinds), default=0) <= MAX_GROUPS_OF_A_KIND
    for group in groups:
        for layer in group.layers:
            spec = pattern[layer]
            assert spec is not None
            assert (spec.kind, spec.window) == (group.kind, group.window)
