"""What vision towers share: axial rotation, attention over a picture, look-ups in a table of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vkit import kernels
from vkit.layers.embedding import Embedding
from vkit.layers.module import Module, Placement
from vkit.quantization import Weight


class Tower(Module):
    """A module that remembers where it computes."""

    placement: Placement

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Remember where to compute."""
        self.placement = placement

    def placed(self, features: Tensor) -> Tensor:
        """Features on the device, in the activations' type."""
        return features.to(self.placement.device, self.placement.dtype)


def axis_angles(positions: Tensor, width: int, base: float) -> Tensor:
    """Angles (n, width / 2) of positions (n,), for `width` entries of a head. Source: Su et al. 2021, section 3.2.2."""
    half = width // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) / half)
    return positions.float().outer(frequencies)


def cosines_and_sines(angles: Tensor) -> Tensor:
    """Angles (n, R/2) as a table for `kernels.rope` (n, R) float32."""
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate_in_order(q: Tensor, k: Tensor, table: Tensor) -> None:
    """Rotate every head of q and k (n, H, D) by its token's own row of the table (n, R), in place."""
    kernels.rope(q, k, torch.arange(len(table), device=table.device), table)


def weighted_rows(table: Embedding, ids: Tensor, weights: Tensor) -> Tensor:
    """Sums of table rows: ids (k, n) and weights (k, n) float32 -> (n, C)."""
    total = kernels.scale_rows(table(ids[0]), weights[0])
    for corner in range(1, len(ids)):
        total = kernels.add(total, kernels.scale_rows(table(ids[corner]), weights[corner]))
    return total


def raster(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of every place of a grid (rows · columns,), row by row."""
    index = torch.arange(rows * columns)
    return index // columns, index % columns


def block_order(rows: int, columns: int, side: int) -> Tensor:
    """Places of a grid (rows · columns,), side x side block by block, both in raster order."""
    places = torch.arange(rows * columns).view(rows // side, side, columns // side, side)
    return places.permute(0, 2, 1, 3).flatten()


def windows(rows: int, columns: int, side: int) -> tuple[Tensor, list[int]]:
    """Places of a grid window by window, and the length of each; windows at the right and lower edge may be smaller."""
    row, column = raster(rows, columns)
    window = row // side * -(-columns // side) + column // side
    order = torch.argsort(window, stable=True)
    return order, torch.bincount(window).tolist()


def joined_frames(order: Tensor, frames: int) -> Tensor:
    """An order within a frame, for all frames of an item."""
    return (torch.arange(frames)[:, None] * len(order) + order).flatten()


Grid = Sequence[int]
"""Frames, rows, columns."""
