"""Multiply by a packed weight: a few rows at a time are dequantised, so no dense copy of the weight ever exists."""

from __future__ import annotations

import torch

from vkit.kernels.block_formats import format_of
from vkit.kernels.reference.dequantize import dequantize

TILE_ELEMENTS = 1 << 20
"""Elements dequantised at a time: 4 MiB of float32, within the caches of a desktop processor."""


def quantized_linear(x: torch.Tensor, data: torch.Tensor, qtype: str, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + bias for a packed weight W. x (..., C), data uint8 (R, row_bytes), bias (R,) -> (..., R) in x.dtype.

    Values and sums are float32 whatever x is.

    Raises:
        ValueError: unknown type, or shapes that do not fit.
    """
    block = format_of(qtype, "quantized_linear")
    num_columns = x.shape[-1]
    if data.ndim != 2 or data.shape[1] != block.row_bytes(num_columns):
        raise ValueError(
            f"quantized_linear: data {tuple(data.shape)}, expected (rows, {block.row_bytes(num_columns)}) "
            f"for {qtype} and x {tuple(x.shape)}"
        )
    num_rows = data.shape[0]
    if bias is not None and bias.shape != (num_rows,):
        raise ValueError(f"quantized_linear: bias {tuple(bias.shape)}, expected ({num_rows},)")
    flat = x.reshape(-1, num_columns).to(torch.float32)
    y = torch.empty(flat.shape[0], num_rows, dtype=torch.float32, device=x.device)
    tile_rows = max(1, TILE_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, tile_rows):
        tile = dequantize(data[start : start + tile_rows], qtype)
        y[:, start : start + tile_rows] = flat @ tile.T
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], num_rows).to(x.dtype)
