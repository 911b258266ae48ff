"""Products and look-ups with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.block_formats import format_of
from vkit.kernels.dispatch import ops, ops_for


def quantized_linear(x: Tensor, data: Tensor, qtype: str, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias for a packed weight W. x (..., C), data uint8 (R, row_bytes), bias (R,) -> (..., R) in x.dtype.

    Raises:
        ValueError: unknown type, or shapes that do not fit.
    """
    block = format_of(qtype, "quantized_linear")
    if data.ndim != 2 or data.shape[1] != block.row_bytes(x.shape[-1]):
        raise ValueError(
            f"quantized_linear: data {tuple(data.shape)}, expected (rows, {block.row_bytes(x.shape[-1])}) "
            f"for {qtype} and x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != data.shape[:1]:
        raise ValueError(f"quantized_linear: bias {tuple(bias.shape)}, expected {tuple(data.shape[:1])}")
    out: Tensor = ops(x).quantized_linear(x, data, qtype, bias)
    return out


def quantized_embedding(ids: Tensor, data: Tensor, qtype: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a packed table. ids integer (...), data uint8 (V, row_bytes) -> (..., columns) in `dtype`.

    Raises:
        ValueError: unknown type or a table of another shape.
        IndexError: an id outside 0..V-1.
    """
    format_of(qtype, "quantized_embedding")
    if data.ndim != 2:
        raise ValueError(f"quantized_embedding: data {tuple(data.shape)}, expected (rows, row_bytes)")
    out: Tensor = ops_for(data.device.type, dtype).quantized_embedding(ids, data, qtype, dtype=dtype)
    return out
