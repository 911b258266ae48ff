"""Dense products and look-ups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_ROWS_AT_A_TIME = 512
"""Rows of a half-precision weight widened at once, so that a large weight is never held twice."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias in x.dtype; a weight of another dtype is widened a few rows at a time."""
    if weight.dtype == x.dtype:
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    parts = [functional.linear(x, rows.to(x.dtype)) for rows in weight.split(_ROWS_AT_A_TIME)]
    out = torch.cat(parts, dim=-1)
    return out if bias is None else out + bias.to(x.dtype)


def replace_ids(ids: Tensor, old: Sequence[int], new: int) -> Tensor:
    """ids with `new` in place of every id among `old`."""
    for value in old:
        ids = ids.masked_fill(ids == value, new)
    return ids


def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x with values in place of the given rows."""
    return x.index_copy(0, rows, values.to(x.dtype))


def add_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x with values added to the given rows."""
    return x.index_add(0, rows, values.to(x.dtype))


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, H, I) times weight (H, O, I), head by head, in x.dtype."""
    return torch.matmul(x.transpose(0, 1), weight.to(x.dtype).transpose(1, 2)).transpose(0, 1)


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[ids] in `dtype`."""
    return weight.index_select(0, ids).to(dtype)


def concat(parts: Sequence[Tensor]) -> Tensor:
    """The parts side by side."""
    return torch.cat(list(parts), dim=-1)
