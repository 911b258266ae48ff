"""Dense products and look-ups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias. x (..., I), weight (O, I), bias (O,) -> (..., O) in x.dtype.

    The weight may be stored in another floating type; it is then widened on the fly.

    Raises:
        ValueError: widths that do not fit.
        TypeError: a weight that is not floating point.
    """
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear: weight {tuple(weight.shape)}, expected (out, {x.shape[-1]})")
    if not weight.is_floating_point():
        raise TypeError(f"linear: weight of {weight.dtype}, expected a floating type")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")
    out: Tensor = ops(x).linear(x, weight, bias)
    return out


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The rows of weight (V, C) at ids (T,) -> (T, C) in `dtype` (the weight's own if None).

    Raises:
        TypeError: ids that are not integers.
        ValueError: a weight that is not a matrix.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: ids of {ids.dtype}, expected int32 or int64")
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight {tuple(weight.shape)}, expected (rows, width)")
    out: Tensor = ops(weight).embedding(ids, weight, weight.dtype if dtype is None else dtype)
    return out


def replace_ids(ids: Tensor, old: Sequence[int], new: int) -> Tensor:
    """ids (T,) with `new` in place of every id among `old`."""
    out: Tensor = ops(ids).replace_ids(ids, tuple(old), new)
    return out


def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x (T, C) with row rows[i] replaced by values[i], for rows (M,) int64 and values (M, C).

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_rows("put_rows", x, rows, values)
    out: Tensor = ops(x).put_rows(x, rows, values)
    return out


def add_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """x (T, C) with values[i] added to row rows[i], for rows (M,) int64 and values (M, C).

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_rows("add_rows", x, rows, values)
    out: Tensor = ops(x).add_rows(x, rows, values)
    return out


def _check_rows(op: str, x: Tensor, rows: Tensor, values: Tensor) -> None:
    if x.ndim != 2 or rows.ndim != 1 or values.shape != (rows.shape[0], x.shape[1]):
        raise ValueError(
            f"{op}: x {tuple(x.shape)}, rows {tuple(rows.shape)} and values {tuple(values.shape)},"
            " expected (T, C), (M,) and (M, C)"
        )


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's row times its own matrix. x (T, H, I), weight (H, O, I) -> (T, H, O) in x.dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.ndim != 3 or weight.ndim != 3 or weight.shape[0] != x.shape[1] or weight.shape[2] != x.shape[2]:
        raise ValueError(
            f"head_linear: x {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (T, H, I), (H, O, I)"
        )
    out: Tensor = ops(x).head_linear(x, weight)
    return out


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (..., C1), (..., C2), ... side by side -> (..., C1 + C2 + ...).

    Raises:
        ValueError: no parts, or parts that differ elsewhere than in width.
    """
    if not parts:
        raise ValueError("concat: no parts, expected at least one")
    for part in parts[1:]:
        if part.shape[:-1] != parts[0].shape[:-1]:
            raise ValueError(f"concat: part {tuple(part.shape)}, expected {tuple(parts[0].shape[:-1])} and a width")
    out: Tensor = ops(parts[0]).concat(parts)
    return out
