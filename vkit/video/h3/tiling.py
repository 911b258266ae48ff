"""Large pictures tile by tile, neighbours cross-faded where they overlap.

Tiling is part of the model: larger pieces than it was trained on come out damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vkit.video.h3.geometry import Tile


def cross_fade(before: Tensor, after: Tensor, length: int, dim: int) -> Tensor:
    """`after`, whose first `length` entries along `dim` fade in over the last `length` of `before`."""
    if length == 0:
        return after
    shape = [1] * after.ndim
    shape[dim] = length
    weight = (torch.arange(length, dtype=after.dtype, device=after.device) / length).view(shape)
    tail = before.narrow(dim, before.shape[dim] - length, length)
    head = after.narrow(dim, 0, length)
    faded = tail * (1 - weight) + head * weight
    return torch.cat([faded, after.narrow(dim, length, after.shape[dim] - length)], dim=dim)


def assemble(
    rows: Sequence[Tile], columns: Sequence[Tile], compute: Callable[[Tile, Tile], Tensor], divisor: int
) -> Tensor:
    """(..., H, W) from tiles (..., h, w), whose sizes are those of the plan over `divisor`.

    Each tile is faded vertically with the one above, then horizontally with the one to its left, both as computed.
    """
    bands = []
    above: list[Tensor] = []
    for row in rows:
        current = [compute(row, column) for column in columns]
        pieces = []
        for index, column in enumerate(columns):
            tile = current[index]
            if above:
                tile = cross_fade(above[index], tile, _overlap_before(rows, row) // divisor, tile.ndim - 2)
            if index:
                tile = cross_fade(current[index - 1], tile, columns[index - 1].overlap // divisor, tile.ndim - 1)
            height = (row.length - row.overlap) // divisor
            width = (column.length - column.overlap) // divisor
            pieces.append(tile[..., :height, :width])
        bands.append(torch.cat(pieces, dim=-1))
        above = current
    return torch.cat(bands, dim=-2)


def _overlap_before(tiles: Sequence[Tile], tile: Tile) -> int:
    return tiles[tiles.index(tile) - 1].overlap
