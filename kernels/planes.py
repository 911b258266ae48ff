"""Packed rows in the order a card reads best: codes apart from scales, every row at a multiple of sixteen bytes.

Codes with scales already lie apart; here they are brought into rows, whichever way the checkpoint packed them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS, PLANE_FORMATS, PLANE_SUFFIX, PLANES
from vkit.kernels.scaled import ScaledMatrix, words_of_awq

_ROWS_AT_ONCE = 1024
"""Rows whose codes are taken apart at a time: each takes eight bytes meanwhile."""


def to_planes(data: Tensor, qtype: str) -> Tensor:
    """Rows uint8 (..., row_bytes) of blocks as rows of type `qtype`_PLANES (see `block_formats.PLANES`), a copy."""
    block = BLOCK_FORMATS[qtype]
    blocks = data.unflatten(-1, (-1, block.num_bytes))
    parts = [blocks[..., at : at + size].flatten(-2) for at, size in PLANES[qtype]]
    wide = PLANE_FORMATS[qtype + PLANE_SUFFIX].row_bytes(block.num_columns(data.shape[-1]))
    padding = data.new_zeros(*data.shape[:-1], wide - data.shape[-1])
    return torch.cat([*parts, padding], dim=-1)


def from_planes(data: Tensor, qtype: str) -> Tensor:
    """The blocks of `qtype` that `to_planes` was given, a copy."""
    columns = PLANE_FORMATS[qtype + PLANE_SUFFIX].num_columns(data.shape[-1])
    num_blocks = columns // BLOCK_FORMATS[qtype].num_elements
    sizes = [num_blocks * size for _, size in PLANES[qtype]]
    planes = torch.split(data[..., : sum(sizes)], sizes, dim=-1)
    parts = {at: plane.unflatten(-1, (num_blocks, -1)) for (at, _), plane in zip(PLANES[qtype], planes, strict=True)}
    return torch.cat([parts[at] for at in sorted(parts)], dim=-1).flatten(-2)


def as_rows(matrix: ScaledMatrix) -> ScaledMatrix:
    """The same weight with codes, scales and zeros in rows, each without a gap; AWQ's words run along the columns."""
    codes, layout = matrix.codes, matrix.layout
    if layout == "awq":
        parts = [words_of_awq(part) for part in codes.split(_ROWS_AT_ONCE // 8, dim=1)]
        codes, layout = torch.cat(parts), "words"
    return replace(
        matrix,
        layout=layout,
        codes=codes.contiguous(),
        scales=matrix.scales.contiguous(),
        zeros=None if matrix.zeros is None else matrix.zeros.contiguous(),
    )
