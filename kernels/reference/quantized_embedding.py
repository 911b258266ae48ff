"""Look rows of a packed table up: only the rows asked for are dequantised."""

from __future__ import annotations

import torch

from vkit.kernels.reference.dequantize import dequantize


def quantized_embedding(
    ids: torch.Tensor, data: torch.Tensor, qtype: str, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows of a packed table. ids integer (...), data uint8 (V, row_bytes) -> (..., columns) in `dtype`.

    Raises:
        ValueError: unknown type or a table of another shape.
        IndexError: an id outside 0..V-1.
    """
    if data.ndim != 2:
        raise ValueError(f"quantized_embedding: data {tuple(data.shape)}, expected (rows, row_bytes)")
    rows = dequantize(data.index_select(0, ids.reshape(-1)), qtype, dtype=dtype)
    return rows.reshape(*ids.shape, rows.shape[-1])
