"""Slots of a step grouped by expert, all on the device: how every grouped product finds its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import power_of_two


@triton.jit  # type: ignore[untyped-decorator]
def expert_of(tile: tl.tensor, tile_ends: tl.tensor, num_experts: tl.tensor) -> tl.tensor:
    """The expert a tile belongs to; num_experts for a tile beyond the last."""
    low = tl.zeros([], tl.int32)
    high = low + num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit  # type: ignore[untyped-decorator]
def slots_of(
    tile: tl.tensor,
    expert: tl.tensor,
    order: tl.tensor,
    slot_ends: tl.tensor,
    tile_ends: tl.tensor,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The slots of a tile (ROWS,), and which of them there are."""
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.where(expert == 0, 0, tl.load(tile_ends + before))
    first_slot = tl.where(expert == 0, 0, tl.load(slot_ends + before))
    place = first_slot + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    is_row = place < tl.load(slot_ends + expert)
    return tl.load(order + place, mask=is_row, other=0), is_row


@dataclass(frozen=True)
class Groups:
    """The slots of a step by expert. A tile is up to `rows` slots of one expert."""

    order: Tensor
    """(slots,): the slots by expert."""
    slot_ends: Tensor
    tile_ends: Tensor
    """(E,): slots and tiles of all experts up to each."""
    rows: int
    most_tiles: int

    @staticmethod
    def of(ids: Tensor, num_experts: int) -> Groups:
        """Tiles as tall as an expert's share of the slots, within what matrix instructions want."""
        slots = ids.flatten()
        rows = min(128, max(16, power_of_two(slots.numel() // num_experts)))
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, slots, torch.ones_like(slots))
        tiles = (counts + rows - 1) // rows
        order = torch.argsort(slots, stable=True)
        most = slots.numel() // rows + min(num_experts, slots.numel())
        return Groups(order, counts.cumsum(0), tiles.cumsum(0), rows, most)
