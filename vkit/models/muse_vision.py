"""The vision tower of Muse Glimmer: full and windowed attention over patches in raster order.

Source: published configuration and weights of Muse Glimmer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers import Activation, Embedding, LayerNorm, Linear, MergedLinear, Module, PlainMLP
from vkit.layers.vision import (
    Tower,
    axis_angles,
    block_order,
    cosines_and_sines,
    joined_frames,
    raster,
    rotate_in_order,
    weighted_rows,
    windows,
)
from vkit.models.hf_config import HFConfig

Grid = tuple[int, int, int]
FULL, WINDOW = "full_attention", "window_attention"


class MusePatches(Module):
    """Patches to the tower's width, and the table of positions."""

    names: Mapping[str, str] = {"projection": "patch_embedding"}

    def __init__(self, num_features: int, width: int, num_positions: int) -> None:
        self.projection = Linear(num_features, width)
        self.position_embedding_table = Embedding(num_positions, width)


class MuseAttention(Module):
    """Every patch sees those of its run: its frame or its window."""

    def __init__(self, width: int, num_heads: int) -> None:
        self.qkv = MergedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=True)
        self.proj = Linear(width, width, bias=True)
        self._num_heads = num_heads

    def __call__(self, x: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (n, C) -> (n, C)."""
        q, k, v = (part.unflatten(-1, (self._num_heads, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        rotate_in_order(q, k, table)
        return self.proj(kernels.segment_attention(q, k, v, lengths, q.shape[-1] ** -0.5).flatten(1))


class MuseBlock(Module):
    """x += attn(norm x); x += mlp(norm x)."""

    def __init__(self, width: int, num_heads: int, inner: int, activation: Activation, eps: float) -> None:
        self.norm1 = LayerNorm(width, eps)
        self.attn = MuseAttention(width, num_heads)
        self.norm2 = LayerNorm(width, eps)
        self.mlp = PlainMLP(width, inner, activation=activation)

    def __call__(self, x: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (n, C) -> (n, C)."""
        x = kernels.add(x, self.attn(self.norm1(x), table, lengths))
        return kernels.add(x, self.mlp(self.norm2(x)))


class MuseVisionTower(Tower):
    """Patches to rows of merged blocks, before the adapter. Names are those below `model.vision_tower.`."""

    def __init__(self, config: HFConfig) -> None:
        """`config`: the keys of vision_config."""
        width, depth = config.integer("hidden_size"), config.integer("num_hidden_layers")
        num_heads, inner = config.integer("num_attention_heads"), config.integer("intermediate_size")
        self.patch_size = config.integer("patch_size", default=14)
        self.merge_size = config.integer("merge_size", default=2)
        self.temporal_patch_size = config.integer("patch_temporal", default=2)
        self.side = config.integer("pos_emb_height")
        if config.integer("pos_emb_width", default=self.side) != self.side:
            raise ModelLoadError("config.json: pos_emb_width differs from pos_emb_height: the table must be square")
        types = config.layer_types(depth) or [FULL] * depth
        if unknown := set(types) - {FULL, WINDOW}:
            raise ModelLoadError(f"config.json: layer_types {sorted(unknown)} are not supported in the vision tower")
        self._is_full = [kind == FULL for kind in types]
        eps = config.number("layer_norm_eps", default=1e-5)
        num_features = 3 * self.temporal_patch_size * self.patch_size**2
        self.patch_embedder = MusePatches(num_features, width, self.side**2)
        self.ln_pre, self.ln_post = LayerNorm(width, eps), LayerNorm(width, eps)
        activation = config.activation("hidden_act", default="gelu")
        self.layers = [MuseBlock(width, num_heads, inner, activation, eps) for _ in range(depth)]
        self.out_width = width * self.merge_size**2
        self._head_dim = width // num_heads
        self._base = float(config.mapping("rope_parameters").get("rope_theta", 10000.0))

    def encode(self, features: Tensor, grid: Grid) -> Tensor:
        """One item's patches (n, 2 · 3 · P · P) -> merged blocks (n / m², C · m²)."""
        frames, rows, columns = grid
        device = self.placement.device
        x = kernels.add(self.patch_embedder.projection(self.placed(features)), self._positions(grid))
        x = self.ln_pre(x)
        row, column = raster(rows, columns)
        base, half = self._base, self._head_dim // 2
        angles = torch.cat([axis_angles(column + 1, half, base), axis_angles(row + 1, half, base)], dim=-1)
        table = cosines_and_sines(angles).repeat(frames, 1)
        in_window, window_lengths = windows(rows, columns, self.side)
        order = joined_frames(in_window, frames)
        back = torch.argsort(order).to(device)
        windowed, whole = table[order].to(device), table.to(device)
        order = order.to(device)
        for block, is_full in zip(self.layers, self._is_full, strict=True):
            if is_full:
                x = block(x, whole, [rows * columns] * frames)
            else:
                x = kernels.embedding(back, block(kernels.embedding(order, x), windowed, window_lengths * frames))
        return self._merged(self.ln_post(x), grid)

    def _positions(self, grid: Grid) -> Tensor:
        """The learned table, sampled bilinearly; what lies outside it counts as zero.

        Rows and columns of the sampling trade places where the grid is not square, as published.
        """
        frames, rows, columns = grid
        index, side = torch.arange(rows * columns), self.side
        y = (torch.div(index, rows, rounding_mode="floor") + 0.5) * side / columns - 0.5
        x = (index % rows + 0.5) * side / rows - 0.5
        low_y, low_x = y.floor(), x.floor()
        ids, weights = [], []
        for at_y, part_y in ((low_y, low_y + 1 - y), (low_y + 1, y - low_y)):
            for at_x, part_x in ((low_x, low_x + 1 - x), (low_x + 1, x - low_x)):
                inside = (at_y >= 0) & (at_y < side) & (at_x >= 0) & (at_x < side)
                place = at_y.clamp(0, side - 1) * side + at_x.clamp(0, side - 1)
                ids.append(place.long().repeat(frames))
                weights.append((part_y * part_x * inside).repeat(frames))
        device = self.placement.device
        table = self.patch_embedder.position_embedding_table
        return weighted_rows(table, torch.stack(ids).to(device), torch.stack(weights).float().to(device))

    def _merged(self, x: Tensor, grid: Grid) -> Tensor:
        """Blocks in raster order; all patches of a channel side by side."""
        frames, rows, columns = grid
        order = joined_frames(block_order(rows, columns, self.merge_size), frames).to(self.placement.device)
        blocks: Tensor = kernels.embedding(order, x).unflatten(0, (-1, self.merge_size**2))
        return blocks.transpose(1, 2).flatten(1)
