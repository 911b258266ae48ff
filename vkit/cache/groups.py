"""What each layer keeps between steps, and how layers are gathered into groups that share a block table.

Host only: no torch. The tensor store (store.py) reads these to allocate memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CacheKind(StrEnum):
    """How a layer's memory grows with the sequence."""

    FULL = "full"
    """One slot per token, all kept."""
    SLIDING = "sliding"
    """One slot per token; blocks wholly outside the window are given back."""
    STATE = "state"
    """One row per sequence, overwritten in place (recurrent and convolution states)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a layer keeps: per token (shape without the token axis), or per sequence for STATE."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A torch dtype's name, such as "float32"."""
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's (or one sequence's) tensor."""
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one layer keeps. Attention layers name their tensors "k" and "v" with shape (num_kv_heads, head_dim)."""

    kind: CacheKind
    tensors: tuple[TensorSpec, ...]
    window: int | None = None
    """Tokens visible to a query, itself included; SLIDING only."""

    @property
    def bytes_per_unit(self) -> int:
        """Bytes per token (FULL, SLIDING) or per sequence (STATE)."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind (and window) that share a block table."""

    index: int
    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


def group_layers(specs: list[LayerCacheSpec | None]) -> list[CacheGroup]:
    """Gather layers by kind and window, in order of first appearance; None marks a layer that keeps nothing."""
    members: dict[tuple[CacheKind, int | None], list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec is not None:
            members.setdefault((spec.kind, spec.window), []).append(layer)
    return [CacheGroup(i, kind, tuple(layers), window) for i, ((kind, window), layers) in enumerate(members.items())]
